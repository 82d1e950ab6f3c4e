#!/bin/sh
# What the guest in QEMU does after it has its address.
run() { # NAME COMMAND...: reports the command's last line, ok when it exits with 0
    name=$1
    shift
    if value=$("$@" 2>&1); then ok=true; else ok=false; fi
    report "check=$name" "ok=$ok" "value=$(echo "$value" | tail -n 1)"
}

run dhcp grep '^ip=10.0.2.15$' /tmp/lease
run features cat /sys/class/net/eth0/device/features
run download peer get 10.0.2.2 16777216
run upload peer put 10.0.2.2 4194304
run udp peer udp 10.0.2.2
report check=done ok=true
# until the reset button is pressed
sleep 100000
