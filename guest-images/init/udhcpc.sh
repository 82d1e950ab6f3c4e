#!/bin/sh
# What udhcpc calls with the lease in its environment.
case $1 in
    deconfig)
        ip addr flush dev "$interface"
        ip link set "$interface" up
        ;;
    bound | renew)
        ip addr flush dev "$interface"
        ip addr add "$ip/${mask:-24}" dev "$interface"
        [ -n "$mtu" ] && ip link set "$interface" mtu "$mtu"
        for gateway in $router; do
            ip route replace default via "$gateway" dev "$interface" && break
        done
        : >/etc/resolv.conf
        [ -n "$domain" ] && echo "search $domain" >>/etc/resolv.conf
        for server in $dns; do
            echo "nameserver $server" >>/etc/resolv.conf
        done
        grep -q ' gateway$' /etc/hosts || echo "${router%% *} gateway" >>/etc/hosts
        env | grep -E '^(ip|mask|router|dns|mtu|lease|serverid|domain)=' | sort >/tmp/lease
        ;;
esac
