//! Frames from the guest, taken apart down to the protocol that handles them.

use std::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::time::Instant;

use smoltcp::wire::{EthernetFrame, EthernetProtocol, IpProtocol, Ipv4Packet, UdpPacket};

use super::datagram::{self, UDP};
use super::{Stack, tcp_route};
use crate::arp;
use crate::drops::DropReason;
use crate::flow::FlowKey;
use crate::icmp::echo::{self, Request};
use crate::nic::TxFrame;
use crate::policy::{self, Route};
use crate::tcp::Run;
use crate::tcp::wire::{ETHERNET, IPV4, Macs, parse};

/// Longest headers that are looked at: Ethernet, IPv4 and TCP, the last two with all options.
const HEAD: usize = ETHERNET + 60 + 60;
/// Longest ICMP message of the guest: what an IPv4 packet holds.
const MAX_ICMP: usize = 65535 - IPV4;

/// Longest DHCP message that is read: what fits an Ethernet frame.
const MAX_DHCP: usize = 1500;
const DHCP_SERVER: u16 = 67;
const DHCP_CLIENT: u16 = 68;

/// An IPv4 packet whose header was found good.
struct Ip {
    src: std::net::Ipv4Addr,
    dst: std::net::Ipv4Addr,
    protocol: IpProtocol,
    /// Where the payload starts in the frame.
    at: usize,
    /// Octets of payload.
    len: usize,
}

/// Where the payload of a datagram lies in its frame.
struct Payload {
    at: usize,
    len: usize,
}

impl Payload {
    /// Copies the payload out of guest memory, up to `limit` bytes.
    fn copy(&self, frame: &TxFrame<'_, '_>, limit: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.at + self.len.min(limit)];
        let n = frame.copy_head(&mut bytes);
        bytes.truncate(n);
        bytes.drain(..self.at.min(n));
        bytes
    }
}

impl Stack {
    /// Gives one frame to its protocol.
    ///
    /// # Errors
    /// Why it was dropped.
    pub(super) fn handle_frame<'m>(
        &mut self,
        frame: &TxFrame<'_, 'm>,
        run: &mut Run<'m>,
        now: Instant,
    ) -> Result<(), DropReason> {
        let mut head = [0; HEAD];
        let head_len = frame.copy_head(&mut head);
        let head = &head[..head_len];
        let ethernet = EthernetFrame::new_checked(head).map_err(|_| DropReason::Truncated)?;
        match ethernet.ethertype() {
            EthernetProtocol::Ipv4 => {
                let ip = check_ipv4(&head[ETHERNET..], frame.len() - ETHERNET)?;
                if ip.src != self.config.guest_ip && !ip.src.is_unspecified() {
                    return Err(DropReason::Spoofed);
                }
                match ip.protocol {
                    IpProtocol::Tcp => self.handle_tcp(&ip, head, frame, run, now),
                    IpProtocol::Udp => self.handle_udp(&ip, head, frame, now),
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
        ip: &Ip,
        head: &[u8],
        frame: &TxFrame<'_, 'm>,
        run: &mut Run<'m>,
        now: Instant,
    ) -> Result<(), DropReason> {
        let parsed = parse(&head[ip.at..], ip.len).ok_or(DropReason::BadTransportHeader)?;
        let key = FlowKey {
            guest: SocketAddr::from((ip.src, parsed.src_port)),
            far: SocketAddr::from((ip.dst, parsed.dst_port)),
        };
        let config = &self.config;
        let resolver = None;
        self.tcp.handle_frame(
            key,
            &parsed.segment,
            frame.slices,
            ip.at + parsed.header_len,
            run,
            |key| tcp_route(config, resolver, key.far),
            &mut self.host,
            now,
        );
        Ok(())
    }

    fn handle_udp(
        &mut self,
        ip: &Ip,
        head: &[u8],
        frame: &TxFrame<'_, '_>,
        _now: Instant,
    ) -> Result<(), DropReason> {
        let header = head
            .get(ip.at..ip.at + UDP)
            .ok_or(DropReason::BadTransportHeader)?;
        let udp = UdpPacket::new_unchecked(header);
        let udp_len = usize::from(udp.len());
        if udp_len < UDP || udp_len > ip.len {
            return Err(DropReason::BadTransportHeader);
        }
        let payload = Payload {
            at: ip.at + UDP,
            len: udp_len - UDP,
        };
        match (udp.src_port(), udp.dst_port()) {
            (DHCP_CLIENT, DHCP_SERVER) => self.handle_dhcp(ip, &payload, frame),
            _ => Err(DropReason::Protocol),
        }
    }

    fn handle_dhcp(
        &mut self,
        ip: &Ip,
        payload: &Payload,
        frame: &TxFrame<'_, '_>,
    ) -> Result<(), DropReason> {
        let message = payload.copy(frame, MAX_DHCP);
        let reply = self
            .dhcp
            .handle(&message, ip.src)
            .map_err(|_| DropReason::BadDhcp)?;
        let Some(reply) = reply else {
            return Ok(());
        };
        let macs = Macs {
            guest: reply.to_mac,
            ..self.macs()
        };
        let from = SocketAddrV4::new(self.config.gateway, DHCP_SERVER);
        let to = SocketAddrV4::new(reply.to, DHCP_CLIENT);
        let sent = self
            .outbox
            .push(|frame| datagram::write(frame, macs, from, to, &reply.payload));
        if sent { Ok(()) } else { Err(DropReason::Full) }
    }

    fn handle_icmp(
        &mut self,
        ip: &Ip,
        frame: &TxFrame<'_, '_>,
        now: Instant,
    ) -> Result<(), DropReason> {
        let mut packet = vec![0; ip.at + ip.len.min(MAX_ICMP)];
        let n = frame.copy_head(&mut packet);
        let message = &packet[ip.at.min(n)..n];
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

/// Checks the IPv4 header at the start of `head`; `len` is what the frame holds from there on.
///
/// The header checksum is verified (RFC 1122, 3.2.1.2), and the packet must fit the frame. A longer
/// frame is padding.
fn check_ipv4(head: &[u8], len: usize) -> Result<Ip, DropReason> {
    if head.len() < IPV4 {
        return Err(DropReason::Truncated);
    }
    let packet = Ipv4Packet::new_unchecked(head);
    let header_len = usize::from(packet.header_len());
    let total_len = usize::from(packet.total_len());
    if packet.version() != 4 || header_len < IPV4 || header_len > head.len() {
        return Err(DropReason::BadIpHeader);
    }
    if total_len < header_len || total_len > len || !packet.verify_checksum() {
        return Err(DropReason::BadIpHeader);
    }
    if packet.more_frags() || packet.frag_offset() != 0 {
        return Err(DropReason::Fragment);
    }
    Ok(Ip {
        src: packet.src_addr(),
        dst: packet.dst_addr(),
        protocol: packet.next_header(),
        at: ETHERNET + header_len,
        len: total_len - header_len,
    })
}
