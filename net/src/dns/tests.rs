//! Failover and limits of the forwarder, on a virtual clock.

use super::*;
use crate::testkit::datagrams::{FakeHost, MACS, only_datagram, take};
use crate::udp::SocketError;

const QUERY: [u8; 24] = [
    0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, b'a', 4, b't', b'e', b's', b't', 0, 0, 1, 0, 1,
];

struct Rig {
    dns: Forwarder<FakeHost>,
    host: FakeHost,
    out: Outbox,
    start: Instant,
    now: Instant,
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

impl Rig {
    fn new(servers: &[&str]) -> Self {
        let mut dns = Forwarder::new(1);
        let servers: Vec<_> = servers.iter().map(|server| addr(server)).collect();
        dns.set_servers(&servers);
        let start = Instant::now();
        Self {
            dns,
            host: FakeHost::default(),
            out: Outbox::default(),
            start,
            now: start,
        }
    }

    fn ask(&mut self) {
        let guest = addr("10.0.2.15:4096");
        self.dns
            .handle_from_guest(guest, &QUERY, &mut self.host, self.now)
            .unwrap();
        self.pump();
    }

    fn pump(&mut self) {
        let dns = [10, 0, 2, 3].into();
        self.dns
            .pump(dns, MACS, 1500, &mut self.host, &mut self.out, self.now);
    }

    /// Lets time pass to `ms` after the start, timer by timer.
    fn at(&mut self, ms: u64) {
        let end = self.start + Duration::from_millis(ms);
        while let Some(due) = self.dns.poll_timeout().filter(|due| *due <= end) {
            self.now = due;
            self.dns.handle_timeout(&mut self.host, due);
            self.pump();
        }
        self.now = end;
    }

    /// Whom the query was sent to, in order.
    fn asked(&self) -> Vec<SocketAddr> {
        let sent = |wire: &std::rc::Rc<std::cell::RefCell<crate::testkit::datagrams::Wire>>| {
            wire.borrow().sent.first().map(|(to, _)| *to)
        };
        self.host.sockets.iter().filter_map(sent).collect()
    }

    /// The resolver answers what socket `index` sent.
    fn answer(&mut self, index: usize, code: u8) {
        let number = {
            let mut wire = self.host.sockets[index].borrow_mut();
            let (from, mut answer) = wire.sent[0].clone();
            answer[2] |= 0x80;
            answer[3] = code;
            wire.arrives.push_back((from, answer));
            wire.number
        };
        self.dns.handle_event(number);
        self.pump();
    }

