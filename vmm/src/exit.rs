//! How the process ends.
//!
//! | code | meaning |
//! | --- | --- |
//! | 0 | the guest powered off (ACPI S5), or the user quit with Ctrl-A X |
//! | 1 | host error: the VM could not be made, or the host failed under it |
//! | 2 | usage: the command line makes no sense |
//! | 10 | the guest asked for a reset (ACPI reset register, or the keyboard controller) |
//! | 20 | guest fault: triple fault, or KVM could not go on; a dump is on stderr |
//! | 128+n | stopped by signal n (SIGHUP 129, SIGINT 130, SIGTERM 143) |
//!
//! A kernel that panics with `panic=-1`, part of the default command line, asks for a reset and so
//! ends in 10. With `reboot=t` a guest resets by a triple fault, which is indistinguishable from a
//! crash and ends in 20; that is why `reboot=a` is part of the default command line.

use std::process::ExitCode;

/// Why the process ends; see the module's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The guest powered off, or the user quit.
    PowerOff,
    /// The host could not do it.
    HostError,
    /// The command line makes no sense.
    Usage,
    /// The guest asked for a reset.
    Reset,
    /// The guest crashed its CPU, or KVM gave up on it.
    GuestFault,
    /// A signal told us to stop.
    Signal(u8),
}

impl Exit {
    /// The process exit code.
    pub fn code(self) -> u8 {
        match self {
            Self::PowerOff => 0,
            Self::HostError => 1,
            Self::Usage => 2,
            Self::Reset => 10,
            Self::GuestFault => 20,
            Self::Signal(signal) => 128u8.saturating_add(signal),
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_as_documented() {
        let codes = [
            (Exit::PowerOff, 0),
            (Exit::HostError, 1),
            (Exit::Usage, 2),
            (Exit::Reset, 10),
            (Exit::GuestFault, 20),
            (Exit::Signal(15), 143),
        ];
        for (exit, code) in codes {
            assert_eq!(exit.code(), code, "{exit:?}");
        }
    }
}
