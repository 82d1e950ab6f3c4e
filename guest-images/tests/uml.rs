//! User Mode Linux boots behind passt, and takes commands.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use guest_images::{Images, UmlGuest, UmlKit, UmlOptions, host};

/// passt, ended on drop.
struct Passt(Child);

impl Passt {
    fn start(kit: &UmlKit, socket: &std::path::Path) -> Self {
        let mut command = kit.passt();
        command
            .args(["--vhost-user", "-f", "-4", "--no-dhcp-dns", "-D", "none"])
            .args(["-a", "10.0.2.15", "-n", "24", "-g", "10.0.2.2", "-i", "lo"])
            .args(["--map-host-loopback", "10.0.2.2", "-s"])
            .arg(socket);
        let child = host::bound(&command).stderr(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !socket.exists() {
            assert!(Instant::now() < deadline, "passt made no socket");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self(child)
    }
}

impl Drop for Passt {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_guest_boots_runs_commands_and_leaves_nothing_behind() {
    let kit = Images::of_workspace().unwrap().uml().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let _passt = Passt::start(&kit, &socket);
    let mut guest = UmlGuest::boot(&kit, &socket, &UmlOptions::default()).unwrap();
    eprintln!("Linux {}, features {}", guest.release(), guest.features());
    let second = Duration::from_secs(5);
    let output = guest
        .exec("echo one; echo two >&2; exit 3", second)
        .unwrap();
    assert_eq!((output.code, output.text.as_str()), (3, "one\ntwo\n"));
    let address = guest.exec("ip -4 addr show eth0", second).unwrap();
    assert!(address.text.contains("10.0.2.15/24"), "{}", address.text);
    let error = guest
        .exec("sleep 60", Duration::from_millis(300))
        .unwrap_err();
    assert!(format!("{error:#}").contains("sleep 60"), "{error:#}");

    let group = guest.pid();
    assert!(members(group) > 0);
    drop(guest);
    let deadline = Instant::now() + Duration::from_secs(5);
    while members(group) > 0 {
        assert!(Instant::now() < deadline, "the guest left processes behind");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_guest_without_a_back_end_is_an_error_that_says_so() {
    let kit = Images::of_workspace().unwrap().uml().unwrap();
    let options = UmlOptions {
        patience: Duration::from_secs(40),
        ..UmlOptions::default()
    };
    let error = UmlGuest::boot(&kit, "/nonexistent".as_ref(), &options).unwrap_err();
    assert!(format!("{error:#}").contains("no eth0"), "{error:#}");
}

/// How many processes are in `group` and not yet ended.
fn members(group: u32) -> usize {
    let stats = std::fs::read_dir("/proc").unwrap().flatten();
    stats
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok())
        .filter(|stat| {
            let fields: Vec<&str> = stat
                .rsplit(')')
                .next()
                .unwrap_or_default()
                .split(' ')
                .collect();
            // state, parent, group, counted from behind the name
            fields.get(3) == Some(&group.to_string().as_str()) && fields.get(1) != Some(&"Z")
        })
        .count()
}
