//! Flows, their ends and their errors, on a virtual clock.

use std::time::{Duration, Instant};

use smoltcp::wire::{EthernetFrame, Ipv4Packet};

use super::table::{ONE_WAY, TWO_WAY};
use super::*;
use crate::config::{Forward, Protocol};
use crate::outbox::Outbox;
use crate::testkit::datagrams::{FakeHost, MACS, Wire, only_datagram, take};

struct Rig {
    config: Config,
    table: UdpTable<FakeHost>,
    host: FakeHost,
    out: Outbox,
    now: Instant,
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

impl Rig {
    fn new() -> Self {
        Self {
            config: Config::default(),
            table: UdpTable::default(),
            host: FakeHost::default(),
            out: Outbox::default(),
            now: Instant::now(),
        }
    }

    fn guest_sends(&mut self, port: u16, far: &str) -> Result<(), DropReason> {
        self.guest_sends_with(port, far, 64)
    }

    fn guest_sends_with(&mut self, port: u16, far: &str, hops: u8) -> Result<(), DropReason> {
        let mut frame = *b"headersdata";
        let slices = [VolatileSlice::from(&mut frame[..])];
        let datagram = GuestDatagram {
            guest: SocketAddr::from(([10, 0, 2, 15], port)),
            far: addr(far),
            hop_limit: hops,
            payload: Payload {
                frame: &slices,
                at: 7,
                len: 4,
            },
        };
        let config = &self.config;
        let to = |far| route(config, far);
        self.table
            .handle_from_guest(&datagram, to, &mut self.host, self.now)
    }

    fn wire(&self, index: usize) -> std::cell::RefMut<'_, Wire> {
        self.host.sockets[index].borrow_mut()
    }

    fn arrives(&mut self, index: usize, from: &str, payload: &[u8]) {
        let number = {
            let mut wire = self.wire(index);
            wire.arrives.push_back((addr(from), payload.to_vec()));
            wire.number
        };
        self.table.handle_event(number);
    }

    fn pump(&mut self) -> bool {
        self.table
            .pump(&self.config, MACS, 1500, &mut self.out, self.now)
    }

    fn after(&mut self, time: Duration) {
        self.now += time;
        self.table.handle_timeout(self.now);
    }

    /// Type, code, sender and quoted destination of the one ICMP error.
    #[track_caller]
    fn guest_hears(&mut self, kind: u8, code: u8, from: [u8; 4], far: [u8; 4]) {
        self.pump();
        let frames = take(&mut self.out);
        assert_eq!(frames.len(), 1);
        let ethernet = EthernetFrame::new_checked(&frames[0][..]).unwrap();
        let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
        assert_eq!(ip.payload()[..2], [kind, code]);
        assert_eq!(ip.src_addr().octets(), from);
        let quoted = Ipv4Packet::new_unchecked(&ip.payload()[8..]);
        assert_eq!(quoted.dst_addr().octets(), far);
    }
}

const GATEWAY: [u8; 4] = [10, 0, 2, 2];

#[test]
fn one_socket_serves_all_peers_of_a_guest_port() {
    let mut rig = Rig::new();
    rig.guest_sends(4096, "192.0.2.1:7").unwrap();
    rig.guest_sends(4096, "192.0.2.2:9").unwrap();
    rig.guest_sends(4097, "192.0.2.1:7").unwrap();
    assert_eq!(rig.host.sockets.len(), 2);
    assert_eq!(rig.wire(0).sent[1], (addr("192.0.2.2:9"), b"data".to_vec()));
    assert_eq!(rig.wire(0).hop_limit, Some(63));

    rig.arrives(0, "192.0.2.1:7", b"");
    assert!(!rig.pump());
    let (from, to, payload) = only_datagram(&mut rig.out);
    assert_eq!(from, addr("192.0.2.1:7"));
    assert_eq!(to, addr("10.0.2.15:4096"));
    assert!(payload.is_empty());
    rig.arrives(0, "192.0.2.9:7", b"stranger");
    rig.arrives(0, "192.0.2.1:8", b"stranger");
    rig.pump();
    assert!(rig.out.is_empty());
}

