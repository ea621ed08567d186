#!/usr/bin/busybox sh
# Process 1 of every guest: makes a small system, runs one command under
# `meter`, reports, powers off. In a user's own system, which is complete,
# cloud-init starts it (seed.rs). /vpmu/job (written by vpmu) says how:
#   output   stream: the command writes to the console as it goes
#            buffer: into a file printed afterwards, so that the console's
#            cost is not part of the figures; its last MiB
#   meter    options for meter
#   control  the terminal meter talks to
#   settle   seconds to wait first
#   profile  yes: tell the profile in each perf.data, too
#   reset    yes: where the VMM has no switch to power off, reset
#
# Lines that begin with the byte 0x1e are for vpmu and hold JSON.

if [ $$ = 1 ]; then
    b=/usr/bin/busybox
    $b mkdir -p /applets
    $b --install -s /applets
    export PATH=/usr/bin:/applets HOME=/root TERM=dumb LC_ALL=C

    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    mount -t devtmpfs devtmpfs /dev
    mkdir -p /dev/shm /dev/pts
    mount -t tmpfs tmpfs /dev/shm
    mount -t devpts devpts /dev/pts
    mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
    # For su(1): reports often come from users without rights.
    mkdir -p /etc /home/user
    chown 1000:1000 /home/user
    chmod 1777 /tmp
    for user in root:0:/root user:1000:/home/user nobody:65534:/; do
        id=${user#*:}
        echo "${user%%:*}:x:${id%%:*}:${id%%:*}::${id#*:}:/bin/sh" >> /etc/passwd
        echo "${user%%:*}:x:${id%%:*}:" >> /etc/group
    done
    ln -s /proc/self/fd /dev/fd
    ln -s /proc/self/fd/0 /dev/stdin
    ln -s /proc/self/fd/1 /dev/stdout
    ln -s /proc/self/fd/2 /dev/stderr
fi

. /vpmu/job
# Both terminals pass bytes as they are.
stty -opost -echo
stty -opost -echo < "$control"

report() { printf '\036%s\n' "$1"; }

# Kernel messages stay out of the output; a panic is still printed.
echo 1 > /proc/sys/kernel/printk
# perf sees everything, with symbols.
echo -1 > /proc/sys/kernel/perf_event_paranoid
echo 0 > /proc/sys/kernel/kptr_restrict
# kernel.perf_cpu_time_max_percent stays as it is: without that limit a design
# in which a sample costs more than a sampling period never finishes. Where the
# kernel lowered the rate for it, the report says so.
for module in /vpmu/modules/*; do
    [ ! -e "$module" ] || insmod "$module" || echo "vpmu: cannot load $module"
done
# A watchdog would take one of the counters, unless the user asks for it (nmi_watchdog=1, softlockup_panic=1).
case $(cat /proc/cmdline) in
    *watchdog* | *lockup*) ;;
    *) echo 0 > /proc/sys/kernel/watchdog 2>/dev/null ;;
esac

counters=$(dmesg | sed -n 's/.*hw perfevents:.* driver, \(.*\) counters.*/\1/p')
general=$(dmesg | sed -n -e 's/.*\.\.\. generic \(registers\|counters\): *\([0-9]*\).*/\2/p' \
    -e 's/.*vpmu_pmu: \([0-9]*\) counters.*/\1/p')
report "{\"guest\":{\"kernel\":\"$(uname -r)\",\"counters\":\"$counters\",\"general\":\"$general\"}}"

cd /root
# What the kernel still does in the background is over after that.
sleep "$settle"
# find compares whole seconds.
touch -d "@$(($(date +%s) - 1))" /vpmu/begun
report '{"vpmu":"command"}'
[ "$output" = stream ] && report '{"vpmu":"output"}'
meter $meter -- sh /vpmu/run < "$control" > "$control"
if [ "$output" = buffer ]; then
    report '{"vpmu":"output"}'
    tail -c 1048576 /vpmu/output
fi
report '{"vpmu":"end"}'

rate=$(cat /proc/sys/kernel/perf_event_max_sample_rate)
. /vpmu/recordings.sh
recordings > /vpmu/recordings
while read -r data; do
    perf report --stats -i "$data" 2>/dev/null | awk -v rate="$rate" '
        / stats:$/ { events = ($0 !~ /^Aggregated/); next }
        $2 != "events:" { next }
        events && $1 == "LOST_SAMPLES" { lost += $3 }
        !events { count[$1] = $3 }
        END {
            printf "\036{\"perf\":{\"samples\":%d,\"lost_records\":%d,", count["SAMPLE"], count["LOST"]
            printf "\"lost_samples\":%d,\"throttled\":%d,", lost, count["THROTTLE"]
            printf "\"max_sample_rate\":%d}}\n", rate
        }'
    [ "$profile" = yes ] || continue
    # A line is "12  ,gzip  ,libc.so.6  ,[k] name": samples, process, file, ring and function, whose name may have commas.
    # What a file without symbols executes has its name.
    perf report --stdio --no-children -g none -F sample,comm,dso,sym -t , -i "$data" 2>/dev/null | awk -F ' *,' '
        !/^ *[0-9]+ *,/ { next }
        {
            samples = $1 + 0
            process = $2
            file = $3
            sub(/^[^,]*,[^,]*,[^,]*,/, "")
            ring = substr($0, 2, 1) == "k" ? ";[kernel];" : ";"
            name = substr($0, 5)
            sub(/ +$/, "", name)
            stack = process ring (name ~ /^0x/ ? "[" file "]" : name)
            gsub(/["\\]/, "_", stack)
            folded[stack] += samples
        }
        END {
            printf "\036{\"profile\":{\"folded\":{"
            for (stack in folded) {
                printf "%s\"%s\":%d", comma, stack, folded[stack]
                comma = ","
            }
            print "}}}"
        }'
done < /vpmu/recordings
if [ "$reset" = yes ] && ! dmesg | grep -q 'ACPI: .*supports .*S5'; then
    reboot -f
fi
poweroff -f
