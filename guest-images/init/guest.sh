#!/bin/sh
# The guest's /init; see guest-images/src/guest.rs for the command line it understands.
mount -t proc proc /proc
read -r up _ </proc/uptime
echo "WONTON {\"event\":\"init\",\"uptime_s\":$up}"
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
export PATH=/bin:/usr/bin HOME=/root TERM=linux
hostname guest

mode=shell script= script64= net=dhcp
for word in $(cat /proc/cmdline); do
    case $word in
        wonton.mode=*) mode=${word#*=} ;;
        wonton.script=*) script=${word#*=} ;;
        wonton.script64=*) script64=${word#*=} ;;
        wonton.net=*) net=${word#*=} ;;
    esac
done

for module in $(cat /mod/order); do
    insmod "/mod/$module.ko" || echo "guest: module $module was not loaded" >&2
done
ip link set lo up

if [ "$net" = dhcp ] && [ -e /sys/class/net/eth0 ]; then
    ip link set eth0 up
    # stays in the background after the first lease, to renew it
    udhcpc -i eth0 -n -t 8 -T 1 -O mtu -O search -s /etc/udhcpc.sh >/tmp/udhcpc.log 2>&1 ||
        echo "guest: no DHCP lease on eth0, see /tmp/udhcpc.log" >&2
fi

finish() {
    report event=exit "code=$1"
    sync
    poweroff -f
    sleep 60
}

case $mode in
    smoke) script=/smoke.sh ;;
    cmd)
        if [ -n "$script64" ]; then
            script=/tmp/job.sh
            echo "$script64" | base64 -d >$script
        fi
        : "${script:=/job.sh}"
        ;;
    *)
        address=$(ip -4 -o addr show eth0 2>/dev/null | awk '{print $4}')
        echo "guest: Linux $(uname -r), eth0 ${address:-has no address}; leave with exit or Ctrl-D"
        cd /root
        setsid cttyhack sh -l
        finish $?
        ;;
esac
cd /tmp
sh "$script"
finish $?