#[test]
fn flows_end_when_idle() {
    let mut rig = Rig::new();
    rig.guest_sends(1, "192.0.2.1:7").unwrap();
    rig.guest_sends(2, "192.0.2.1:7").unwrap();
    rig.arrives(1, "192.0.2.1:7", b"x");
    rig.pump();
    rig.after(ONE_WAY - Duration::from_millis(1));
    assert_eq!(rig.table.len(), 2);
    assert_eq!(
        rig.table.poll_timeout(),
        Some(rig.now + Duration::from_millis(1))
    );
    rig.after(Duration::from_millis(1));
    assert_eq!(rig.table.len(), 1);
    assert!(!rig.wire(0).open);
    rig.after(TWO_WAY - ONE_WAY - Duration::from_millis(1));
    assert!(rig.wire(1).open);
    rig.after(Duration::from_millis(1));
    assert!(rig.table.is_empty());
    assert_eq!(rig.table.poll_timeout(), None);
}

#[test]
fn the_flow_idle_longest_makes_room() {
    let mut rig = Rig::new();
    for port in 1..=MAX_FLOWS as u16 {
        rig.guest_sends(port, "192.0.2.1:7").unwrap();
        rig.now += Duration::from_micros(1);
    }
    rig.guest_sends(1, "192.0.2.1:7").unwrap();
    rig.guest_sends(9999, "192.0.2.1:7").unwrap();
    assert_eq!(rig.table.len(), MAX_FLOWS);
    assert!(rig.wire(0).open);
    assert!(!rig.wire(1).open);
    rig.host.exhausted = true;
    let refused = rig.guest_sends(10_000, "192.0.2.1:7");
    assert_eq!(refused, Err(DropReason::NoSocket));
}

#[test]
fn a_full_outbox_leaves_datagrams_in_their_socket() {
    let mut rig = Rig::new();
    rig.guest_sends(1, "192.0.2.1:7").unwrap();
    for _ in 0..300 {
        rig.arrives(0, "192.0.2.1:7", b"x");
    }
    assert!(rig.pump());
    assert_eq!(rig.out.len(), 256);
    assert!(rig.wire(0).arrives.len() >= 300 - 256 - batch::DATAGRAMS);
    assert!(rig.pump());
    assert_eq!(take(&mut rig.out).len(), 256);
    assert!(!rig.pump());
    assert_eq!(take(&mut rig.out).len(), 44);
}

#[test]
fn a_closed_port_is_told_to_the_guest() {
    let mut rig = Rig::new();
    rig.config.host_loopback = true;
    rig.guest_sends(1, "10.0.2.2:9").unwrap();
    assert_eq!(rig.wire(0).sent[0].0, addr("127.0.0.1:9"));
    let told = SocketError {
        to: addr("127.0.0.1:9"),
        from: Some([127, 0, 0, 1].into()),
        kind: 3,
        code: 3,
        mtu: 0,
        payload_len: 4,
    };
    rig.wire(0).errors.push_back(told);
    rig.wire(0).refuses = Some(libc::ECONNREFUSED);
    rig.guest_sends(1, "10.0.2.2:9").unwrap();
    assert_eq!(rig.wire(0).sent.len(), 2, "sent all the same");
    rig.guest_hears(3, 3, GATEWAY, GATEWAY);
    rig.wire(0).errors.push_back(SocketError {
        to: addr("198.51.100.1:9"),
        ..told
    });
    rig.table.handle_event(0);
    assert!(!rig.pump());
    assert!(rig.out.is_empty(), "nothing was sent there");
}

#[test]
fn routers_on_the_way_are_named() {
    let mut rig = Rig::new();
    assert!(rig.guest_sends_with(1, "192.0.2.1:33434", 1).is_err());
    rig.guest_hears(11, 0, GATEWAY, [192, 0, 2, 1]);
    rig.guest_sends_with(1, "192.0.2.1:33434", 2).unwrap();
    assert_eq!(rig.wire(0).hop_limit, Some(1));
    rig.wire(0).errors.push_back(SocketError {
        to: addr("192.0.2.1:33434"),
        from: Some([198, 51, 100, 1].into()),
        kind: 11,
        code: 0,
        mtu: 0,
        payload_len: 4,
    });
    rig.table.handle_event(0);
    rig.guest_hears(11, 0, [198, 51, 100, 1], [192, 0, 2, 1]);
}

