//! Shell functions for jobs in the lab: how each VMM boots a guest.

/// The machine monitor that boots the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Vmm {
    /// Ours
    Wonton,
    /// QEMU's microvm machine with `-netdev user`
    Qemu,
}

impl Vmm {
    /// The name used on command lines and in results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Wonton => "wonton",
            Self::Qemu => "qemu",
        }
    }
}

/// The variables `net` (what wonton gets as `--net`) and `netdev` (QEMU, with the id `n0`) choose another
/// network than the user-mode one.
///
/// `boot VMM KERNEL MODE…`: runs the guest to its end, its console on stdout with a record
/// `init` that says how many milliseconds after exec its init ran.
pub(crate) const BOOT: &str = r#"
boot() {
    vmm=$1 kernel=$2
    shift 2
    append="quiet loglevel=3 $*"
    case $vmm in
        wonton)
            # where the uncompressed kernel is there for the peer, both get that
            image=/images/$kernel/vmlinux
            [ -e $image ] || image=/images/$kernel/bzImage
            xtask agent boot -- wonton run --kernel $image --initrd /images/$kernel/initrd \
                --cpus 1 --memory 512M --cmdline "$append" --net "${net:-user,host-loopback=allow}" --boot-timer \
                </dev/null 2>/tmp/vmm.err
            ;;
        qemu)
            xtask agent boot -- qemu-system-x86_64 -M microvm,pit=on,pic=on,rtc=on -accel kvm -cpu host \
                -smp 1 -m 512M -kernel /images/$kernel/vmlinux -initrd /images/$kernel/initrd \
                -append "console=ttyS0 reboot=t panic=-1 $append" -nodefaults -no-user-config -display none -no-reboot -serial stdio \
                -netdev "${netdev:-user,id=n0}" -device virtio-net-device,netdev=n0 </dev/null 2>/tmp/vmm.err
            ;;
    esac
    code=$?
    report event=end code=$code
    [ -s /tmp/vmm.err ] && sed 's/^/vmm: /' /tmp/vmm.err
    return $code
}
"#;

/// `far_side`: the servers the guest's scripts expect, on the lab's loopback and on its taps.
pub(crate) const FAR_SIDE: &str = r#"
far_side() {
    mkdir -p /tmp/www
    dd if=/dev/urandom of=/tmp/www/payload bs=1M count=${payload_mib:-16} 2>/dev/null
    (cd /tmp/www && sha256sum payload >payload.sha256)
    httpd -p 8080 -h /tmp/www
    iperf3 -s -D
    xtask agent dns smoke.test=192.0.2.77 &
    echo nameserver 127.0.0.1 >/etc/resolv.conf
}
"#;
