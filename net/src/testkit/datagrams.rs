//! What the tests of datagram protocols share: a ring to look into, and sockets on a script.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use smoltcp::wire::{EthernetFrame, IpProtocol, Ipv4Packet, UdpPacket};
use vm_memory::VolatileSlice;

use crate::nic::{RxRing, VnetHdr};
use crate::outbox::Outbox;
use crate::udp::{Batch, Owner, Payload, SocketError, UdpHost, UdpSocket};
use crate::wire::Macs;

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
    let ethernet = EthernetFrame::new_checked(&frames[0][..]).unwrap();
    let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
    assert_eq!(ip.next_header(), IpProtocol::Udp);
    let udp = UdpPacket::new_checked(ip.payload()).unwrap();
    assert!(udp.verify_checksum(&ip.src_addr().into(), &ip.dst_addr().into()));
    (
        (ip.src_addr(), udp.src_port()).into(),
        (ip.dst_addr(), udp.dst_port()).into(),
        udp.payload().to_vec(),
    )
}

#[derive(Debug, Default)]
pub(crate) struct Wire {
    pub(crate) owner: Option<Owner>,
    pub(crate) number: u64,
    pub(crate) open: bool,
    pub(crate) sent: Vec<(SocketAddr, Vec<u8>)>,
    pub(crate) hop_limit: Option<u8>,
    pub(crate) arrives: VecDeque<(SocketAddr, Vec<u8>)>,
    pub(crate) errors: VecDeque<SocketError>,
    pub(crate) refuses: Option<i32>,
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
    fn send(&mut self, to: SocketAddr, payload: &Payload<'_, '_>) -> io::Result<()> {
        let mut wire = self.0.borrow_mut();
        if let Some(errno) = wire.refuses.take() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let mut bytes = Vec::new();
        payload.for_each_slice(|slice| {
            let mut part = vec![0; slice.len()];
            slice.copy_to(&mut part[..]);
            bytes.extend(part);
        });
        wire.sent.push((to, bytes));
        Ok(())
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
            batch.push(from, &payload);
        }
        if batch.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(())
    }

    fn take_error(&mut self) -> Option<SocketError> {
        self.0.borrow_mut().errors.pop_front()
    }
}
