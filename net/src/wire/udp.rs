//! The UDP header (RFC 768) of a datagram from the guest.

use std::net::IpAddr;

use smoltcp::wire::{IpProtocol, UdpPacket, checksum};
use vm_memory::VolatileSlice;

use super::UDP;
use super::datagram::CHECKSUM_OFFSET;
use crate::checksum::Sum;
use crate::drops::DropReason;
use crate::nic::{
    VNET_HDR_F_DATA_VALID, VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_NONE, VNET_HDR_GSO_UDP_L4, VnetHdr,
};
use crate::udp::MAX_RUN;

/// A datagram whose header was found good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpHead {
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// Bytes of payload.
    pub payload_len: usize,
    /// The checksum field; 0 means that the sender made none.
    pub checksum: u16,
}

/// Reads the header at the start of `head`, a copy of what follows the IP header; `len` is the
/// length of the IP payload. More than the datagram needs is ignored.
///
/// # Errors
/// The header does not fit.
pub fn parse(head: &[u8], len: usize) -> Result<UdpHead, DropReason> {
    if head.len() < UDP {
        return Err(DropReason::BadTransportHeader);
    }
    let packet = UdpPacket::new_unchecked(head);
    let udp_len = usize::from(packet.len());
    if udp_len < UDP || udp_len > len {
        return Err(DropReason::BadTransportHeader);
    }
    Ok(UdpHead {
        src_port: packet.src_port(),
        dst_port: packet.dst_port(),
        payload_len: udp_len - UDP,
        checksum: packet.checksum(),
    })
}

/// Bytes of payload in each datagram of the frame but the last, by what the guest says beside it: for
/// a frame that is no run, the length of its payload.
///
/// # Errors
/// It is no frame of datagrams, a datagram would be empty, or there would be more than [`MAX_RUN`].
pub fn segment(hdr: &VnetHdr, payload_len: usize) -> Result<usize, DropReason> {
    match hdr.gso_type {
        VNET_HDR_GSO_NONE => Ok(payload_len),
        VNET_HDR_GSO_UDP_L4 if hdr.gso_size > 0 => {
            let size = usize::from(hdr.gso_size);
            if payload_len.div_ceil(size) > MAX_RUN {
                return Err(DropReason::BadTransportHeader);
            }
            Ok(size)
        }
        _ => Err(DropReason::BadTransportHeader),
    }
}

