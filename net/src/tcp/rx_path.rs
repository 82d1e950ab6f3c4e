//! The ways that downloaded bytes take.
//!
//! The TCP sender sees lengths and sequence numbers only, so it is the same for all of them; what
//! differs is where bytes wait between the host's socket and the guest's acknowledgment.

/// How downloaded bytes reach the guest's descriptors.
///
/// | path | system calls per segment | copies | un-ACKed bytes wait in |
/// | --- | --- | --- | --- |
/// | `Ring` | read into the ring | 2 | the ring |
/// | `Copy` | as `Ring` | 3 | the ring |
/// | `Direct` | peek into the descriptors, drop on ACK | 1 | the host's socket |
/// | `DirectDiscard` | as `Direct` | 1, and what is in flight again for each peek | the host's socket |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RxPath {
    /// Header and ring slices go straight to the descriptors.
    Ring,
    /// As `Ring`, but the frame is made in a scratch buffer first: the baseline.
    Copy,
    /// The kernel copies from the socket's queue to the descriptors (`recvmsg` with MSG_PEEK at
    /// SO_PEEK_OFF). Needs GUEST_CSUM, since nobody sees the payload, and Linux 6.9; a flow for which
    /// either is missing takes `Ring`.
    ///
    /// The default: in `docs/performance.md` it costs a fifth less CPU than `Ring` and is never slower.
    #[default]
    Direct,
    /// As `Direct` without SO_PEEK_OFF: each peek copies what is in flight to nowhere first. What
    /// kernels before 6.9 need, and the baseline for SO_PEEK_OFF.
    DirectDiscard,
}

impl RxPath {
    /// All of them, with the names that people use.
    pub const ALL: [(&'static str, Self); 4] = [
        ("ring", Self::Ring),
        ("direct", Self::Direct),
        ("direct-discard", Self::DirectDiscard),
        ("copy", Self::Copy),
    ];

    /// The path called `name`.
    pub fn named(name: &str) -> Option<Self> {
        let found = Self::ALL.iter().find(|(known, _)| *known == name);
        found.map(|(_, path)| *path)
    }
}
