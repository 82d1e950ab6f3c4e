//! What the tests of datagram protocols share: a ring to look into, and sockets on a script.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use smoltcp::wire::{EthernetFrame, IpProtocol, Ipv4Packet, UdpPacket, checksum};
use vm_memory::VolatileSlice;

use crate::nic::{
    RxRing, VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_NONE, VNET_HDR_GSO_UDP_L4, VnetHdr, write_at,
};
use crate::outbox::Outbox;
use crate::udp::{
    Batch, Entry, MAX_SEGMENTS, Message, Owner, Payload, SocketError, UdpHost, UdpSocket,
};
use crate::wire::Macs;
use crate::wire::datagram::MAX_PAYLOAD;

pub(crate) const MACS: Macs = Macs {
    gateway: [0x52, 0x55, 10, 0, 2, 2],
    guest: [2, 0, 0, 0, 0, 1],
};

struct Ring {
    room: Vec<VolatileSlice<'static>>,
    frames: Vec<Vec<u8>>,
}

impl RxRing for Ring {
    fn reserve(&mut self, len: usize) -> bool {
        self.room = vec![VolatileSlice::from(&mut *vec![0; len].leak())];
        true
    }

    fn slices(&self, _index: usize) -> &[VolatileSlice<'_>] {
        &self.room
    }

    fn finish(&mut self, _hdr: &VnetHdr, len: usize) {
        let mut frame = vec![0; len];
        self.room[0].copy_to(&mut frame[..]);
        self.frames.push(frame);
    }

    fn unreserve(&mut self) {}
}

/// Takes the frames out.
pub(crate) fn take(out: &mut Outbox) -> Vec<Vec<u8>> {
    let mut ring = Ring {
        room: Vec::new(),
        frames: Vec::new(),
    };
    out.deliver(&mut ring);
    ring.frames
}

/// The one datagram in `out`: source, destination and payload.
#[track_caller]
pub(crate) fn only_datagram(out: &mut Outbox) -> (SocketAddr, SocketAddr, Vec<u8>) {
    let frames = take(out);
    assert_eq!(frames.len(), 1, "{frames:x?}");
    let mut datagrams = accept(&VnetHdr::default(), &frames[0]);
    datagrams.pop().expect("one for each frame")
}

/// What a guest makes of a frame: the datagrams in it, each with source, destination and payload. Does
/// what Linux does with the header (virtio_net_hdr_to_skb, __udp_gso_segment), but believes nothing.
#[track_caller]
pub(crate) fn accept(hdr: &VnetHdr, frame: &[u8]) -> Vec<(SocketAddr, SocketAddr, Vec<u8>)> {
    let ethernet = EthernetFrame::new_checked(frame).unwrap();
    let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
    assert!(ip.verify_checksum());
    assert_eq!(ip.next_header(), IpProtocol::Udp);
    assert!(!ip.more_frags() && ip.frag_offset() == 0);
    assert_eq!(ip.payload().len() + 34, frame.len());
    let whole = UdpPacket::new_checked(ip.payload()).unwrap();
    assert_eq!(usize::from(whole.len()), ip.payload().len());
    let (src, dst) = (ip.src_addr(), ip.dst_addr());
    let cut = match hdr.gso_type {
        VNET_HDR_GSO_NONE => whole.payload().len(),
        VNET_HDR_GSO_UDP_L4 => {
            assert!(hdr.flags & VNET_HDR_F_NEEDS_CSUM != 0);
            assert!((1..whole.payload().len()).contains(&usize::from(hdr.gso_size)));
            usize::from(hdr.gso_size)
        }
        other => panic!("GSO type {other}"),
    };
    let partial = hdr.flags & VNET_HDR_F_NEEDS_CSUM != 0;
    if partial {
        assert_eq!((hdr.hdr_len, hdr.csum_start, hdr.csum_offset), (42, 34, 6));
        let pseudo = checksum::pseudo_header(
            &src.into(),
            &dst.into(),
            IpProtocol::Udp,
            u32::from(whole.len()),
        );
        assert_eq!(whole.checksum(), pseudo);
    } else {
        assert_eq!(*hdr, VnetHdr::default());
        assert_ne!(whole.checksum(), 0);
        assert!(whole.verify_checksum(&src.into(), &dst.into()));
    }
    let from = (src, whole.src_port()).into();
    let to = (dst, whole.dst_port()).into();
    if whole.payload().is_empty() {
        return vec![(from, to, Vec::new())];
    }
    let parts = whole.payload().chunks(cut);
    parts.map(|part| (from, to, part.to_vec())).collect()
}

