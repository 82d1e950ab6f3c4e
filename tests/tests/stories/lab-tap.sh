# What the lab does for guests on a tap: 10.7.0.1 is the lab, 10.7.0.2 the guest.
# The guest asks for things to happen to its tap through a web server (do.sh).
new_tap() { # [multi_queue]
    iproute2 tuntap add dev tap0 mode tap vnet_hdr $1
    ip addr add 10.7.0.1/24 dev tap0
    ip link set tap0 up
}

wait_for() { # SECONDS COMMAND...: until it succeeds
    i=$(($1 * 10))
    shift
    until "$@" >/dev/null 2>&1 || [ $i = 0 ]; do
        sleep 0.1
        i=$((i - 1))
    done
}

verdict() { # NAME VALUE: ok when the command before succeeded
    if [ $? = 0 ]; then report "check=$1" ok=true "value=$2"; else report "check=$1" ok=false "value=$2"; fi
}

mkdir -p /tmp/www/cgi-bin
cp /job/do.sh /tmp/www/cgi-bin/do
new_tap
httpd -p 8080 -h /tmp/www
PEER_PORTS=7100 peer data 10.7.0.1 >/tmp/serve-tap.log 2>&1 &
iperf3 -s -D
iproute2 link del tap0

tap_story() { # KERNEL VHOST TRANSPORT
    report event=guest "name=tap/linux-$1/vhost-$2/$3"
    new_tap
    guest $1 1 $3 tap,name=tap0,vhost=$2 tap
    code=$?
    [ $code = 10 ]
    verdict reboot "exit code $code"
    grep -q 'tap0 is down' /tmp/wonton.err && grep -q 'tap0 is up again' /tmp/wonton.err
    verdict down-up-in-log "$(grep -c tap0 /tmp/wonton.err) lines"
    guest $1 1 $3 tap,name=tap0,vhost=$2 tap-removed
    code=$?
    [ $code = 0 ]
    verdict power-off "exit code $code"
    [ "$(grep -c 'tap0 was removed' /tmp/wonton.err)" = 1 ]
    verdict removed-in-log "$(grep -c tap0 /tmp/wonton.err) lines"
}

queues_story() { # KERNEL VHOST TRANSPORT
    report event=guest "name=tap-two-queues/linux-$1/vhost-$2/$3"
    new_tap multi_queue
    guest $1 2 $3 tap,name=tap0,vhost=$2,queues=2 tap-queues
    code=$?
    [ $code = 0 ]
    verdict power-off "exit code $code"
    iproute2 link del tap0
}

for transport in pci mmio; do
    for vhost in on off; do
        for kernel in 6.12 6.1; do
            tap_story $kernel $vhost $transport
            queues_story $kernel $vhost $transport
        done
    done
done
