//! Against a real tap, where the machine lets us make one.

use std::process::Command;
use std::time::{Duration, Instant};

use net::nic::VnetHdr;

use super::*;
use crate::net::engine::Scratch;
use crate::net::features::offered_features;
use crate::testing::{MockDriver, Received, conformance};

const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

/// A tap, or `None` (and a line that says so) on a machine without.
fn tap(name: &str) -> Option<TapDevice> {
    match TapDevice::open(name, 1, None) {
        Ok(device) => Some(device),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn ip(arguments: &str) {
    let arguments = arguments.split(' ');
    let status = Command::new("ip").args(arguments).status();
    assert!(status.unwrap().success());
}

/// Is `address`, in `10.99.N.2`, there? (RFC 826)
fn arp_request(net: u8) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(GUEST_MAC);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(GUEST_MAC);
    frame.extend([10, 99, net, 2, 0, 0, 0, 0, 0, 0, 10, 99, net, 1]);
    frame
}

fn is_arp_reply(frame: &[u8]) -> bool {
    frame.len() >= 42 && frame[..6] == GUEST_MAC && frame[12..14] == [8, 6] && frame[21] == 2
}

/// A card in front of a tap, whose other side is the host.
struct Bench {
    driver: MockDriver,
    engine: crate::net::engine::NetEngine,
    scratch: Scratch,
}

impl Bench {
    fn new(device: TapDevice) -> Self {
        let mut driver = MockDriver::new(256);
        driver.fill_rx(2048);
        let backend = Tap::new(device);
        let features = offered_features(backend.offloads());
        let engine = driver.engine(features, Box::new(backend));
        Self {
            driver,
            engine,
            scratch: Scratch::default(),
        }
    }

    fn send(&mut self, frame: &[u8]) {
        assert!(self.driver.send(&VnetHdr::default(), frame, &[]));
        self.engine.process_tx(&mut self.scratch, Instant::now());
        self.driver.collect_tx();
    }

    /// Waits for a frame that `wanted` likes.
    fn receive(&mut self, wanted: impl Fn(&[u8]) -> bool, patience: Duration) -> Option<Received> {
        let end = Instant::now() + patience;
        while Instant::now() < end {
            while self.engine.process_rx(&mut self.scratch, Instant::now()) {}
            let found = self.driver.collect_rx();
            self.driver.fill_rx(2048);
            if let Some(found) = found.into_iter().find(|frame| wanted(&frame.bytes)) {
                return Some(found);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    fn host_answers(&mut self, net: u8, patience: Duration) -> bool {
        self.send(&arp_request(net));
        self.receive(is_arp_reply, patience).is_some()
    }
}

const LONG: Duration = Duration::from_secs(5);
const SHORT: Duration = Duration::from_millis(200);

#[test]
fn frames_pass_both_ways_and_a_tap_that_was_down_comes_back() {
    let Some(device) = tap("wtt1") else { return };
    ip("addr add 10.99.1.1/24 dev wtt1");
    let mut bench = Bench::new(device);
    assert!(bench.host_answers(1, LONG));
    ip("link set wtt1 down");
    assert!(!bench.host_answers(1, SHORT));
    ip("link set wtt1 up");
    assert!(bench.host_answers(1, LONG));
}

/// The sum of RFC 1071.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes.chunks(2);
    let mut sum: u32 = words
        .map(|word| u32::from(word[0]) << 8 | word.get(1).map_or(0, |low| u32::from(*low)))
        .sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    (!(sum as u16)).to_be_bytes()
}

/// An echo request to `10.99.N.1` with so many bytes of data, and its length.
fn echo_request(net: u8, data: usize) -> Vec<u8> {
    let mut icmp = vec![8, 0, 0, 0, 1, 2, 3, 4];
    icmp.extend((0..data).map(|at| (at % 251) as u8));
    let sum = checksum(&icmp);
    icmp[2..4].copy_from_slice(&sum);
    let [high, low] = u16::try_from(20 + icmp.len()).unwrap().to_be_bytes();
    let mut ip = vec![0x45, 0, high, low, 0, 0, 0x40, 0, 64, 1, 0, 0];
    ip.extend([10, 99, net, 2, 10, 99, net, 1]);
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum);
    let mac = std::fs::read_to_string(format!("/sys/class/net/wtt{net}/address")).unwrap();
    let mut frame: Vec<u8> = mac
        .trim()
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    frame.extend(GUEST_MAC);
    frame.extend([8, 0]);
    frame.extend(ip);
    frame.extend(icmp);
    frame
}

#[test]
fn a_frame_longer_than_expected_is_whole() {
    let Some(device) = tap("wtt6") else { return };
    ip("addr add 10.99.6.1/24 dev wtt6");
    let mut bench = Bench::new(device);
    assert!(bench.host_answers(6, LONG));
    // The card was told of the old MTU.
    ip("link set wtt6 mtu 9000");
    for data in [100, 8000, 8001, 64, 5000, 1472, 1473] {
        let request = echo_request(6, data);
        bench.send(&request);
        let is_reply =
            |frame: &[u8]| frame.len() >= 42 && frame[12..14] == [8, 0] && frame[34] == 0;
        let reply = bench.receive(is_reply, LONG).expect("no reply");
        assert_eq!(reply.bytes[38..request.len()], request[38..], "{data}");
        assert_eq!(
            usize::from(reply.num_buffers),
            (request.len() + 12).div_ceil(2048)
        );
    }
}

#[test]
fn a_removed_tap_is_quiet() {
    let Some(device) = tap("wtt2") else { return };
    ip("addr add 10.99.2.1/24 dev wtt2");
    let mut bench = Bench::new(device);
    assert!(bench.host_answers(2, LONG));
    ip("link del wtt2");
    assert!(!bench.host_answers(2, SHORT));
    assert!(!bench.engine.is_broken());
    // No busy loop.
    assert!(!bench.engine.process_rx(&mut bench.scratch, Instant::now()));
    assert_eq!(bench.engine.deadline(), None);
}

#[test]
fn a_tap_has_one_user() {
    let Some(device) = tap("wtt3") else { return };
    let error = TapDevice::open("wtt3", 1, None).unwrap_err();
    assert!(matches!(error, TapError::Busy(_)), "{error}");
    let error = TapDevice::open("wtt3", 2, None).unwrap_err();
    assert!(matches!(error, TapError::OneQueue(_)), "{error}");
    let error = TapDevice::open("lo", 1, None).unwrap_err();
    assert!(matches!(error, TapError::NotATap(_)), "{error}");
    use std::os::fd::AsRawFd as _;
    let adopted = TapDevice::adopt(&[device.fd().as_raw_fd()]).unwrap();
    assert_eq!(adopted.name(), "wtt3");
}

#[test]
fn queues_come_and_go() {
    let mut device = match TapDevice::open("wtt4", 4, Some(9000)) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("skipped: {error}");
            return;
        }
    };
    assert_eq!((device.queues().len(), device.mtu()), (4, 9000));
    for count in [4, 1, 3, 2, 4, 1] {
        device.attach(count).unwrap();
    }
    device.set_offloads(device.offloads()).unwrap();
    device.drain();
}

#[test]
fn conforms() {
    if tap("wtt5").is_some() {
        conformance::run(|| Box::new(Tap::new(TapDevice::open("wtt5", 1, None).unwrap())));
    }
}
