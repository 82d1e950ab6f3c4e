//! A guest, a host and a clock that a test moves by hand.
//!
//! ```text
//! let mut t = Script::established(Setup::default());
//! t.host_writes(b"hello");
//! t.guest_sees(seg().seq(1).ack(1).psh().data(b"hello"));
//! t.guest_sends(seg().seq(1).ack(6));
//! t.quiet();
//! ```
//!
//! Sequence numbers are relative: 0 is the SYN of whoever sends. A template segment has the ACK bit
//! and a large window, so a test shows only what differs.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use smoltcp::wire::{EthernetFrame, Ipv4Packet};
use vm_memory::VolatileSlice;

use super::host::{FakeHost, Far};
use super::ring::MemoryRing;
use crate::checksum::Sum;
use crate::flow::FlowKey;
use crate::nic::{Offloads, Stop, VNET_HDR_F_NEEDS_CSUM, VnetHdr};
use crate::tcp::Run;
use crate::tcp::flows::{Flows, Limits, Readiness, Refusal, RxPath, TcpLink};
use crate::tcp::segment::{Flags, Segment, SynOptions};
use crate::tcp::seq::SeqNum;
use crate::tcp::wire::{Macs, parse};

const GUEST_ISS: SeqNum = SeqNum(u32::MAX - 2);

/// What a test varies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) rx: RxPath,
    pub(crate) offloads: Offloads,
    pub(crate) limits: Limits,
    pub(crate) mss: Option<u16>,
    pub(crate) shift: Option<u8>,
    pub(crate) window: u16,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            rx: RxPath::Ring,
            offloads: Offloads::empty(),
            limits: Limits::default(),
            mss: Some(1460),
            shift: Some(7),
            window: 65535,
        }
    }
}

/// Runs `test` over every receive path, with and without each offload that changes frames.
pub(crate) fn on_all_paths(test: impl Fn(Setup)) {
    for (_, rx) in RxPath::ALL {
        for offloads in [Offloads::empty(), Offloads::GUEST_CSUM] {
            test(Setup {
                rx,
                offloads,
                ..Setup::default()
            });
        }
    }
}

/// A segment in relative numbers.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Seg {
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) flags: Flags,
    pub(crate) window: Option<u16>,
    pub(crate) options: SynOptions,
    pub(crate) data: Vec<u8>,
}

/// The template: an ACK.
pub(crate) fn seg() -> Seg {
    Seg {
        seq: 1,
        ack: 1,
        flags: Flags::ACK,
        window: None,
        options: SynOptions::default(),
        data: Vec::new(),
    }
}

impl Seg {
    pub(crate) fn seq(mut self, seq: u32) -> Self {
        self.seq = seq;
        self
    }
    pub(crate) fn ack(mut self, ack: u32) -> Self {
        self.ack = ack;
        self
    }
    pub(crate) fn psh(mut self) -> Self {
        self.flags |= Flags::PSH;
        self
    }
    pub(crate) fn fin(mut self) -> Self {
        self.flags |= Flags::FIN;
        self
    }
    pub(crate) fn rst(mut self) -> Self {
        self.flags |= Flags::RST;
        self
    }
    pub(crate) fn syn(mut self) -> Self {
        self.flags |= Flags::SYN;
        self.seq = 0;
        self
    }
    pub(crate) fn no_ack(mut self) -> Self {
        self.flags -= Flags::ACK;
        self
    }
    pub(crate) fn window(mut self, window: u16) -> Self {
        self.window = Some(window);
        self
    }
    pub(crate) fn data(mut self, data: impl AsRef<[u8]>) -> Self {
        self.data = data.as_ref().to_vec();
        self
    }
}

impl fmt::Debug for Seg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Flags::SYN, 'S'),
            (Flags::FIN, 'F'),
            (Flags::RST, 'R'),
            (Flags::PSH, 'P'),
            (Flags::ACK, '.'),
        ];
        let flags: String = names
            .iter()
            .filter(|(flag, _)| self.flags.contains(*flag))
            .map(|(_, name)| *name)
            .collect();
        write!(
            f,
            "[{flags}] seq {} ack {} len {}",
            self.seq,
            self.ack,
            self.data.len()
        )?;
        if let Some(window) = self.window {
            write!(f, " win {window}")?;
        }
        if self.data.len() <= 32 {
            write!(f, " {:?}", String::from_utf8_lossy(&self.data))?;
        }
        Ok(())
    }
}

/// One guest connection and everything around it.
pub(crate) struct Script {
    pub(crate) flows: Flows<FakeHost>,
    pub(crate) host: FakeHost,
    pub(crate) ring: MemoryRing,
    pub(crate) now: Instant,
    pub(crate) key: FlowKey,
    /// Where the guest's SYNs lead.
    pub(crate) route: Result<SocketAddr, Refusal>,
    pub(crate) setup: Setup,
    /// Our initial sequence number, once seen.
    iss: Option<SeqNum>,
    guest_iss: SeqNum,
}

