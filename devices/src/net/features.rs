//! Feature bits of the network card, and the offloads that they stand for.

use net::nic::Offloads;

use crate::virtio::spec::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, NET_F_CSUM, NET_F_GUEST_CSUM, NET_F_GUEST_TSO4,
    NET_F_GUEST_TSO6, NET_F_GUEST_USO4, NET_F_GUEST_USO6, NET_F_HOST_TSO4, NET_F_HOST_TSO6,
    NET_F_HOST_USO, NET_F_MAC, NET_F_MRG_RXBUF, NET_F_MTU, NET_F_STATUS,
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

/// The features to offer for a backend with `offloads`.
pub fn offered_features(offloads: Offloads) -> u64 {
    let always = F_VERSION_1
        | F_EVENT_IDX
        | F_INDIRECT_DESC
        | NET_F_MAC
        | NET_F_MTU
        | NET_F_STATUS
        | NET_F_MRG_RXBUF;
    OFFLOADS
        .iter()
        .filter(|(_, offload, needs)| offloads.contains(*offload | *needs))
        .fold(always, |features, (bit, ..)| features | bit)
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
    fn every_offload_has_a_feature() {
        let all = offered_features(Offloads::all());
        assert_eq!(accepted_offloads(all), Offloads::all());
    }
}
