//! A guest with a real network stack (smoltcp's) on the other end of a [`Backend`].

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp;
use smoltcp::wire::{EthernetAddress, HardwareAddress, IpCidr, Ipv4Address};
use vm_memory::VolatileSlice;

use super::ring::MemoryRing;
use crate::nic::{Backend, Link, Offloads, Stop, TxBurst, VnetHdr};

pub(crate) const GUEST_MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

/// The wire between the guest's stack and the backend.
struct Wire {
    to_guest: VecDeque<Vec<u8>>,
    from_guest: VecDeque<Vec<u8>>,
}

struct Received(Vec<u8>);
struct Sender<'a>(&'a mut VecDeque<Vec<u8>>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl TxToken for Sender<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = vec![0; len];
        let result = f(&mut frame);
        self.0.push_back(frame);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sender<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Received, Sender<'_>)> {
        let frame = self.to_guest.pop_front()?;
        Some((Received(frame), Sender(&mut self.from_guest)))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Sender<'_>> {
        Some(Sender(&mut self.from_guest))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        // The guest checks every checksum that the stack makes, and fills in its own.
        capabilities.checksum.tcp = Checksum::Both;
        capabilities.checksum.ipv4 = Checksum::Both;
        capabilities
    }
}

/// A guest: smoltcp's interface, attached to a backend.
pub(crate) struct Guest<B> {
    pub(crate) backend: B,
    interface: Interface,
    pub(crate) sockets: SocketSet<'static>,
    wire: Wire,
    ring: MemoryRing,
    start: Instant,
    next_port: u16,
}

impl<B: Backend> Guest<B> {
    pub(crate) fn new(mut backend: B) -> Self {
        let mut wire = Wire {
            to_guest: VecDeque::new(),
            from_guest: VecDeque::new(),
        };
        backend.configure(&Link {
            guest_mac: GUEST_MAC,
            mtu: 1500,
            offloads: Offloads::empty(),
        });
        let config = Config::new(HardwareAddress::Ethernet(EthernetAddress(GUEST_MAC)));
        let mut interface = Interface::new(config, &mut wire, smoltcp::time::Instant::ZERO);
        interface.update_ip_addrs(|addresses| {
            let own = Ipv4Address::new(10, 0, 2, 15);
            addresses.push(IpCidr::new(own.into(), 24)).unwrap();
        });
        interface
            .routes_mut()
            .add_default_ipv4_route(Ipv4Addr::new(10, 0, 2, 2))
            .unwrap();
        Self {
            backend,
            interface,
            sockets: SocketSet::new(Vec::new()),
            wire,
            ring: MemoryRing::new(&[1526]),
            start: Instant::now(),
            next_port: 50000,
        }
    }

    /// One round: the guest's stack, the backend, and the frames between them.
    pub(crate) fn step(&mut self) {
        let now = smoltcp::time::Instant::from_micros(
            i64::try_from(self.start.elapsed().as_micros()).unwrap(),
        );
        self.interface.poll(now, &mut self.wire, &mut self.sockets);
        let mut frames: Vec<Vec<u8>> = self.wire.from_guest.drain(..).collect();
        let mut burst = TxBurst::default();
        for frame in &mut frames {
            burst.push_slice(VolatileSlice::from(&mut frame[..]));
            burst.end_frame(VnetHdr::default());
        }
        self.backend.transmit(&burst, Instant::now());
        loop {
            let stop = self.backend.receive(&mut self.ring, Instant::now());
            if !self.backend.after_burst() && stop != Stop::Yield {
                break;
            }
        }
        self.wire
            .to_guest
            .extend(self.ring.frames.drain(..).map(|(_, frame)| frame));
    }

    /// Steps until `done` says so.
    #[track_caller]
    pub(crate) fn run_until(&mut self, mut done: impl FnMut(&mut SocketSet<'static>) -> bool) {
        let limit = Instant::now() + Duration::from_secs(20);
        while !done(&mut self.sockets) {
            self.step();
            assert!(
                Instant::now() < limit,
                "the guest waits for something that never comes"
            );
        }
    }

    /// Starts to connect to `to`.
    pub(crate) fn connect(&mut self, to: (Ipv4Addr, u16)) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; 256 << 10]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        self.next_port += 1;
        socket
            .connect(
                self.interface.context(),
                (IpAddr::V4(to.0), to.1),
                self.next_port,
            )
            .unwrap();
        self.sockets.add(socket)
    }

    /// Listens on `port`.
    pub(crate) fn listen(&mut self, port: u16) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; 64 << 10]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        socket.listen(port).unwrap();
        self.sockets.add(socket)
    }
}
