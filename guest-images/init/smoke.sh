#!/bin/sh
# The guest's half of `cargo xtask smoke`. The far side (10.0.2.2 is the VMM's host) runs iperf3
# on port 5201, a web server on 8080 with /payload and /payload.sha256, and a name server that
# knows smoke.test. Each check reports one line.
gateway=10.0.2.2

check() { # NAME VALUE: ok when VALUE is not empty
    if [ -n "$2" ]; then
        report "check=$1" ok=true "value=$2"
    else
        report "check=$1" ok=false "value=${3:-no answer}"
    fi
}

lease=$(sed -n 's/^ip=//p' /tmp/lease 2>/dev/null)
check dhcp "$lease" "no lease"

rtt=$(ping -c 3 -i 0.2 -W 2 $gateway 2>/tmp/err | sed -n 's/^round-trip.*= [^/]*\/\([^/]*\)\/.*/\1/p')
check ping "${rtt:+$rtt ms}"

address=$(nslookup -type=a smoke.test 2>&1 | sed -n 's/^Address: *\([0-9.]*\)$/\1/p' | tail -n 1)
if [ "$address" = 192.0.2.77 ]; then
    check dns "smoke.test is $address"
else
    check dns "" "got ${address:-no answer}"
fi

wget -q -O /tmp/payload "http://$gateway:8080/payload" 2>/tmp/err
want=$(wget -q -O - "http://$gateway:8080/payload.sha256" 2>/dev/null | cut -c1-64)
got=$(sha256sum /tmp/payload 2>/dev/null | cut -c1-64)
size=$(stat -c %s /tmp/payload 2>/dev/null)
if [ -n "$want" ] && [ "$want" = "$got" ]; then
    check sha256 "$size bytes, $(echo "$got" | cut -c1-12)"
else
    check sha256 "" "wanted ${want:-?}, got ${got:-nothing} over ${size:-0} bytes"
fi
rm -f /tmp/payload

mbits() { # the receiver's rate out of iperf3 -f m
    sed -n 's/.* \([0-9.]*\) Mbits\/sec.*receiver.*/\1/p' /tmp/iperf | tail -n 1
}
iperf3 -c $gateway -t "${seconds:-3}" -f m -R >/tmp/iperf 2>&1
rate=$(mbits)
check iperf3-down "${rate:+$rate Mbit/s}" "$(tail -n 1 /tmp/iperf)"
iperf3 -c $gateway -t "${seconds:-3}" -f m >/tmp/iperf 2>&1
rate=$(mbits)
check iperf3-up "${rate:+$rate Mbit/s}" "$(tail -n 1 /tmp/iperf)"
