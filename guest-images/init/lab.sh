#!/bin/sh
# The lab's /init: brings the machine up, runs /job/run.sh, tells the exit code on ttyS1, powers off.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
export PATH=/bin:/usr/bin HOME=/root TERM=linux
hostname lab

mode=job rows= cols=
for word in $(cat /proc/cmdline); do
    case $word in
        lab.mode=*) mode=${word#*=} ;;
        lab.rows=*) rows=${word#*=} ;;
        lab.cols=*) cols=${word#*=} ;;
    esac
done

for module in $(cat /mod/order); do
    insmod "/mod/$module.ko" || echo "lab: module $module was not loaded"
done

ip link set lo up
ip link set eth0 up
ip addr add 192.168.76.15/24 dev eth0
ip route add default via 192.168.76.2
# anyone may ping, as on a usual distribution
echo '0 2147483647' >/proc/sys/net/ipv4/ping_group_range

stty -F /dev/ttyS1 raw -echo
[ -n "$rows" ] && stty -F /dev/ttyS0 rows "$rows" cols "$cols"
cd /tmp
echo start >/dev/ttyS1
if [ "$mode" = console ]; then
    setsid cttyhack sh /job/run.sh
else
    sh /job/run.sh </dev/null
fi
echo "exit $?" >/dev/ttyS1
poweroff -f
sleep 60
