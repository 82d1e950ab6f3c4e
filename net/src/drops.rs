//! Frames that the stack drops, counted by reason. A drop is not an error: it is what a network does.

/// Why a frame from the guest went nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// Shorter than the headers it should have.
    Truncated,
    /// An EtherType that is not handled.
    EtherType,
    /// An IP header that contradicts itself, or its checksum.
    BadIpHeader,
    /// A fragment of an IP packet.
    Fragment,
    /// An IP protocol that is not handled.
    Protocol,
    /// A source address that is not the guest's.
    Spoofed,
    /// A destination that no host has: multicast, broadcast, loopback.
    Unroutable,
    /// An address of the guest's network that nobody has.
    Vacant,
    /// A transport header that does not fit its packet.
    BadTransportHeader,
    /// A DHCP message that makes no sense.
    BadDhcp,
    /// A DNS message that makes no sense.
    BadDns,
    /// A table or queue was full.
    Full,
    /// The host has no socket of the kind that is needed.
    NoSocket,
    /// The host refused to send it.
    HostRefused,
}

impl DropReason {
    const COUNT: usize = Self::HostRefused as usize + 1;

    /// All reasons.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Truncated,
        Self::EtherType,
        Self::BadIpHeader,
        Self::Fragment,
        Self::Protocol,
        Self::Spoofed,
        Self::Unroutable,
        Self::Vacant,
        Self::BadTransportHeader,
        Self::BadDhcp,
        Self::BadDns,
        Self::Full,
        Self::NoSocket,
        Self::HostRefused,
    ];
}

/// A counter per reason.
#[derive(Clone, Copy, Debug, Default)]
pub struct Drops([u64; DropReason::COUNT]);

impl Drops {
    /// Counts one drop.
    pub fn count(&mut self, reason: DropReason) {
        self.0[reason as usize] += 1;
    }

    /// Counts what `other` has counted.
    pub fn add(&mut self, other: &Self) {
        for (count, more) in self.0.iter_mut().zip(other.0) {
            *count += more;
        }
    }

    /// Drops for `reason` so far.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// All counters that are not zero.
    pub fn iter(&self) -> impl Iterator<Item = (DropReason, u64)> {
        DropReason::ALL
            .into_iter()
            .map(|reason| (reason, self.get(reason)))
            .filter(|(_, count)| *count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_counter_of_its_own() {
        let mut drops = Drops::default();
        for (i, reason) in DropReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, i);
            for _ in 0..=i {
                drops.count(reason);
            }
        }
        let counts: Vec<u64> = drops.iter().map(|(_, count)| count).collect();
        assert_eq!(counts, (1..=14).collect::<Vec<_>>());
    }
}