impl Script {
    pub(crate) fn new(setup: Setup) -> Self {
        let link = TcpLink {
            macs: Macs {
                gateway: [2, 0, 0, 0, 0, 1],
                guest: [2, 0, 0, 0, 0, 2],
            },
            mtu: 1500,
            offloads: setup.offloads,
            rx: setup.rx,
        };
        let far = SocketAddr::from(([192, 0, 2, 1], 80));
        Self {
            flows: Flows::new(link, setup.limits, 7),
            host: FakeHost::default(),
            // Small odd pieces: headers and payloads straddle them.
            ring: MemoryRing::new(&[61, 1, 700, 2048]),
            now: Instant::now(),
            key: FlowKey {
                guest: ([10, 0, 2, 15], 40000).into(),
                far,
            },
            route: Ok(far),
            setup,
            iss: None,
            guest_iss: GUEST_ISS,
        }
    }

    /// A connection that the guest opened and the host answered.
    #[track_caller]
    pub(crate) fn established(setup: Setup) -> Self {
        let mut t = Self::new(setup);
        t.guest_sends(seg().syn().no_ack());
        t.quiet();
        t.host_connects(Ok(()));
        let syn_ack = t.next_segment().expect("a SYN/ACK");
        assert_eq!(syn_ack.flags, Flags::SYN | Flags::ACK);
        assert_eq!(syn_ack.ack, 1);
        t.guest_sends(seg());
        t.quiet();
        t
    }

    pub(crate) fn far(&self) -> Far {
        let far = self.host.opened.last().expect("a socket was opened");
        assert!(self.route.is_err() || far.borrow().to == self.key.far);
        far.clone()
    }

    pub(crate) fn event(&mut self, readiness: Readiness) {
        let id = self.far().borrow().id;
        self.flows.handle_event(id, readiness, self.now);
        self.pump();
    }

    pub(crate) fn host_connects(&mut self, result: Result<(), std::io::ErrorKind>) {
        self.far().borrow_mut().connected = Some(result);
        self.event(Readiness {
            writable: true,
            ..Readiness::default()
        });
    }

    pub(crate) fn host_writes(&mut self, bytes: &[u8]) {
        self.far().borrow_mut().outgoing.extend(bytes);
        self.event(Readiness {
            readable: true,
            ..Readiness::default()
        });
    }

    pub(crate) fn host_closes(&mut self) {
        self.far().borrow_mut().closed = true;
        self.event(Readiness {
            readable: true,
            read_closed: true,
            ..Readiness::default()
        });
    }

    pub(crate) fn host_breaks(&mut self, kind: std::io::ErrorKind) {
        self.far().borrow_mut().broken = Some(kind);
        self.event(Readiness {
            readable: true,
            ..Readiness::default()
        });
    }

    /// The socket has room for `n` more bytes.
    pub(crate) fn host_room(&mut self, n: usize) {
        self.far().borrow_mut().room = n;
        self.event(Readiness {
            writable: true,
            ..Readiness::default()
        });
    }

    pub(crate) fn pump(&mut self) -> Stop {
        loop {
            let stop = self.flows.pump(&mut self.ring, self.now);
            let more = self.flows.after_burst() && stop == Stop::Idle;
            if stop != Stop::Yield && !more {
                return stop;
            }
        }
    }

    pub(crate) fn after(&mut self, time: Duration) -> &mut Self {
        self.now += time;
        self.flows.handle_timeout(self.now);
        self.pump();
        self
    }

    /// The guest starts over with another initial sequence number.
    pub(crate) fn new_guest_iss(&mut self, iss: u32) {
        self.guest_iss = SeqNum(iss);
        self.iss = None;
    }

    pub(crate) fn guest_sends(&mut self, seg: Seg) {
        self.guest_sends_all([seg]);
    }

