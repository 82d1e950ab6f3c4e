//! Frames from the guest, taken apart down to the protocol that handles them.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use smoltcp::wire::{EthernetFrame, EthernetProtocol, IpProtocol};

use super::{Runs, Stack, tcp_route};
use crate::drops::DropReason;
use crate::flow::FlowKey;
use crate::icmp::echo::{self, Request};
use crate::nic::TxFrame;
use crate::policy::{self, Route};
use crate::tcp::Run;
use crate::tcp::wire::parse;
use crate::udp::{GuestDatagram, Outgoing, Payload};
use crate::wire::datagram::Datagram;
use crate::wire::ipv4::{self, Ipv4Head};
use crate::wire::{ETHERNET, IPV4, Macs, UDP, udp};
use crate::{arp, dns};

/// Longest headers that are looked at: Ethernet, IPv4 and TCP, the last two with all options.
const HEAD: usize = ETHERNET + 60 + 60;
/// Longest ICMP message of the guest: what an IPv4 packet holds.
const MAX_ICMP: usize = 65535 - IPV4;

/// Longest DHCP message that is read: what fits an Ethernet frame.
const MAX_DHCP: usize = 1500;
const DHCP_SERVER: u16 = 67;
const DHCP_CLIENT: u16 = 68;
const DNS: u16 = 53;

/// Copies a payload out of guest memory, up to `limit` bytes.
fn copy(payload: &Payload<'_, '_>, limit: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    payload.part(0, limit).copy_to(&mut bytes);
    bytes
}