    #[track_caller]
    fn guest_sees(&mut self, code: u8) {
        let (from, to, answer) = only_datagram(&mut self.out);
        assert_eq!(from, addr("10.0.2.3:53"));
        assert_eq!(to, addr("10.0.2.15:4096"));
        assert_eq!(answer[..2], QUERY[..2]);
        assert_eq!(answer[3] & 15, code);
        assert!(self.dns.is_empty());
        let open = self.host.sockets.iter().any(|wire| wire.borrow().open);
        assert!(!open, "a socket outlives its query");
    }
}

#[test]
fn an_answer_comes_back_under_the_guests_id() {
    let mut rig = Rig::new(&["127.0.0.53:53"]);
    rig.ask();
    rig.ask();
    assert_eq!(
        rig.asked(),
        [addr("127.0.0.53:53")],
        "a repeated query is one"
    );
    assert_ne!(rig.host.sockets[0].borrow().sent[0].1[..2], QUERY[..2]);
    rig.answer(0, 0);
    rig.guest_sees(0);
    assert_eq!(rig.dns.poll_timeout(), None);
    assert_eq!(rig.host.sockets[0].borrow().owner, Some(Owner::Dns));
    rig.ask();
    rig.dns.reset();
    assert!(rig.dns.is_empty());
    assert!(!rig.host.sockets[1].borrow().open);
}

#[test]
fn nxdomain_is_final() {
    let mut rig = Rig::new(&["192.0.2.1:53", "192.0.2.2:53"]);
    rig.ask();
    rig.answer(0, 3);
    rig.guest_sees(3);
    assert_eq!(rig.asked().len(), 1);
}

#[test]
fn silence_leads_to_the_next_resolver_and_a_late_answer_counts() {
    let mut rig = Rig::new(&["192.0.2.1:53", "[::1]:53"]);
    rig.ask();
    rig.at(1499);
    assert_eq!(rig.asked().len(), 1);
    rig.at(1500);
    assert_eq!(rig.asked(), [addr("192.0.2.1:53"), addr("[::1]:53")]);
    rig.answer(0, 0);
    rig.guest_sees(0);
    assert_eq!(rig.dns.tcp_upstream(), Some(addr("192.0.2.1:53")));
}

#[test]
fn a_failing_resolver_is_left_at_once() {
    for code in [2, 5] {
        let mut rig = Rig::new(&["192.0.2.1:53", "192.0.2.2:53"]);
        rig.ask();
        rig.answer(0, code);
        assert_eq!(rig.asked().len(), 2);
        rig.answer(1, 0);
        rig.guest_sees(0);
        assert_eq!(rig.dns.tcp_upstream(), Some(addr("192.0.2.2:53")));
    }
}

#[test]
fn when_all_fail_the_guest_hears_why() {
    let mut rig = Rig::new(&["192.0.2.1:53", "192.0.2.2:53"]);
    rig.ask();
    rig.answer(0, 2);
    rig.answer(1, 5);
    rig.guest_sees(5);
}

#[test]
fn a_transport_error_leads_to_the_next_resolver() {
    let mut rig = Rig::new(&["127.0.0.1:53", "192.0.2.2:53"]);
    rig.ask();
    rig.host.sockets[0]
        .borrow_mut()
        .errors
        .push_back(SocketError {
            to: addr("127.0.0.1:53"),
            from: None,
            kind: 3,
            code: 3,
            mtu: 0,
            payload_len: 24,
        });
    rig.dns.handle_event(0);
    rig.pump();
    assert_eq!(rig.asked().len(), 2);
}

#[test]
fn nobody_answers() {
    let mut rig = Rig::new(&["192.0.2.1:53", "192.0.2.2:53"]);
    rig.ask();
    rig.at(4999);
    assert_eq!(rig.asked().len(), 4);
    assert!(rig.out.is_empty());
    rig.at(5000);
    rig.guest_sees(2);
}

#[test]
fn without_resolvers_or_sockets_the_failure_is_immediate() {
    let mut rig = Rig::new(&[]);
    rig.ask();
    rig.guest_sees(2);
    let mut rig = Rig::new(&["192.0.2.1:53"]);
    rig.host.exhausted = true;
    rig.ask();
    rig.guest_sees(2);
}

#[test]
fn strangers_are_not_believed() {
    let mut rig = Rig::new(&["192.0.2.1:53", "192.0.2.2:53"]);
    rig.ask();
    {
        let mut wire = rig.host.sockets[0].borrow_mut();
        let mut answer = wire.sent[0].1.clone();
        answer[2] |= 0x80;
        // Nobody's, one that was not asked, and the right one with another id.
        wire.arrives
            .push_back((addr("198.51.100.1:53"), answer.clone()));
        wire.arrives
            .push_back((addr("192.0.2.2:53"), answer.clone()));
        answer[0] ^= 1;
        wire.arrives.push_back((addr("192.0.2.1:53"), answer));
    }
    rig.dns.handle_event(0);
    rig.pump();
    assert!(take(&mut rig.out).is_empty());
    rig.answer(0, 0);
    rig.guest_sees(0);
}

#[test]
fn pending_queries_are_bounded() {
    let mut rig = Rig::new(&["192.0.2.1:53"]);
    for port in 0..=256_u16 {
        let guest = SocketAddr::new([10, 0, 2, 15].into(), 1000 + port);
        let taken = rig
            .dns
            .handle_from_guest(guest, &QUERY, &mut rig.host, rig.now);
        let expected = if port < 256 {
            Ok(())
        } else {
            Err(DropReason::Full)
        };
        assert_eq!(taken, expected);
    }
    let reply = [0; 12];
    let mut response = reply;
    response[2] = 0x80;
    for bad in [&reply[..11], &response[..]] {
        let guest = addr("10.0.2.15:1");
        let taken = rig
            .dns
            .handle_from_guest(guest, bad, &mut rig.host, rig.now);
        assert_eq!(taken, Err(DropReason::BadDns));
    }
}
