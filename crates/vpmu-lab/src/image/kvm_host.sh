#!/usr/bin/busybox sh
# Process 1 of the KVM host: runs a VMM on stock KVM with the guest inside.
# /vpmu/job (written by vpmu) says how:
#   vmm      qemu-system-ARCH (stock), or vpmu-vmm (this project's)
#   options  its options
#   append   the guest's kernel command line
#   vcpus    how many
#   skew     yes: the host's clock ticks at another rate than the guest's
#   settle   seconds to wait first
#   trace    yes: count by KVM's tracepoints while the guest measures
#
# The guest's first serial port is this console. Under QEMU its second one
# carries the `meter --sync` dialogue: meter says begin or end and waits for a
# line, and meanwhile this takes a snapshot of the host's accounts. vpmu-vmm
# takes it by itself when the guest rings its doorbell.

b=/usr/bin/busybox
$b mkdir -p /applets
$b --install -s /applets
export PATH=/usr/bin:/applets LC_ALL=C

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t debugfs debugfs /sys/kernel/debug
stty -opost -echo
. /vpmu/job
echo 1 > /proc/sys/kernel/printk

# x86: KVM is not part of the kernel.
for module in /vpmu/modules/*; do
    [ -e "$module" ] && insmod "$module"
done

report() { printf '\036%s\n' "$1"; }

stats=
for file in /sys/kernel/debug/kvm/*exit*; do
    stats="$stats ${file##*/}"
done

# Reads with the shell alone: a process more would be part of the account.
snapshot() {
    read -r cpu < /proc/stat
    text=
    for name in $stats; do
        read -r value < "/sys/kernel/debug/kvm/$name"
        text="$text${text:+,}\"$name\":$value"
    done
}

# With a processor for each of several vCPUs, each keeps its own.
pin() {
    [ -e /sys/devices/system/cpu/cpu$((vcpus - 1)) ] && [ "$vcpus" -gt 1 ] || return
    read -r qemu < /run/qemu.pid
    for task in /proc/"$qemu"/task/*; do
        read -r name < "$task/comm"
        case $name in
        CPU*KVM) name=${name#CPU }
            taskset -pc "${name%%/*}" "${task##*/}" > /dev/null ;;
        esac
    done
}

# The kernel accounts a whole tick to whatever the tick interrupts. Host and
# guest tick at the same rate, so the host would look at the same moment of the
# guest's tick every time. With its clock made 1.4 % fast it looks at all of
# them in turn. Only shares are taken from this clock.
[ "$skew" = yes ] && adjtimex -q -t 10137

# A guest of ours that has used all the time of two looks, with no exit but for
# the host's own interrupts, turns in a circle with its interrupts off: even a
# busy guest sets its next tick. One that has used none of thirty has lost the
# interrupt that it waits for: even an idle one has timers. Neither ever ends,
# so this does.
guard() {
    looks=0
    while sleep 4; do
        snapshot
        read -r all < /sys/kernel/debug/kvm/exits
        read -r irqs < /sys/kernel/debug/kvm/irq_exits
        # shellcheck disable=SC2086 # the fields are words
        set -- $cpu
        if [ $((all - irqs)) = "$own" ]; then
            looks=$((looks + 1 + 14 * ((${10} - used) > 350)))
        else
            looks=0
        fi
        own=$((all - irqs)) used=${10}
        [ $looks -ge 30 ] || continue
        report "{\"host\":{\"vmm\":\"$vmm\",\"status\":1,\"stuck\":true}}"
        poweroff -f
    done
}
[ -e /guest/job.cpio ] && [ "$trace" = no ] && [ -e /sys/kernel/debug/kvm/irq_exits ] && guard &

# The guest's own initrd (without a command), or ours with the job.
initrd=
if [ -e /guest/own.cpio ]; then
    initrd=/guest/own.cpio
elif [ -e /guest/job.cpio ]; then
    initrd=/guest/initrd
    cat /guest/guest.cpio /guest/job.cpio > $initrd
fi
rm /guest/guest.cpio

# Accounts by the kernel's own histograms of KVM's tracepoints. The guest's
# doorbell, a write of 1 or 2 to port 0x5650, is a tracepoint too and switches
# them. Who was woken by what is only in the order of two of them.
tracing=/sys/kernel/tracing
marks=$tracing/instances/marks
kvm=events/kvm
counted='kvm_exit:exit_reason kvm_msr:write,ecx kvm_inj_virq:vector kvm_userspace_exit:reason'
ordered='kvm_vcpu_wakeup kvm_inj_virq'

