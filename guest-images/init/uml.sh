#!/bin/sh
# The /init of a UML guest; see guest-images/src/uml/guest.rs for what it talks to.
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts
mount -t devpts pts /dev/pts
mount -t tmpfs tmp /tmp
export PATH=/bin:/usr/bin HOME=/root TERM=dumb
hostname guest
# nothing but the lines below may come out of the console
dmesg -n 1
stty -echo -onlcr
ulimit -n 65536

for module in $(cat /mod/order); do
    insmod "/mod/$module.ko" || echo "module $module was not loaded"
done
ip link set lo up
if [ ! -e /sys/class/net/eth0 ]; then
    echo "there is no eth0: the kernel found no back-end at its socket"
    poweroff -f
fi
# these arrive from the kernel command line
ip addr add "${guest_ip:-10.0.2.15/24}" dev eth0
ip link set eth0 up mtu "${guest_mtu:-1500}"
ip route add default via "${guest_gw:-10.0.2.2}"
echo 1024 65535 >/proc/sys/net/ipv4/ip_local_port_range

echo "@@ready $(cat /sys/class/net/eth0/device/features 2>/dev/null) $(uname -r)"
while IFS=' ' read -r id command; do
    echo "@@begin $id"
    (cd /tmp && eval "$command") </dev/null 2>&1
    printf '\n@@end %s %s\n' "$id" "$?"
done
poweroff -f