#[derive(Debug, Default)]
pub(crate) struct Wire {
    pub(crate) owner: Option<Owner>,
    pub(crate) number: u64,
    pub(crate) open: bool,
    /// Datagrams, one by one.
    pub(crate) sent: Vec<(SocketAddr, Vec<u8>)>,
    /// Calls that sent something: bytes and segment length of each message.
    pub(crate) calls: Vec<Vec<(usize, Option<u16>)>>,
    pub(crate) hop_limit: Option<u8>,
    pub(crate) arrives: VecDeque<(SocketAddr, Vec<u8>)>,
    /// Length of the datagrams in what arrives; 0 when each is alone.
    pub(crate) segment: usize,
    pub(crate) errors: VecDeque<SocketError>,
    /// Runs received into guest memory.
    pub(crate) in_place: usize,
    /// Errno of the next call.
    pub(crate) refuses: Option<i32>,
    /// Errno for messages with several datagrams of more than so many bytes.
    pub(crate) refuses_runs: Option<(i32, u16)>,
    /// Datagrams that fit before the socket is full.
    pub(crate) room: Option<usize>,
}

/// A host whose sockets do what the test says.
#[derive(Debug, Default)]
pub(crate) struct FakeHost {
    pub(crate) sockets: Vec<Rc<RefCell<Wire>>>,
    pub(crate) exhausted: bool,
}

#[derive(Debug)]
pub(crate) struct FakeSocket(Rc<RefCell<Wire>>);

impl Drop for FakeSocket {
    fn drop(&mut self) {
        self.0.borrow_mut().open = false;
    }
}

impl UdpHost for FakeHost {
    type Socket = FakeSocket;

    fn open_udp(
        &mut self,
        _local: SocketAddr,
        owner: Owner,
        number: u64,
    ) -> io::Result<FakeSocket> {
        if self.exhausted {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        let wire = Rc::new(RefCell::new(Wire {
            owner: Some(owner),
            number,
            open: true,
            ..Wire::default()
        }));
        self.sockets.push(Rc::clone(&wire));
        Ok(FakeSocket(wire))
    }
}

impl UdpSocket for FakeSocket {
    fn send(&mut self, messages: &[Message<'_, '_>]) -> io::Result<usize> {
        let mut wire = self.0.borrow_mut();
        if let Some(errno) = wire.refuses.take() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let mut call = Vec::new();
        for message in messages {
            let mut bytes = Vec::new();
            for slice in message.payload {
                let at = bytes.len();
                bytes.resize(at + slice.len(), 0);
                slice.copy_to(&mut bytes[at..]);
            }
            let errno = match (message.segment, wire.refuses_runs, wire.room) {
                (Some(segment), Some((errno, most)), _) if segment > most => Some(errno),
                (_, _, Some(0)) => Some(libc::EAGAIN),
                _ => None,
            };
            match errno {
                Some(errno) if call.is_empty() => {
                    return Err(io::Error::from_raw_os_error(errno));
                }
                Some(_) => break,
                None => {}
            }
            call.push((bytes.len(), message.segment));
            let segment = message.segment.map_or(bytes.len(), usize::from).max(1);
            let count = bytes.len().div_ceil(segment).max(1);
            assert!(count <= MAX_SEGMENTS && bytes.len() <= MAX_PAYLOAD);
            assert!(message.segment.is_none() || count > 1);
            for i in 0..count {
                let end = bytes.len().min((i + 1) * segment);
                let datagram = bytes[i * segment..end].to_vec();
                wire.sent.push((message.to, datagram));
            }
            wire.room = wire.room.map(|room| room.saturating_sub(count));
        }
        let n = call.len();
        wire.calls.push(call);
        Ok(n)
    }

    fn takes_runs(&self) -> bool {
        true
    }

    fn send_bytes(&mut self, to: SocketAddr, payload: &[u8]) -> io::Result<()> {
        let mut wire = self.0.borrow_mut();
        if let Some(errno) = wire.refuses.take() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        wire.sent.push((to, payload.to_vec()));
        Ok(())
    }

    fn set_hop_limit(&mut self, hops: u8) {
        self.0.borrow_mut().hop_limit = Some(hops);
    }

    fn receive(&mut self, batch: &mut Batch) -> io::Result<()> {
        batch.clear();
        let mut wire = self.0.borrow_mut();
        while !batch.is_full() {
            let Some((from, payload)) = wire.arrives.pop_front() else {
                break;
            };
            batch.push(from, &payload, wire.segment);
        }
        if batch.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(())
    }

    fn receive_into(&mut self, room: &Payload<'_, '_>) -> io::Result<Entry> {
        let mut wire = self.0.borrow_mut();
        let next = wire.arrives.pop_front();
        let (from, payload) = next.ok_or(io::ErrorKind::WouldBlock)?;
        assert!(payload.len() <= room.len, "something is lost");
        let mut pieces = Vec::new();
        room.for_each_slice(|slice| pieces.push(slice));
        write_at(&pieces, 0, &payload);
        wire.in_place += 1;
        Ok(Entry {
            from,
            len: payload.len(),
            segment: wire.segment,
        })
    }

    fn take_error(&mut self) -> Option<SocketError> {
        self.0.borrow_mut().errors.pop_front()
    }
}