    /// Segments in one burst.
    pub(crate) fn guest_sends_all(&mut self, segs: impl IntoIterator<Item = Seg>) {
        let mut datas: Vec<(Seg, Vec<u8>)> = segs
            .into_iter()
            .map(|seg| {
                let mut data = seg.data.clone();
                data.splice(0..0, [0xee; 3]);
                (seg, data)
            })
            .collect();
        let mut run = Run::default();
        for (seg, data) in &mut datas {
            let syn = seg.flags.contains(Flags::SYN);
            let segment = Segment {
                seq: self.guest_iss + seg.seq,
                ack: if seg.flags.contains(Flags::ACK) {
                    self.iss.unwrap_or_default() + seg.ack
                } else {
                    SeqNum(0)
                },
                flags: seg.flags,
                window: seg.window.unwrap_or(self.setup.window),
                len: u32::try_from(seg.data.len()).unwrap(),
                options: if syn {
                    SynOptions {
                        mss: self.setup.mss,
                        window_scale: self.setup.shift,
                    }
                } else {
                    SynOptions::default()
                },
            };
            // Two pieces, the payload behind three bytes of header.
            let cut = data.len().min(5);
            let (a, b) = data.split_at_mut(cut);
            let frame = [VolatileSlice::from(a), VolatileSlice::from(b)];
            let route = self.route;
            self.flows.handle_frame(
                self.key,
                &segment,
                &frame,
                3,
                &mut run,
                |_| route,
                &mut self.host,
                self.now,
            );
        }
        self.flows.end_run(&mut run, self.now);
        self.pump();
    }

    /// The oldest segment that the guest has not looked at.
    pub(crate) fn next_segment(&mut self) -> Option<Seg> {
        let (hdr, frame) = self.ring.frames.pop_front()?;
        Some(self.dissect(&hdr, &frame))
    }

    fn dissect(&mut self, hdr: &VnetHdr, frame: &[u8]) -> Seg {
        let ethernet = EthernetFrame::new_checked(frame).unwrap();
        assert_eq!(ethernet.dst_addr().0, self.flows.link().macs.guest);
        let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
        assert!(ip.verify_checksum(), "IPv4 header checksum");
        assert_eq!(usize::from(ip.total_len()), frame.len() - 14);
        let pseudo = smoltcp::wire::checksum::pseudo_header(
            &ip.src_addr().into(),
            &ip.dst_addr().into(),
            ip.next_header(),
            u32::try_from(ip.payload().len()).unwrap(),
        );
        if hdr.flags & VNET_HDR_F_NEEDS_CSUM != 0 {
            assert!(self.setup.offloads.contains(Offloads::GUEST_CSUM));
            let field = u16::from_be_bytes([ip.payload()[16], ip.payload()[17]]);
            assert_eq!(field, pseudo, "partial checksum");
            assert_eq!((hdr.csum_start, hdr.csum_offset), (34, 16));
        } else {
            let mut sum = Sum::from_words(pseudo);
            sum.add(ip.payload());
            assert_eq!(sum.finish(), 0, "TCP checksum");
        }
        let parsed = parse(ip.payload(), ip.payload().len()).unwrap();
        assert_eq!(parsed.src_port, self.key.far.port());
        assert_eq!(parsed.dst_port, self.key.guest.port());
        let segment = parsed.segment;
        if hdr.gso_type == 0 {
            assert!(frame.len() <= 14 + 1500);
        } else {
            assert!(u32::from(hdr.gso_size) < segment.len);
        }
        if segment.flags.contains(Flags::SYN) {
            self.iss = Some(segment.seq);
        }
        let iss = self.iss.unwrap_or_default();
        Seg {
            seq: segment.seq - iss,
            ack: if segment.flags.contains(Flags::ACK) {
                segment.ack - self.guest_iss
            } else {
                0
            },
            flags: segment.flags,
            window: Some(segment.window),
            options: segment.options,
            data: ip.payload()[parsed.header_len..].to_vec(),
        }
    }

    /// The next segment is this one; windows count only where named.
    #[track_caller]
    pub(crate) fn guest_sees(&mut self, want: Seg) -> Seg {
        let Some(got) = self.next_segment() else {
            panic!("expected {want:?}, but nothing was sent");
        };
        let mut shown = got.clone();
        if matches!(self.setup.rx, RxPath::Direct | RxPath::DirectDiscard) && !got.data.is_empty() {
            // A peek that was satisfied does not tell whether there is more to push.
            shown.flags |= want.flags & Flags::PSH;
            shown.flags -= Flags::PSH - want.flags;
        }
        if want.window.is_none() {
            shown.window = None;
        }
        if want.options == SynOptions::default() {
            shown.options = want.options;
        }
        assert_eq!(shown, want);
        got
    }

    /// Nothing was sent.
    #[track_caller]
    pub(crate) fn quiet(&mut self) {
        if let Some(got) = self.next_segment() {
            panic!("expected silence, got {got:?}");
        }
    }

    /// Receives all data in order, acknowledging each segment at once; returns it.
    pub(crate) fn guest_reads_all(&mut self, from: u32) -> Vec<u8> {
        let mut next = from;
        let mut bytes = Vec::new();
        while let Some(seg_in) = self.next_segment() {
            if seg_in.data.is_empty() || seg_in.seq != next {
                continue;
            }
            next += u32::try_from(seg_in.data.len()).unwrap();
            bytes.extend_from_slice(&seg_in.data);
            self.guest_sends(seg().ack(next));
        }
        bytes
    }
}
