//! The UDP header (RFC 768) of a datagram from the guest.

use std::net::IpAddr;

use smoltcp::wire::{IpProtocol, UdpPacket, checksum};
use vm_memory::VolatileSlice;

use super::UDP;
use crate::checksum::Sum;
use crate::drops::DropReason;
use crate::nic::{VNET_HDR_F_DATA_VALID, VNET_HDR_F_NEEDS_CSUM, VnetHdr};

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

/// True unless the guest finished the checksum and got it wrong (RFC 1122, 4.1.3.4).
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
    if head.checksum == 0 || hdr.flags & (VNET_HDR_F_NEEDS_CSUM | VNET_HDR_F_DATA_VALID) != 0 {
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
                ..plain
            };
            assert!(holds(&mut frame, &partial, &head));
            let none = UdpHead {
                checksum: 0,
                ..head
            };
            assert!(holds(&mut frame, &plain, &none));
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
