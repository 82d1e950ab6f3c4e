//! Feature bits of the network card, and the offloads that they stand for.

use net::nic::Offloads;

use crate::virtio::spec::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, NET_F_CSUM, NET_F_CTRL_GUEST_OFFLOADS,
    NET_F_CTRL_RX, NET_F_CTRL_VQ, NET_F_GUEST_CSUM, NET_F_GUEST_TSO4, NET_F_GUEST_TSO6,
    NET_F_GUEST_USO4, NET_F_GUEST_USO6, NET_F_HOST_TSO4, NET_F_HOST_TSO6, NET_F_HOST_USO,
    NET_F_MAC, NET_F_MQ, NET_F_MRG_RXBUF, NET_F_MTU, NET_F_STATUS,
};

/// Each offload with its feature bit, and the offload that it requires (VIRTIO 1.3, 5.1.3.1).
const OFFLOADS: [(u64, Offloads, Offloads); 9] = [
    (NET_F_CSUM, Offloads::CSUM, Offloads::empty()),
    (NET_F_GUEST_CSUM, Offloads::GUEST_CSUM, Offloads::empty()),
    (NET_F_GUEST_TSO4, Offloads::GUEST_TSO4, Offloads::GUEST_CSUM),
    (NET_F_GUEST_TSO6, Offloads::GUEST_TSO6, Offloads::GUEST_CSUM),
    (NET_F_GUEST_USO4, Offloads::GUEST_USO4, Offloads::GUEST_CSUM),
    (NET_F_GUEST_USO6, Offloads::GUEST_USO6, Offloads::GUEST_CSUM),
    (NET_F_HOST_TSO4, Offloads::HOST_TSO4, Offloads::CSUM),
    (NET_F_HOST_TSO6, Offloads::HOST_TSO6, Offloads::CSUM),
    (NET_F_HOST_USO, Offloads::HOST_USO, Offloads::CSUM),
];

/// What frames to the guest may ask of it: the driver can change it while the card runs.
pub const GUEST_OFFLOADS: Offloads = Offloads::GUEST_CSUM
    .union(Offloads::GUEST_TSO4)
    .union(Offloads::GUEST_TSO6)
    .union(Offloads::GUEST_USO4)
    .union(Offloads::GUEST_USO6);

/// The features to offer for a backend with `offloads`.
pub fn offered_features(offloads: Offloads) -> u64 {
    let always = F_VERSION_1
        | F_EVENT_IDX
        | F_INDIRECT_DESC
        | NET_F_MAC
        | NET_F_MTU
        | NET_F_STATUS
        | NET_F_MRG_RXBUF
        | NET_F_CTRL_VQ
        | NET_F_CTRL_RX;
    let changeable = if offloads.contains(Offloads::GUEST_CSUM) {
        NET_F_CTRL_GUEST_OFFLOADS
    } else {
        0
    };
    OFFLOADS
        .iter()
        .filter(|(_, offload, needs)| offloads.contains(*offload | *needs))
        .fold(always | changeable, |features, (bit, ..)| features | bit)
}

/// `features` without those that require one which is not among them (VIRTIO 1.3, 5.1.3.1): Linux
/// refuses a card that offers such.
pub fn consistent(features: u64) -> u64 {
    let sound = features & (offered_features(accepted_offloads(features)) | NET_F_MQ);
    if features & NET_F_CTRL_VQ != 0 {
        sound
    } else {
        sound & !(NET_F_CTRL_RX | NET_F_CTRL_GUEST_OFFLOADS | NET_F_MQ)
    }
}

/// The offloads that a driver which accepted `features` may be asked for.
///
/// One without the feature that it requires is dropped, although the driver should not have
/// accepted it.
pub fn accepted_offloads(features: u64) -> Offloads {
    let named = OFFLOADS
        .iter()
        .filter(|(bit, ..)| features & bit != 0)
        .fold(Offloads::empty(), |sum, (_, offload, _)| sum | *offload);
    OFFLOADS
        .iter()
        .filter(|(_, offload, needs)| named.contains(*offload | *needs))
        .fold(Offloads::empty(), |sum, (_, offload, _)| sum | *offload)
}

/// The offloads that VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET names with `bits` (VIRTIO 1.3, 5.1.6.5.6).
///
/// `None` when a bit is no offload towards the guest, was not among the accepted `features`, or lacks
/// the one that it requires.
pub fn changed_offloads(features: u64, bits: u64) -> Option<Offloads> {
    let offloads = accepted_offloads(bits);
    // The bits that `offloads` stands for: all of `bits`, if those make sense at all.
    let understood = OFFLOADS
        .iter()
        .filter(|(_, offload, _)| GUEST_OFFLOADS.contains(*offload) && offloads.contains(*offload))
        .fold(0, |sum, (bit, ..)| sum | bit);
    let wanted = bits == understood && features & bits == bits;
    wanted.then_some(offloads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_hold_both_ways() {
        assert_eq!(accepted_offloads(NET_F_HOST_TSO4), Offloads::empty());
        assert_eq!(
            accepted_offloads(NET_F_CSUM | NET_F_HOST_TSO4 | NET_F_GUEST_TSO6),
            Offloads::CSUM | Offloads::HOST_TSO4
        );
        let offered = offered_features(Offloads::GUEST_TSO4 | Offloads::CSUM);
        assert_eq!(offered & NET_F_GUEST_TSO4, 0);
        assert_ne!(offered & NET_F_CSUM, 0);
    }

    #[test]
    fn what_lost_its_base_is_not_offered() {
        let all = offered_features(Offloads::all()) | NET_F_MQ;
        assert_eq!(consistent(all), all);
        assert_eq!(consistent(0), 0);
        let ctrl = NET_F_CTRL_RX | NET_F_CTRL_GUEST_OFFLOADS | NET_F_MQ;
        assert_eq!(
            consistent(all & !NET_F_CTRL_VQ),
            all & !NET_F_CTRL_VQ & !ctrl
        );
        let left = consistent(all & !NET_F_GUEST_CSUM);
        assert_eq!(accepted_offloads(left) & GUEST_OFFLOADS, Offloads::empty());
        assert_eq!(left & NET_F_CTRL_GUEST_OFFLOADS, 0);
        assert_ne!(left & NET_F_HOST_USO, 0);
    }

    #[test]
    fn changes_are_subsets_that_make_sense() {
        let features = NET_F_CSUM | NET_F_GUEST_CSUM | NET_F_GUEST_TSO4;
        for (bits, offloads) in [
            (0, Some(Offloads::empty())),
            (NET_F_GUEST_CSUM, Some(Offloads::GUEST_CSUM)),
            (NET_F_GUEST_TSO4, None),
            (NET_F_CSUM, None),
            (NET_F_GUEST_CSUM | NET_F_GUEST_TSO6, None),
            (NET_F_GUEST_CSUM | F_VERSION_1, None),
        ] {
            assert_eq!(changed_offloads(features, bits), offloads, "{bits:#x}");
        }
        let without = features & !NET_F_GUEST_CSUM;
        let bits = NET_F_GUEST_CSUM | NET_F_GUEST_TSO4;
        assert_eq!(changed_offloads(without, bits), None);
    }

    #[test]
    fn every_offload_has_a_feature() {
        let all = offered_features(Offloads::all());
        assert_eq!(accepted_offloads(all), Offloads::all());
    }
}
