#!/bin/sh
# What each guest does. The far side is the lab, reached as 10.0.2.2.
gateway=10.0.2.2

run() { # NAME COMMAND...: reports the command's last line, ok when it exits with 0
    name=$1
    shift
    if value=$("$@" 2>&1); then ok=true; else ok=false; fi
    report "check=$name" "ok=$ok" "value=$(echo "$value" | tail -n 1)"
}

expect() { # NAME GOT WANT
    if [ "$2" = "$3" ]; then
        report "check=$1" ok=true "value=$2"
    else
        report "check=$1" ok=false "value=got ${2:-nothing}, wanted $3"
    fi
}

lease() { sed -n "s/^$1=//p" /tmp/lease | tr '\n' ' ' | sed 's/ $//'; }

report event=uname "release=$(uname -r)"
story= cpus= transport=
for word in $(cat /proc/cmdline); do
    case $word in
        story=*) story=${word#*=} ;;
        cpus=*) cpus=${word#*=} ;;
        transport=*) transport=${word#*=} ;;
    esac
done

case $story in
    copy)
        run download-64m peer get $gateway 67108864
        exit 0
        ;;
    denied)
        run refused peer refused $gateway 7001
        exit 0
        ;;
    tap*) . /tap.sh ;;
    reboot)
        reboot -f
        sleep 60
        exit 1
        ;;
esac

peer greet 0.0.0.0:7000 1 >/tmp/greet 2>&1 &
greeter=$!

expect cpus "$(nproc)" "$cpus"
# The driver uses as many pairs of queues as there are CPUs, of those that the card has.
expect queues "$(ls -d /sys/class/net/eth0/queues/tx-* | wc -l) $(ethtool -l eth0 | awk '/Combined/ {print $2}' | tail -n 1)" "$cpus $cpus"

# Which bus the card is on, and what kind of interrupt each of its queues has.
wires() {
    readlink -f /sys/class/net/eth0/device | grep -o '/pci[^/]*\|/LNRO0005[^/]*' | tr -d '\n'
    grep -o 'PCI-MSI[^ ]* *[^ ]* *[^ ]* *virtio0-.*\|IO-APIC.*virtio0' /proc/interrupts |
        awk '{printf " %s:%s", $1, $NF}'
}
case $transport in
    pci)
        wires='/pci0000:00 PCI-MSIX:virtio0-config PCI-MSIX:virtio0-input.0 PCI-MSIX:virtio0-output.0'
        if [ "$cpus" = 2 ]; then
            wires="$wires PCI-MSIX:virtio0-input.1 PCI-MSIX:virtio0-output.1"
        fi
        ;;
    mmio) wires='/LNRO0005:00 IO-APIC:virtio0' ;;
esac
expect wires "$(wires | sed 's/PCI-MSI[^ ]*:virtio/PCI-MSIX:virtio/g')" "$wires"
expect dhcp "$(lease ip) $(lease router) $(lease dns) $(lease mtu)" "10.0.2.15 10.0.2.2 10.0.2.3 1500"
run ping-gateway ping -c 3 -i 0.2 -W 2 $gateway
run ping-host ping -c 3 -i 0.2 -W 2 192.168.76.15
run dns-udp peer dns 10.0.2.3 udp
run dns-tcp peer dns 10.0.2.3 tcp
run download-64m peer get $gateway 67108864
run upload-64m peer put $gateway 67108864
run connections-200-in-a-row peer sequence $gateway 200
run connections-50-at-once peer parallel $gateway 50
run refused-at-once peer refused $gateway 9
run udp-echo peer udp $gateway

again() { # the network works, by DHCP, after something happened to the card
    i=0
    while [ ! -e /sys/class/net/eth0 ] && [ $i -lt 50 ]; do
        sleep 0.1
        i=$((i + 1))
    done
    ip link set eth0 up && rm -f /tmp/lease &&
        udhcpc -i eth0 -n -q -t 8 -T 1 -O mtu -O search -s /etc/udhcpc.sh && peer sequence $gateway 20
}

# the lab asks through the forward; both wait for each other
i=0
while kill -0 $greeter 2>/dev/null && [ $i -lt 300 ]; do
    sleep 0.1
    i=$((i + 1))
done

killall udhcpc 2>/dev/null
link_down_up() { ip link set eth0 down && sleep 0.2 && again; }
run link-down-up link_down_up

rebind() {
    device=$(basename "$(readlink -f /sys/class/net/eth0/device)")
    for _ in 1 2 3; do
        echo "$device" >/sys/bus/virtio/drivers/virtio_net/unbind || return 1
        echo "$device" >/sys/bus/virtio/drivers/virtio_net/bind || return 1
    done
    again
}
run driver-rebind rebind
transport_rebind() { # the same for the driver of the bus
    bus=$(dirname "$(readlink -f /sys/class/net/eth0/device)")
    driver=$(readlink -f "$bus/driver")
    for _ in 1 2 3; do
        basename "$bus" >"$driver/unbind" || return 1
        basename "$bus" >"$driver/bind" || return 1
    done
    if [ $transport = pci ]; then # unplugged, then found again: its BAR is sized anew
        echo 1 >"$bus/remove" || return 1
        echo 1 >/sys/bus/pci/rescan || return 1
    fi
    again
}
run transport-rebind transport_rebind
run download-after-rebind peer get $gateway 4194304
exit 0