/// True unless the guest finished the checksum and got it wrong (RFC 1122, 4.1.3.4), or left it to us
/// to put one elsewhere than in the UDP header.
///
/// `at` is where the UDP header starts in the frame made of `slices`. A frame that leaves the sum to
/// us carries only that of the pseudo header, and one that vouches for its sum is believed: a wrong
/// datagram would only reach who the guest sent it to.
pub fn checksum_holds(
    slices: &[VolatileSlice<'_>],
    hdr: &VnetHdr,
    src: IpAddr,
    dst: IpAddr,
    at: usize,
    head: &UdpHead,
) -> bool {
    if hdr.flags & VNET_HDR_F_NEEDS_CSUM != 0 {
        return usize::from(hdr.csum_start) == at && hdr.csum_offset == CHECKSUM_OFFSET;
    }
    if head.checksum == 0 || hdr.flags & VNET_HDR_F_DATA_VALID != 0 {
        return true;
    }
    let len = UDP + head.payload_len;
    let pseudo = checksum::pseudo_header(
        &src.into(),
        &dst.into(),
        IpProtocol::Udp,
        u32::try_from(len).unwrap_or(u32::MAX),
    );
    let mut sum = Sum::from_words(pseudo);
    let (mut skip, mut left) = (at, len);
    let mut chunk = [0; 512];
    for slice in slices {
        let mut from = skip.min(slice.len());
        skip -= from;
        while left > 0 && from < slice.len() {
            let n = left.min(slice.len() - from).min(chunk.len());
            let Ok(part) = slice.subslice(from, n) else {
                return false;
            };
            part.copy_to(&mut chunk[..n]);
            sum.add(&chunk[..n]);
            from += n;
            left -= n;
        }
    }
    left == 0 && sum.partial() == u16::MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 10.0.2.15:7 to 192.0.2.1:9, payload "abc".
    fn datagram() -> Vec<u8> {
        let mut bytes = vec![0, 7, 0, 9, 0, 11, 0, 0, b'a', b'b', b'c'];
        UdpPacket::new_unchecked(&mut bytes[..]).fill_checksum(&src().into(), &dst().into());
        bytes
    }

    fn src() -> IpAddr {
        [10, 0, 2, 15].into()
    }

    fn dst() -> IpAddr {
        [192, 0, 2, 1].into()
    }

    #[test]
    fn lengths_are_checked() {
        let bytes = datagram();
        let head = parse(&bytes, 40).unwrap();
        assert_eq!((head.src_port, head.dst_port, head.payload_len), (7, 9, 3));
        assert!(parse(&bytes[..7], 40).is_err());
        assert!(parse(&bytes, 10).is_err());
        let short = [0, 7, 0, 9, 0, 7, 0, 0];
        assert!(parse(&short, 8).is_err());
        let empty = [0, 7, 0, 9, 0, 8, 0, 0];
        assert_eq!(parse(&empty, 8).unwrap().payload_len, 0);
    }

    #[test]
    fn checksums_are_verified_unless_they_are_left_to_us() {
        for split in 0..=14 + 11 {
            let mut frame = vec![0; 14];
            frame.extend(datagram());
            let head = parse(&frame[14..], 11).unwrap();
            let holds = |frame: &mut [u8], hdr: &VnetHdr, head: &UdpHead| {
                let (a, b) = frame.split_at_mut(split);
                let slices = [VolatileSlice::from(a), VolatileSlice::from(b)];
                checksum_holds(&slices, hdr, src(), dst(), 14, head)
            };
            let plain = VnetHdr::default();
            assert!(holds(&mut frame, &plain, &head), "split at {split}");
            frame[24] ^= 1;
            assert!(!holds(&mut frame, &plain, &head), "split at {split}");
            let partial = VnetHdr {
                flags: VNET_HDR_F_NEEDS_CSUM,
                csum_start: 14,
                csum_offset: 6,
                ..plain
            };
            assert!(holds(&mut frame, &partial, &head));
            for (csum_start, csum_offset) in [(0, 6), (13, 6), (14, 0), (14, 16), (65535, 65535)] {
                let lie = VnetHdr {
                    csum_start,
                    csum_offset,
                    ..partial
                };
                assert!(!holds(&mut frame, &lie, &head));
            }
            let none = UdpHead {
                checksum: 0,
                ..head
            };
            assert!(holds(&mut frame, &plain, &none));
        }
    }

    #[test]
    fn runs_are_believed_within_bounds() {
        let run = |gso_size, len| {
            let hdr = VnetHdr {
                gso_type: VNET_HDR_GSO_UDP_L4,
                gso_size,
                ..VnetHdr::default()
            };
            segment(&hdr, len).ok()
        };
        assert_eq!(segment(&VnetHdr::default(), 1472), Ok(1472));
        assert_eq!(run(1472, 65507), Some(1472));
        assert_eq!(run(2000, 1472), Some(2000));
        assert_eq!(run(1, MAX_RUN), Some(1));
        assert_eq!(run(1, MAX_RUN + 1), None);
        assert_eq!(run(1, 65507), None);
        assert_eq!(run(0, 1472), None);
        for gso_type in [1, 3, 4, 0x80, 0x85] {
            let hdr = VnetHdr {
                gso_type,
                gso_size: 1000,
                ..VnetHdr::default()
            };
            assert!(segment(&hdr, 1472).is_err(), "type {gso_type}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_within_their_bounds(
            bytes in proptest::collection::vec(any::<u8>(), 0..16),
            len in 0usize..70_000,
        ) {
            if let Ok(head) = parse(&bytes, len) {
                prop_assert!(UDP + head.payload_len <= len);
            }
        }
    }
}
