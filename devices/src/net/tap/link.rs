//! What is known about a tap's interface, and one line in the log for each change.

use std::io;

/// Whether the interface takes and gives frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::net) enum State {
    Up,
    Down,
    Gone,
}

/// The last known state of an interface.
#[derive(Debug)]
pub(in crate::net) struct LinkState {
    tap: String,
    state: State,
}

impl LinkState {
    /// The interface `tap`, taken to be up.
    pub(in crate::net) fn new(tap: &str) -> Self {
        Self {
            tap: tap.to_owned(),
            state: State::Up,
        }
    }

    pub(in crate::net) fn is_gone(&self) -> bool {
        self.state == State::Gone
    }

    /// The interface is in `state` now. What is gone stays so.
    pub(in crate::net) fn set(&mut self, state: State) {
        if self.state == state || self.is_gone() {
            return;
        }
        self.state = state;
        let tap = &self.tap;
        match state {
            State::Up => tracing::warn!("the tap {tap} is up again"),
            State::Down => {
                tracing::warn!("the tap {tap} is down: no frame passes until it is up");
            }
            State::Gone => {
                tracing::warn!(
                    "the tap {tap} was removed: no frame passes until wonton is restarted"
                );
            }
        }
    }

    /// Takes note of what a failed call says about the interface, which may be nothing.
    pub(in crate::net) fn failed(&mut self, error: &io::Error) {
        match error.raw_os_error() {
            Some(libc::EIO) => self.set(State::Down),
            Some(libc::EBADFD | libc::ENODEV) => self.set(State::Gone),
            // A frame that the host does not take.
            _ => {}
        }
    }
}