trace_begin() {
    mount -t tracefs tracefs $tracing
    cd $tracing || return
    echo 16384 > buffer_size_kb
    # Its one processor runs both vCPUs: one that polls takes the other's time, and one that is
    # interrupted when it has just woken the other has locks that the other needs.
    echo 0 > /sys/module/kvm/parameters/halt_poll_ns
    echo NO_WAKEUP_PREEMPTION > /sys/kernel/debug/sched/features
    # An event takes one trigger of a kind: the end has an event of its own.
    # shellcheck disable=SC2016 # fields, not variables
    echo 'e:vpmu/doorbell kvm/kvm_pio port=$port val=$val' > dynamic_events
    begin=$kvm/kvm_pio/trigger
    end=events/vpmu/doorbell/trigger
    for event in $counted; do
        name=${event%%:*}
        echo "hist:keys=${event#*:}:pause" > $kvm/$name/trigger
        echo "enable_hist:kvm:$name if port == 0x5650 && val == 1" >> $begin
        echo "disable_hist:kvm:$name if port == 0x5650 && val == 2" >> $end
    done
    for name in $ordered; do
        echo 1 > $kvm/$name/enable
    done
    echo 0 > tracing_on
    echo "traceon if port == 0x5650 && val == 1" >> $begin
    echo "traceoff if port == 0x5650 && val == 2" >> $end
    # And this script hears of it.
    mkdir $marks
    echo 'port == 0x5650 && val == 2' > $marks/$kvm/kvm_pio/filter
    echo 1 > $marks/$kvm/kvm_pio/enable
}

# {"trace":{"kvm_msr":{"1,1760":514},...,"woken":{"0xec":12,"lost":0}}}: of each
# wake-up of a halted vCPU, the interrupt that was injected next. The guest gives
# it the time before it begins anew.
trace_take() {
    text=
    for event in $counted; do
        name=${event%%:*}
        text="$text\"$name\":{$(awk '/^\{.*hitcount:/ {
                gsub(/[{}]|[a-z_]+:/, ""); gsub(/ *, */, ",")
                printf "%s\"%s\":%d", comma, $1, $2; comma = ","
            }' $kvm/$name/hist)},"
        echo "hist:keys=${event#*:}:clear" >> $kvm/$name/trigger
    done
    report "{\"trace\":{$text\"woken\":{$(awk '
        /LOST [0-9]+ EVENTS/ { lost++ }
        /kvm_vcpu_wakeup:/ { if ($1 in woken) count["nothing"]++; woken[$1] }
        / kvm_inj_virq:/ && ($1 in woken) { delete woken[$1]; count[$NF]++ }
        END {
            for (vector in count) printf "\"%s\":%d,", vector, count[vector]
            printf "\"lost\":%d", lost
        }' trace)}}}"
    echo > trace
}

run_vmm() {
    # With the libraries it was built with, which may be older than this host.
    ours() {
        /vpmu/lib/ld-linux-x86-64.so.2 --library-path /vpmu/lib /vpmu/vpmu-vmm "$@" < /dev/null
    }
    # shellcheck disable=SC2086 # the options are words
    ours $options --kernel /guest/kernel ${initrd:+--initrd $initrd} --append "$append"
    status=$?
    # Saved at its guest's wish: it goes on in another process.
    saved=${options##*--save=}
    saved=${saved%% *}
    while [ "$status" = 4 ]; do
        ours --save="$saved" --restore "$saved"
        status=$?
    done
    report "{\"host\":{\"vmm\":\"vpmu-vmm\",\"status\":$status}}"
}

if [ "$vmm" = vpmu-vmm ] && [ "$trace" = yes ]; then
    trace_begin
    sleep "$settle"
    { run_vmm; echo gone > $marks/trace_marker; } &
    # None of its guests takes half as long. One that does turns in a circle.
    { sleep 60
      report '{"host":{"vmm":"vpmu-vmm","status":0,"stuck":true}}'
      poweroff -f; } &
    # Not by the shell itself, which reads single bytes, nor by cat, which splices:
    # trace_pipe loses some.
    dd bs=4096 if=$marks/trace_pipe 2> /dev/null | while read -r line; do
        case $line in
        *gone)
            cat /run/traces
            poweroff -f ;;
        *) trace_take >> /run/traces ;;
        esac
    done
elif [ "$vmm" = vpmu-vmm ]; then
    sleep "$settle"
    run_vmm
    poweroff -f
fi

mkfifo /run/sync.in /run/sync.out
sleep "$settle"
# When QEMU ends, whatever the reason, the dialogue below ends too.
( "$vmm" $options \
      -kernel /guest/kernel -initrd /guest/initrd -append "$append" \
      -serial stdio -chardev pipe,id=sync,path=/run/sync -serial chardev:sync \
      < /dev/null &
  echo $! > /run/qemu.pid
  wait $!
  echo "gone $?" > /run/sync.out ) &

exec 3<> /run/sync.out 4<> /run/sync.in
mark=$(printf '\036')
while read -r line <&3; do
    case $line in
    "${mark}begin")
        pin
        snapshot
        begin="{\"cpu\":\"$cpu\",\"exits\":{$text}}"
        echo go >&4 ;;
    "${mark}end")
        snapshot
        end="{\"cpu\":\"$cpu\",\"exits\":{$text}}"
        echo go >&4 ;;
    "$mark"*) record=$line ;;
    gone*) status=${line#gone }
        break ;;
    esac
done
report "{\"host\":{\"vmm\":\"$($vmm --version | head -n 1)\",\"status\":$status}}"
[ -n "$record" ] && printf '%s\n' "$record"
[ -n "$end" ] && report "{\"kvm\":{\"begin\":$begin,\"end\":$end}}"
poweroff -f
