//! What bursts are put together in.

use net::nic::TxBurst;
use vm_memory::VolatileSlice;

use crate::net::tx::MAX_FRAME;

/// Buffers that are reused from burst to burst.
///
/// Apart from the engine because they hold addresses of guest memory during a burst, and so do not
/// move between threads; the engine does.
#[derive(Debug)]
pub struct Scratch {
    pub(super) tx: TxBurst<'static>,
    pub(super) rx: Vec<VolatileSlice<'static>>,
    pub(super) sink: Box<[u8]>,
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            tx: TxBurst::default(),
            rx: Vec::new(),
            sink: vec![0; MAX_FRAME].into(),
        }
    }
}

/// An empty vector for another borrow of memory, with the allocation of `slices`.
pub(super) fn recycle<'n>(mut slices: Vec<VolatileSlice<'_>>) -> Vec<VolatileSlice<'n>> {
    slices.clear();
    slices.into_iter().map(|_| unreachable!()).collect()
}
