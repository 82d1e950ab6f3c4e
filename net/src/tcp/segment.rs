//! Segments as the protocol core sees them: numbers and lengths, never payload bytes.

use super::seq::SeqNum;

bitflags::bitflags! {
    /// Control bits (RFC 9293, 3.1).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Flags: u8 {
        /// No more data from the sender.
        const FIN = 0x01;
        /// Synchronize sequence numbers.
        const SYN = 0x02;
        /// Reset the connection.
        const RST = 0x04;
        /// Deliver what is queued.
        const PSH = 0x08;
        /// The acknowledgment field is significant.
        const ACK = 0x10;
        /// The urgent pointer field is significant.
        const URG = 0x20;
    }
}

/// Options of a SYN that this stack understands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SynOptions {
    /// Maximum segment size (RFC 9293, 3.7.1), in octets of payload.
    pub mss: Option<u16>,
    /// Window scale shift (RFC 7323, 2.2), at most 14.
    pub window_scale: Option<u8>,
}

/// A segment from the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Sequence number of the first octet (or of SYN).
    pub seq: SeqNum,
    /// Acknowledgment number; meaningful with [`Flags::ACK`].
    pub ack: SeqNum,
    /// Control bits.
    pub flags: Flags,
    /// The window field as sent: not scaled yet.
    pub window: u16,
    /// Octets of payload.
    pub len: u32,
    /// Options; only those of a SYN count.
    pub options: SynOptions,
}

impl Segment {
    /// Octets of sequence space that the segment takes: payload, SYN and FIN.
    pub fn seq_len(&self) -> u32 {
        self.len
            + u32::from(self.flags.contains(Flags::SYN))
            + u32::from(self.flags.contains(Flags::FIN))
    }
}

/// The header of a segment to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Sequence number.
    pub seq: SeqNum,
    /// Acknowledgment number; zero without [`Flags::ACK`].
    pub ack: SeqNum,
    /// Control bits.
    pub flags: Flags,
    /// The window field, already scaled down.
    pub window: u16,
    /// Options; set on SYN only.
    pub options: SynOptions,
}

/// The RST that answers a segment for which there is no connection (RFC 9293, 3.10.7.1).
///
/// `None` when the segment is itself a RST.
pub fn reset_for(segment: &Segment) -> Option<Header> {
    if segment.flags.contains(Flags::RST) {
        return None;
    }
    Some(if segment.flags.contains(Flags::ACK) {
        Header {
            seq: segment.ack,
            flags: Flags::RST,
            ..Header::default()
        }
    } else {
        Header {
            ack: segment.seq + segment.seq_len(),
            flags: Flags::RST | Flags::ACK,
            ..Header::default()
        }
    })
}
