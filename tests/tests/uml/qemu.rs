//! Another front-end: Debian's QEMU, which emulates the processor, with a stock kernel.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_images::{Kernel, console, host};

use crate::far::{Far, Lab};
use crate::serve::Serve;
use crate::{Row, row};

/// An emulated boot takes half a minute on a machine that does nothing else.
const PATIENCE: Duration = Duration::from_secs(240);
const MEMORY: &str = "512M";
const JOB: &str = include_str!("qemu.sh");

/// Without MSI-X vectors: vhost with them and without KVM brings QEMU 7.2 down
/// (`msix_set_vector_notifiers`, called by `vhost_net_start`).
const CARD: &str = "virtio-net-pci,romfile=,vectors=0,netdev=net";

pub(crate) fn rows() -> Vec<Row> {
    vec![row("qemu/boots-twice", boots_twice)]
}

/// The guest gets its address by DHCP and downloads; a reset, and it does so again.
fn boots_twice() -> Result<()> {
    let lab = Lab::get()?;
    let far = Far::start(lab)?;
    let serve = Serve::start("user,host-loopback=allow")?;
    let dir = tempfile::tempdir()?;
    let mut qemu = Qemu::start(lab, &far, &serve, dir.path())?;
    qemu.wait_for_boots(1)?;
    qemu.reset()?;
    qemu.wait_for_boots(2)?;
    let stderr = serve.stderr();
    ensure!(!stderr.contains("ERROR"), "wonton said: {stderr}");
    Ok(())
}

struct Qemu<'d> {
    child: Child,
    dir: &'d Path,
}

impl<'d> Qemu<'d> {
    fn start(lab: &Lab, far: &Far, serve: &Serve, dir: &'d Path) -> Result<Self> {
        let program = host::QEMU.installed(lab.images.progress())?;
        let guest = lab.images.guest(Kernel::Trixie612)?;
        let peer = std::fs::read(&lab.peer)?;
        let files: [(&str, u32, &[u8]); 2] = [
            ("bin/peer", 0o755, &peer),
            ("job.sh", 0o755, JOB.as_bytes()),
        ];
        let initrd = dir.join("initrd");
        std::fs::write(&initrd, guest.with_files(&files)?)?;
        let at = |name: &str| dir.join(name).display().to_string();
        let child = Command::new(program)
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", MEMORY])
            .args(["-machine", "q35,memory-backend=ram"])
            .arg("-object")
            .arg(format!(
                "memory-backend-memfd,id=ram,size={MEMORY},share=on"
            ))
            .arg("-kernel")
            .arg(&guest.kernel.bzimage)
            .arg("-initrd")
            .arg(&initrd)
            .arg("-append")
            .arg(format!(
                "console=ttyS0 quiet mitigations=off panic=-1 wonton.mode=cmd PEER_PORTS={}",
                far.base()
            ))
            .args(["-serial", &format!("file:{}", at("console"))])
            .args([
                "-monitor",
                &format!("unix:{},server=on,wait=off", at("monitor")),
            ])
            .arg("-chardev")
            .arg(format!(
                "socket,id=wonton,path={}",
                serve.socket().display()
            ))
            .args(["-netdev", "vhost-user,id=net,chardev=wonton"])
            .args(["-device", CARD])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(dir.join("stderr"))?)
            .spawn()
            .context("cannot start QEMU")?;
        Ok(Self { child, dir })
    }

    fn text(&self, name: &str) -> String {
        let bytes = std::fs::read(self.dir.join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until the guest has done its job that often, each time well.
    fn wait_for_boots(&mut self, wanted: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.text("console");
            let mut boots = 0;
            for record in console::records(&log) {
                let check = record.get("check").and_then(|check| check.as_str());
                let good = record.get("ok").and_then(serde_json::Value::as_bool);
                ensure!(check.is_none() || good == Some(true), "{record:?}");
                boots += usize::from(check == Some("done"));
            }
            if boots >= wanted {
                return Ok(());
            }
            let ended = self.child.try_wait()?;
            ensure!(
                ended.is_none() && Instant::now() < deadline,
                "boot {wanted} is not done (QEMU ended: {ended:?}); the console ends with: {}; QEMU said: {}",
                &log[log.floor_char_boundary(log.len().saturating_sub(1000))..],
                self.text("stderr")
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The reset button.
    fn reset(&self) -> Result<()> {
        let mut monitor = UnixStream::connect(self.dir.join("monitor"))?;
        monitor.write_all(b"system_reset\n")?;
        // Closed before it was read, it would not be carried out.
        std::thread::sleep(Duration::from_millis(500));
        Ok(())
    }
}

impl Drop for Qemu<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
