#!/bin/busybox sh
# Process 1 of the initrd on a boot disk: finds the disk's file system, adds the run's job to it, goes there.
# Where the guest has slept on the disk (hibernation), that guest goes on instead.
b=/bin/busybox
$b mount -t devtmpfs dev /dev
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
for module in /modules/*; do
    $b insmod "$module" || echo "vpmu: cannot load $module"
done
for word in $($b cat /proc/cmdline); do
    case $word in
    root=*) root=${word#root=} ;;
    resume=/dev/*) swap=${word#resume=/dev/} ;;
    esac
done
while [ ! -b "$root" ]; do $b sleep 0.01; done
[ ! -e "/sys/class/block/$swap/dev" ] || $b cat "/sys/class/block/$swap/dev" >/sys/power/resume 2>/dev/null
$b mount -t ext4 "$root" /root
# The second disk is the job, an archive without a file system around it.
(cd /root && $b cpio -idu) </dev/vdb 2>/dev/null
$b umount /sys
$b umount /proc
$b umount /dev
exec $b switch_root /root /init
