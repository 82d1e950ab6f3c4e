//! The lab for real: needs QEMU, and the packages in the cache or the network.

use std::time::{Duration, Instant};

use guest_images::lab::{LabImage, LabJob, run_lab};
use guest_images::{Images, Kernel, target_dir};

/// The lab; where it cannot be had, these tests fail and say why.
fn lab() -> LabImage {
    Images::of_workspace()
        .and_then(|images| images.lab())
        .unwrap_or_else(|error| panic!("no lab: {error:#}"))
}

#[test]
fn a_job_has_kvm_and_network_and_gives_back_records_files_and_its_exit_code() {
    let lab = lab();
    let job = LabJob::new(
        "report check=kvm ok=$(test -c /dev/kvm && echo true)\n\
         report check=vhost ok=$(test -c /dev/vhost-net && test -c /dev/net/tun && echo true)\n\
         report text='say \"hi\"\\there' release=$(uname -r)\n\
         cat /data | tr a-z A-Z | lab-send upper\n\
         ip -4 addr show eth0 | grep -q 192.168.76.15 || exit 1\n\
         for k in 6.1 6.12; do test -s /images/$k/bzImage -a -s /images/$k/initrd || exit 2; done\n\
         exit 7\n",
    )
    .file("/data", 0o644, *b"some data\n")
    .timeout(Duration::from_secs(120));
    let result = run_lab(&lab, &job, &target_dir().join("test-lab-console.log")).unwrap();
    assert_eq!(result.exit, Some(7), "{:?}", result.ensure_success());
    assert!(result.ensure_success().is_err());
    assert_eq!(result.files["upper"], b"SOME DATA\n");
    assert_eq!(result.records[0]["ok"], true);
    assert_eq!(result.records[1]["ok"], true);
    assert_eq!(result.records[2]["text"], "say \"hi\"\\there");
    assert_eq!(
        result.records[2]["release"],
        lab.guest(Kernel::Trixie612)
            .unwrap()
            .kernel
            .release
            .as_str()
    );
}

#[test]
fn a_job_that_hangs_is_killed() {
    let lab = lab();
    let started = Instant::now();
    let job = LabJob::new("sleep 1000\n").timeout(Duration::from_secs(5));
    let result = run_lab(&lab, &job, &target_dir().join("test-lab-hang-console.log")).unwrap();
    assert!(result.timed_out && result.exit.is_none());
    assert!(started.elapsed() < Duration::from_secs(20));
    assert!(
        result
            .ensure_success()
            .unwrap_err()
            .to_string()
            .contains("was killed")
    );
}
