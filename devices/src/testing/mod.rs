//! Tools for tests: the driver's side of a network card, and a harness for backends.
//!
//! A backend's own test is one line, and needs the feature `testing` of this crate:
//!
//! ```
//! # use devices::{net::null::Null as MyBackend, testing::conformance};
//! conformance::run(|| Box::new(MyBackend));
//! ```

pub mod conformance;
mod ctrl;
mod driver;
mod heap;
mod pci;
mod ring;

pub use self::driver::{CTRL_QUEUE_SIZE, MockDriver, MockInterrupt, Received};
#[cfg(test)]
pub(crate) use self::driver::{RAM_LEN, REGION_BORDER};
pub use self::pci::{Attached, MockPciHost};
pub use self::ring::{Buffer, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, MockRing};
