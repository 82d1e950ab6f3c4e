#!/bin/sh
# What a guest on a tap may ask of the lab, by HTTP.
echo "Content-Type: text/plain"
echo
later() { # COMMANDS: when the answer is out
    setsid sh -c "sleep 1; $1" >/dev/null 2>&1 </dev/null &
}
pid=$(pidof wonton)
case $QUERY_STRING in
    count) echo "$(ls /proc/$pid/fd | wc -l) descriptors, $(ls /proc/$pid/task | wc -l) threads" ;;
    queues) ls -d /sys/class/net/tap0/queues/tx-* | wc -l ;;
    down-up) later "ip link set tap0 down; sleep 3; ip link set tap0 up" ;;
    remove) later "iproute2 link del tap0" ;;
esac