impl Stack {
    /// Gives one frame to its protocol.
    ///
    /// # Errors
    /// Why it was dropped.
    pub(super) fn handle_frame<'m>(
        &mut self,
        frame: &TxFrame<'_, 'm>,
        runs: &mut Runs<'m>,
        now: Instant,
    ) -> Result<(), DropReason> {
        let mut head = [0; HEAD];
        let head_len = frame.copy_head(&mut head);
        let head = &head[..head_len];
        let ethernet = EthernetFrame::new_checked(head).map_err(|_| DropReason::Truncated)?;
        match ethernet.ethertype() {
            EthernetProtocol::Ipv4 => {
                let ip = ipv4::parse(&head[ETHERNET..], frame.len() - ETHERNET)?;
                // Only DHCP speaks without an address.
                let nameless = ip.src.is_unspecified() && ip.protocol == IpProtocol::Udp;
                if ip.src != self.config.guest_ip && !nameless {
                    return Err(DropReason::Spoofed);
                }
                match ip.protocol {
                    IpProtocol::Tcp => self.handle_tcp(&ip, head, frame, &mut runs.tcp, now),
                    IpProtocol::Udp => self.handle_udp(&ip, head, frame, &mut runs.udp, now),
                    IpProtocol::Icmp => self.handle_icmp(&ip, frame, now),
                    _ => Err(DropReason::Protocol),
                }
            }
            EthernetProtocol::Arp => self.handle_arp(&head[ETHERNET..]),
            _ => Err(DropReason::EtherType),
        }
    }

    fn handle_arp(&mut self, payload: &[u8]) -> Result<(), DropReason> {
        // Gratuitous announcements and probes need no answer and are no loss.
        if let Some(request) = arp::parse(payload) {
            let config = &self.config;
            let mut reply = Vec::new();
            if arp::reply(config, &request, &mut reply)
                && !self.outbox.push(|frame| frame.extend_from_slice(&reply))
            {
                return Err(DropReason::Full);
            }
        }
        Ok(())
    }

    fn handle_tcp<'m>(
        &mut self,
        ip: &Ipv4Head,
        head: &[u8],
        frame: &TxFrame<'_, 'm>,
        run: &mut Run<'m>,
        now: Instant,
    ) -> Result<(), DropReason> {
        let at = ETHERNET + ip.header_len;
        let parsed = parse(&head[at..], ip.payload_len).ok_or(DropReason::BadTransportHeader)?;
        let key = FlowKey {
            guest: SocketAddr::from((ip.src, parsed.src_port)),
            far: SocketAddr::from((ip.dst, parsed.dst_port)),
        };
        if key.far.ip() == self.config.dns {
            self.refresh_resolvers(now);
        }
        let config = &self.config;
        let resolver = self.dns.tcp_upstream();
        self.tcp.handle_frame(
            key,
            &parsed.segment,
            frame.slices,
            at + parsed.header_len,
            run,
            |key| tcp_route(config, resolver, key.far),
            &mut self.host,
            now,
        );
        Ok(())
    }

    fn handle_udp<'m>(
        &mut self,
        ip: &Ipv4Head,
        head: &[u8],
        frame: &TxFrame<'_, 'm>,
        run: &mut Outgoing<'m>,
        now: Instant,
    ) -> Result<(), DropReason> {
        let at = ETHERNET + ip.header_len;
        let udp = udp::parse(&head[at..], ip.payload_len)?;
        let segment = udp::segment(&frame.hdr, udp.payload_len)?;
        let (src, dst) = (ip.src.into(), ip.dst.into());
        if !udp::checksum_holds(frame.slices, &frame.hdr, src, dst, at, &udp) {
            return Err(DropReason::BadTransportHeader);
        }
        let payload = Payload {
            frame: frame.slices,
            at: at + UDP,
            len: udp.payload_len,
        };
        let guest = SocketAddr::new(src, udp.src_port);
        let far = SocketAddr::new(dst, udp.dst_port);
        if (udp.src_port, udp.dst_port) == (DHCP_CLIENT, DHCP_SERVER) {
            return self.handle_dhcp(ip, &payload);
        }
        if ip.src.is_unspecified() {
            return Err(DropReason::Spoofed);
        }
        if dst == self.config.dns && udp.dst_port == DNS {
            self.refresh_resolvers(now);
            for start in (0..payload.len.max(1)).step_by(segment.max(1)) {
                let query = copy(&payload.part(start, segment), dns::MAX_QUERY + 1);
                self.dns
                    .handle_from_guest(guest, &query, &mut self.host, now)?;
            }
            return Ok(());
        }
        let datagram = GuestDatagram {
            guest,
            far,
            hop_limit: ip.hop_limit,
            payload,
            segment,
        };
        let config = &self.config;
        self.udp.handle_from_guest(
            &datagram,
            |far| crate::udp::route(config, far),
            run,
            &mut self.host,
            now,
        )
    }

    fn handle_dhcp(&mut self, ip: &Ipv4Head, payload: &Payload<'_, '_>) -> Result<(), DropReason> {
        let message = copy(payload, MAX_DHCP);
        let reply = self
            .dhcp
            .handle(&message, ip.src)
            .map_err(|_| DropReason::BadDhcp)?;
        let Some(reply) = reply else {
            return Ok(());
        };
        let datagram = Datagram {
            macs: Macs {
                guest: reply.to_mac,
                ..self.macs()
            },
            from: SocketAddr::new(self.config.gateway.into(), DHCP_SERVER),
            to: SocketAddr::new(reply.to.into(), DHCP_CLIENT),
            ident: 0,
            mtu: self.link.mtu,
            payload: &reply.payload,
        };
        if self.outbox.is_full() {
            return Err(DropReason::Full);
        }
        datagram.push(&mut self.outbox);
        Ok(())
    }

    fn handle_icmp(
        &mut self,
        ip: &Ipv4Head,
        frame: &TxFrame<'_, '_>,
        now: Instant,
    ) -> Result<(), DropReason> {
        let payload = Payload {
            frame: frame.slices,
            at: ETHERNET + ip.header_len,
            len: ip.payload_len,
        };
        let message = &copy(&payload, MAX_ICMP);
        if !echo::is_request(message) {
            return Err(DropReason::Protocol);
        }
        let request = Request {
            guest: ip.src,
            far: ip.dst,
            message,
        };
        let own = ip.dst == self.config.gateway || ip.dst == self.config.dns;
        match policy::route(&self.config, IpAddr::V4(ip.dst)) {
            _ if own => echo::reply(&request, self.macs(), &mut self.outbox),
            Route::Host(to) => self
                .echo
                .handle_from_guest(&request, to, &mut self.host, now),
            Route::Unroutable => Err(DropReason::Unroutable),
            Route::Vacant | Route::Gateway | Route::Dns => Err(DropReason::Vacant),
        }
    }
}
