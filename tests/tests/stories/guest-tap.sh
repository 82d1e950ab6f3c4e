# What a guest on a tap does. The far side is the lab, 10.7.0.1; it does things to the tap when asked.
gateway=10.7.0.1
export PEER_PORTS=7100

lab() { wget -q -O - "http://$gateway:8080/cgi-bin/do?$1"; }

address() {
    i=0
    while [ ! -e /sys/class/net/eth0 ] && [ $i -lt 50 ]; do
        sleep 0.1
        i=$((i + 1))
    done
    ip addr add 10.7.0.2/24 dev eth0 && ip link set eth0 up
}

reachable() { # ATTEMPTS: until the lab answers
    i=0
    until ping -c 1 -W 1 $gateway; do
        i=$((i + 1))
        [ $i -lt "$1" ] || return 1
    done
}

iperf() { # OPTIONS...
    iperf3 -c $gateway -t 2 -f m "$@" >/tmp/iperf 2>&1
    grep receiver /tmp/iperf || { cat /tmp/iperf; return 1; }
}

rebind() {
    device=$(basename "$(readlink -f /sys/class/net/eth0/device)")
    for _ in 1 2 3; do
        peer get $gateway 268435456 >/tmp/get 2>&1 &
        getter=$!
        sleep 0.7
        kill -0 $getter || { cat /tmp/get; return 1; }
        echo "$device" >/sys/bus/virtio/drivers/virtio_net/unbind || return 1
        kill $getter
        echo "$device" >/sys/bus/virtio/drivers/virtio_net/bind || return 1
        address && reachable 5 || return 1
    done
}

down_up() {
    lab down-up && sleep 2 || return 1
    if ping -c 1 -W 1 $gateway; then
        echo the tap did not go down
        return 1
    fi
    reachable 10 && peer get $gateway 4194304
}

removed() {
    lab remove && sleep 2 || return 1
    ping -c 2 -W 1 $gateway && return 1
    # the card is there, and whoever waits for it does not spin
    device=$(basename "$(readlink -f /sys/class/net/eth0/device)")
    echo "$device" >/sys/bus/virtio/drivers/virtio_net/unbind &&
        echo "$device" >/sys/bus/virtio/drivers/virtio_net/bind && address
}

address
case $story in
    tap-removed)
        run ping-after-reboot reachable 5
        run removed removed
        exit 0
        ;;
    tap-queues)
        run ping reachable 5
        expect guest-queues "$(ls -d /sys/class/net/eth0/queues/rx-* | wc -l)" 2
        expect tap-queues "$(lab queues)" 2
        run iperf3-4-streams iperf -P 4
        run driver-rebind rebind
        exit 0
        ;;
esac

run ping reachable 5
run iperf3-down iperf -R
run iperf3-up iperf
run download peer get $gateway 16777216
run upload peer put $gateway 16777216
lab count >/tmp/before
run driver-rebind rebind
run download-after-rebind peer get $gateway 4194304
expect baseline "$(lab count)" "$(cat /tmp/before)"
run down-up down_up
reboot -f
sleep 60
exit 1
