#!/bin/sh
# What the lab does: the far side's servers, then one guest after the other.
peer serve 127.0.0.1 >/tmp/serve.log 2>&1 &
echo nameserver 127.0.0.1 >/etc/resolv.conf
for kernel in 6.1 6.12; do
    cat /images/$kernel/initrd /job/overlay.cpio >/tmp/initrd-$kernel
done

guest() { # KERNEL CPUS TRANSPORT NET STORY [OPTIONS...]
    kernel=$1 cpus=$2 transport=$3 net=$4 story=$5
    shift 5
    wonton run --kernel /images/$kernel/bzImage --initrd /tmp/initrd-$kernel --cpus "$cpus" \
        --memory 512M --transport "$transport" --net "$net" "$@" \
        --cmdline "quiet loglevel=3 wonton.mode=cmd wonton.net=${guest_net:-dhcp} story=$story cpus=$cpus transport=$transport" </dev/null 2>/tmp/wonton.err
    code=$?
    [ -s /tmp/wonton.err ] && sed 's/^/wonton: /' /tmp/wonton.err
    return $code
}

ask() { # through the forward, as soon as the guest listens; the answer is for after the guest
    i=0
    while [ $i -lt 120 ]; do
        if peer ask 127.0.0.1 8001 >/tmp/answer; then
            echo true >/tmp/answered
            return
        fi
        sleep 0.5
        i=$((i + 1))
    done
}

user_stories() {
    for kernel in 6.1 6.12; do
        for cpus in 1 2; do
            report event=guest "name=linux-$kernel/${cpus}cpu"
            started=$(cut -d' ' -f1 /proc/uptime)
            echo false >/tmp/answered
            ask &
            asker=$!
            # Each kernel and each number of CPUs sees both.
            case $kernel/$cpus in
                6.1/1 | 6.12/2) transport=mmio ;;
                *) transport=pci ;;
            esac
            # A pair of queues for each CPU.
            guest $kernel $cpus $transport user,host-loopback=allow,queues=$cpus all -p 127.0.0.1:8001:7000
            code=$?
            wait $asker
            # Not while the guest has the console: lines would mix.
            report check=forward "ok=$(cat /tmp/answered)" "value=$(cat /tmp/answer)"
            took=$(awk "{print \$1 - $started}" /proc/uptime)
            if [ $code = 0 ]; then ok=true; else ok=false; fi
            report check=power-off ok=$ok "value=exit code $code after $took s"
        done
    done

    report event=guest name=rx-copy
    guest 6.12 1 pci user,host-loopback=allow,rx=copy copy
    report event=guest name=loopback-denied
    guest 6.12 1 pci user denied
    for kernel in 6.1 6.12; do
        if [ $kernel = 6.1 ]; then transport=pci; else transport=mmio; fi
        report event=guest name=reboot-$transport
        guest $kernel 1 $transport user reboot
        code=$?
        if [ $code = 10 ]; then ok=true; else ok=false; fi
        report check=exit-code ok=$ok "value=$code"
    done
}

for group in $(cat /job/groups); do
    case $group in
        user) user_stories ;;
        tap) guest_net=static . /job/tap.sh ;;
    esac
done
exit 0
