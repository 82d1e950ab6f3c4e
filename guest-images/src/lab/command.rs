//! The QEMU command line of the lab.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use crate::host;

use super::image::LabImage;
use super::job::LabJob;

/// The lab's processor: all that QEMU emulates, with SVM for the KVM inside; less what its SVM does
/// not get right for nested guests. XSETBV is not intercepted, so KVM loses track of XCR0; and guests
/// with five-level page tables crash after a while.
const CPU: &str = "max,+svm,+npt,-la57,-xsave";

/// QEMU, with the serial ports still to be added by the caller.
///
/// QEMU dies with the thread that starts it, even if that is killed (`setpriv` of util-linux asks
/// the kernel for that).
pub(super) fn qemu(lab: &LabImage, job: &LabJob, initrd: &Path, mode: &str, more: &str) -> Command {
    let mut command = match host::find("setpriv") {
        Some(setpriv) => {
            let mut command = Command::new(setpriv);
            command.args(["--pdeathsig", "KILL"]).arg(&lab.qemu);
            command
        }
        None => Command::new(&lab.qemu),
    };
    let append = format!(
        "console=ttyS0 quiet loglevel=3 reboot=t panic=-1 mitigations=off lab.mode={mode} {more}"
    );
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU])
        .args(["-smp", &job.cpus.to_string(), "-m", &format!("{}M", job.memory_mib)])
        .arg("-kernel")
        .arg(&lab.kernel.bzimage)
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", append.trim_end()])
        .args(["-netdev", "user,id=net,net=192.168.76.0/24,host=192.168.76.2,dns=192.168.76.3,dhcpstart=192.168.76.15"])
        .args(["-device", "virtio-net-pci,netdev=net,romfile="])
        .args(["-device", "virtio-rng-pci"]);
    command
}

/// A value for QEMU's option syntax, where a comma is doubled.
pub(super) fn escaped(path: &Path) -> OsString {
    path.to_string_lossy().replace(',', ",,").into()
}