#[test]
fn destinations_that_are_not_allowed_look_closed() {
    let mut rig = Rig::new();
    assert_eq!(rig.guest_sends(1, "10.0.2.2:9"), Err(DropReason::Vacant));
    rig.guest_hears(3, 3, GATEWAY, GATEWAY);
    assert_eq!(rig.guest_sends(1, "10.0.2.99:9"), Err(DropReason::Vacant));
    rig.guest_hears(3, 1, GATEWAY, [10, 0, 2, 99]);
    let _ = rig.guest_sends_with(1, "224.0.0.1:9", 1);
    rig.pump();
    assert!(rig.out.is_empty(), "no error about a group");
    for far in [
        "127.0.0.1:9",
        "0.0.0.0:9",
        "224.0.0.251:5353",
        "255.255.255.255:9",
        "192.0.2.1:0",
    ] {
        assert_eq!(
            rig.guest_sends(1, far),
            Err(DropReason::Unroutable),
            "{far}"
        );
    }
    assert!(rig.host.sockets.is_empty());
}

#[test]
fn an_unreachable_network_is_told_at_once() {
    let mut rig = Rig::new();
    rig.guest_sends(1, "192.0.2.1:9").unwrap();
    rig.wire(0).refuses = Some(libc::EACCES);
    assert_eq!(
        rig.guest_sends(1, "192.0.2.1:9"),
        Err(DropReason::HostRefused)
    );
    rig.guest_hears(3, 13, GATEWAY, [192, 0, 2, 1]);
}

#[test]
fn a_forward_admits_callers_and_carries_the_replies() {
    let mut rig = Rig::new();
    let forward = Forward {
        protocol: Protocol::Udp,
        host: addr("127.0.0.1:8081"),
        guest_port: 80,
    };
    let guest_ip = rig.config.guest_ip.into();
    rig.table
        .add_forward(&forward, guest_ip, &mut rig.host, rig.now)
        .unwrap();
    rig.arrives(0, "127.0.0.1:5555", b"hello");
    rig.pump();
    let (from, to, payload) = only_datagram(&mut rig.out);
    assert_eq!(from, addr("10.0.2.2:5555"));
    assert_eq!(to, addr("10.0.2.15:80"));
    assert_eq!(payload, b"hello");
    rig.guest_sends(80, "10.0.2.2:5555").unwrap();
    assert_eq!(rig.wire(0).sent[0].0, addr("127.0.0.1:5555"));
    rig.after(TWO_WAY * 2);
    assert_eq!(rig.table.len(), 1, "time does not end a forward");
    // But whoever has the caller's port on the host's loopback by now is out of reach.
    assert!(rig.guest_sends(80, "10.0.2.2:5555").is_err());
    assert_eq!(rig.wire(0).sent.len(), 1);
    rig.guest_sends(81, "192.0.2.1:7").unwrap();
    rig.table.reset();
    assert_eq!(rig.table.len(), 1, "nor does a reset");
    assert!(!rig.wire(1).open);
    assert_eq!(rig.wire(1).owner, Some(Owner::Flows));
}

#[test]
fn payloads_come_out_of_any_split() {
    let mut bytes = *b"headersdata";
    for split in 0..=bytes.len() {
        let (a, b) = bytes.split_at_mut(split);
        let frame = [VolatileSlice::from(a), VolatileSlice::from(b)];
        let payload = Payload {
            frame: &frame,
            at: 7,
            len: 4,
        };
        let mut seen = Vec::new();
        payload.for_each_slice(|slice| {
            let mut part = vec![0; slice.len()];
            slice.copy_to(&mut part[..]);
            seen.extend(part);
        });
        assert_eq!(seen, b"data");
    }
}
