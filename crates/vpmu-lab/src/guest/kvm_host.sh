#!/usr/bin/busybox sh
# Process 1 of the KVM host: runs a VMM on stock KVM with the guest inside.
# /vpmu/job (written by vpmu) says how:
#   vmm      qemu-system-ARCH (stock), or vpmu-vmm (this project's)
#   options  its options
#   append   the guest's kernel command line
#   vcpus    how many
#   skew     yes: the host's clock ticks at another rate than the guest's
#   settle   seconds to wait first
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

# With more than one processor, each vCPU keeps its own.
pin() {
    [ "$vcpus" -gt 1 ] || return
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
# busy guest sets its next tick. It never ends, so this does.
guard() {
    circles=0
    while sleep 4; do
        snapshot
        read -r all < /sys/kernel/debug/kvm/exits
        read -r irqs < /sys/kernel/debug/kvm/irq_exits
        # shellcheck disable=SC2086 # the fields are words
        set -- $cpu
        if [ $((all - irqs)) = "$own" ] && [ $((${10} - used)) -gt 350 ]; then
            circles=$((circles + 1))
        else
            circles=0
        fi
        own=$((all - irqs)) used=${10}
        [ $circles -lt 2 ] && continue
        report "{\"host\":{\"vmm\":\"$vmm\",\"status\":1,\"stuck\":true}}"
        poweroff -f
    done
}
[ -e /guest/job.cpio ] && [ "$vcpus" = 1 ] && [ -e /sys/kernel/debug/kvm/irq_exits ] && guard &

# The guest's own initrd (without a command), or ours with the job.
initrd=
if [ -e /guest/own.cpio ]; then
    initrd=/guest/own.cpio
elif [ -e /guest/job.cpio ]; then
    initrd=/guest/initrd
    cat /guest/guest.cpio /guest/job.cpio > $initrd
fi
rm /guest/guest.cpio

if [ "$vmm" = vpmu-vmm ]; then
    sleep "$settle"
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
