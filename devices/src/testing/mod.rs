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

use std::time::{Duration, Instant};

pub use self::driver::{CTRL_QUEUE_SIZE, MockDriver, MockInterrupt, Received};
#[cfg(test)]
pub(crate) use self::driver::{RAM_LEN, REGION_BORDER};
pub use self::pci::{Attached, MockPciHost};
pub use self::ring::{Buffer, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, MockRing};

/// What `attempt` has at last; it is asked again and again.
///
/// # Panics
/// When it has nothing for 10 seconds.
pub fn eventually<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(Instant::now() < deadline, "it never happened");
        std::thread::sleep(Duration::from_millis(1));
    }
}
