//! What can be seen without `/dev/vhost-net`: the thread beside the kernel, with a real tap where the machine
//! lets us make one. Whole guests on vhost-net are in `tests/tests/stories`.

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use super::*;
use crate::net::tap::TapDevice;
use crate::testing::MockDriver;
use crate::virtio::spec::{
    F_EVENT_IDX, NET_CTRL_GUEST_OFFLOADS, NET_CTRL_GUEST_OFFLOADS_SET, NET_CTRL_MQ,
    NET_CTRL_MQ_VQ_PAIRS_SET, NET_ERR, NET_F_CTRL_GUEST_OFFLOADS, NET_F_GUEST_CSUM,
    NET_F_GUEST_TSO4, NET_F_MQ, NET_OK,
};

const FEATURES: u64 = F_VERSION_1
    | F_EVENT_IDX
    | NET_F_CTRL_VQ
    | NET_F_MQ
    | NET_F_CTRL_GUEST_OFFLOADS
    | NET_F_GUEST_CSUM
    | NET_F_GUEST_TSO4;

/// A keeper with a control queue and a relay, in front of a tap with four queues.
struct Bench {
    driver: MockDriver,
    keeper: Keeper,
    kick: EventFd,
    relay: EventFd,
    broken: EventFd,
    name: &'static str,
}

impl Bench {
    fn new(name: &'static str) -> Option<Self> {
        let tap = match TapDevice::open(name, 4, None) {
            Ok(tap) => tap,
            Err(error) => {
                eprintln!("skipped: {error}");
                return None;
            }
        };
        let driver = MockDriver::new(16);
        let (activation, [_, _, kick]) = driver.activation(FEATURES);
        let ctrl = activation.queues.into_iter().nth(2).unwrap();
        let (relay, broken) = (event().unwrap(), event().unwrap());
        let job = Job {
            link: LinkState::new(tap.name()),
            tap,
            settings: Settings {
                offloads: accepted_offloads(FEATURES),
                pairs: 1,
            },
            control: Some(Control {
                queue: CtrlQueue::new(Vring::new(ctrl.queue, false), FEATURES, 4),
                index: 2,
                kick: ctrl.kick,
            }),
            ram: driver.ram(),
            interrupt: driver.interrupt.clone(),
            relays: vec![(1, relay.try_clone().unwrap())],
            broken: broken.try_clone().unwrap(),
        };
        let keeper = Keeper::spawn(job).map_err(|(error, _)| error).unwrap();
        Some(Self {
            driver,
            keeper,
            kick,
            relay,
            broken,
            name,
        })
    }

    fn command(&mut self, request: &[u8]) -> u8 {
        let answer = self.driver.send_command(request, &[2], false);
        self.kick.write(1).unwrap();
        wait(|| self.driver.answer(answer)).expect("no answer")
    }

    fn pairs(&mut self, count: u16) -> u8 {
        let [low, high] = count.to_le_bytes();
        self.command(&[NET_CTRL_MQ, NET_CTRL_MQ_VQ_PAIRS_SET, low, high])
    }

    /// Queues of the tap that the host uses.
    fn attached(&self) -> usize {
        let dir = format!("/sys/class/net/{}/queues", self.name);
        let names = std::fs::read_dir(dir).unwrap();
        names
            .filter(|name| {
                let name = name.as_ref().unwrap().file_name();
                name.to_string_lossy().starts_with("tx-")
            })
            .count()
    }
}

fn wait<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + std::time::Duration::from_secs(5);
    loop {
        let found = look();
        if found.is_some() || Instant::now() > end {
            return found;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn pairs_of_queues_are_those_that_the_driver_wants() {
    let Some(mut bench) = Bench::new("wtv1") else {
        return;
    };
    assert_eq!(bench.attached(), 1);
    for count in [4, 2, 3, 1, 4] {
        assert_eq!(bench.pairs(count), NET_OK);
        assert_eq!(bench.attached(), usize::from(count));
    }
    assert_eq!((bench.pairs(0), bench.pairs(5)), (NET_ERR, NET_ERR));
    assert_eq!(bench.attached(), 4);
    let job = bench.keeper.stop().unwrap();
    assert_eq!(job.settings.pairs, 4);
    assert!(bench.driver.interrupt.queue(2) > 0);
}

#[test]
fn offloads_are_those_that_the_driver_left() {
    let Some(mut bench) = Bench::new("wtv2") else {
        return;
    };
    let mut set = |bits: u64| {
        let mut request = vec![NET_CTRL_GUEST_OFFLOADS, NET_CTRL_GUEST_OFFLOADS_SET];
        request.extend(bits.to_le_bytes());
        bench.command(&request)
    };
    assert_eq!(set(NET_F_GUEST_TSO4), NET_ERR);
    assert_eq!(set(NET_F_GUEST_CSUM), NET_OK);
    let job = bench.keeper.stop().unwrap();
    assert_eq!(job.settings.offloads, Offloads::GUEST_CSUM);
}

#[test]
fn interrupts_are_passed_on_and_a_broken_ring_is_told() {
    let Some(bench) = Bench::new("wtv3") else {
        return;
    };
    let interrupt = Arc::clone(&bench.driver.interrupt);
    for count in 1..4 {
        bench.relay.write(1).unwrap();
        wait(|| (interrupt.queue(1) == count).then_some(())).expect("not passed on");
    }
    assert!(!interrupt.wants_reset());
    bench.broken.write(1).unwrap();
    wait(|| interrupt.wants_reset().then_some(())).expect("not told");
    bench.keeper.stop().unwrap();
}

#[test]
fn commands_are_answered_when_the_tap_is_gone() {
    let Some(mut bench) = Bench::new("wtv4") else {
        return;
    };
    let status = Command::new("ip").args(["link", "del", "wtv4"]).status();
    assert!(status.unwrap().success());
    // What the kernel makes of a ring without its tap.
    bench.broken.write(1).unwrap();
    assert_eq!(bench.pairs(2), NET_OK);
    assert!(!bench.driver.interrupt.wants_reset());
    let job = bench.keeper.stop().unwrap();
    assert!(job.link.is_gone());
}

#[test]
fn a_host_without_vhost_is_told_what_to_do() {
    match VhostPairs::open(1) {
        Ok(pairs) => assert_ne!(pairs.features & F_VERSION_1, 0),
        Err(error) => assert!(error.hint().is_some(), "{error}"),
    }
}
