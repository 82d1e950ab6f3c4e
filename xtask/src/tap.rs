//! Taps in the lab, for guests that are there to try or to measure one.

use anyhow::{Result, ensure};

/// `lab_tap NAME NETWORK GUEST`: as soon as there is an interface NAME, the lab is NETWORK.2 on it (a network
/// of 24 bits), and a DHCP server there gives NETWORK.GUEST to whoever asks.
pub(crate) const LAB_TAP: &str = r#"
lab_tap() {
    mkdir -p /var/lib/misc
    : >/tmp/udhcpd.leases
    cat >/tmp/udhcpd.conf <<END
start $2.$3
end $2.$3
interface $1
lease_file /tmp/udhcpd.leases
pidfile /tmp/udhcpd.pid
option subnet 255.255.255.0
option router $2.2
END
    (
        until ip addr add "$2.2/24" dev "$1" 2>/dev/null; do sleep 0.1; done
        ip link set "$1" up
        udhcpd /tmp/udhcpd.conf
    ) >/dev/null 2>&1 &
}
"#;

/// What the lab has to do so that `wonton run --net SPEC` finds its tap set up; nothing for other kinds of
/// network. The lab is 10.7.0.2, the guest 10.7.0.15. `None` when SPEC is of another kind.
pub(crate) fn setup(spec: &str) -> Result<Option<String>> {
    let mut parts = spec.split(',');
    if parts.next() != Some("tap") {
        return Ok(None);
    }
    let mut name = "tap0";
    for part in parts {
        match part.split_once('=') {
            Some(("name", value)) => name = value,
            Some(("fd", _)) => anyhow::bail!("the lab has no open tap to inherit; take name="),
            _ => {}
        }
    }
    // The name goes into a script; wonton tells what is wrong with others.
    ensure!(
        name.chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)),
        "`{name}` is no name for a tap"
    );
    Ok(Some(format!("{LAB_TAP}lab_tap {name} 10.7.0 15\n")))
}

#[cfg(test)]
mod tests {
    use super::setup;

    #[test]
    fn only_taps_need_anything() {
        assert_eq!(setup("user,rx=copy").unwrap(), None);
        let script = |spec| setup(spec).unwrap().unwrap();
        assert!(script("tap").contains("lab_tap tap0 "));
        assert!(script("tap,vhost=on,name=t1").ends_with("lab_tap t1 10.7.0 15\n"));
        assert!(setup("tap,name=$(reboot)").is_err());
        assert!(setup("tap,fd=3").is_err());
    }
}
