//! Why a tap cannot be had.

use std::io;
use std::os::fd::RawFd;

/// Where taps come from.
pub(super) const DEVICE: &str = "/dev/net/tun";

/// Why a tap cannot be had. [`Self::hint`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// There is no driver for taps.
    #[error("cannot open `{DEVICE}`: no such device")]
    Missing,
    /// There is, but not for us.
    #[error("cannot open `{DEVICE}`: permission denied")]
    Denied,
    /// There is, but it does not open.
    #[error("cannot open `{DEVICE}`")]
    Open(#[source] io::Error),
    /// No interface can have that name.
    #[error("`{0}` is no name for a tap: 1 to 15 bytes, without `/`, `:`, `%` and spaces")]
    Name(String),
    /// We may not make interfaces.
    #[error("there is no tap `{0}`, and making one is not permitted")]
    MayNotCreate(String),
    /// The tap is somebody else's.
    #[error("the tap `{0}` belongs to another user")]
    NotOwner(String),
    /// Somebody has it open.
    #[error("the tap `{0}` is in use by another process")]
    Busy(String),
    /// The name is that of another kind of interface.
    #[error("the interface `{0}` is not a tap")]
    NotATap(String),
    /// Several queues are asked for, and the tap was made for one.
    #[error("the tap `{0}` was made without multi_queue")]
    OneQueue(String),
    /// The descriptor is something else.
    #[error("descriptor {0} is not a tap")]
    FdNotATap(RawFd),
    /// The descriptor is not open.
    #[error("descriptor {0} is not open")]
    FdClosed(RawFd),
    /// The descriptors are of different taps.
    #[error("descriptors {0} and {1} are not of the same tap")]
    FdMixed(RawFd, RawFd),
    /// Frames come without the header that a network card needs.
    #[error("the tap `{0}` has no virtio headers (vnet_hdr)")]
    NoVnetHdr(String),
    /// A call failed.
    #[error("cannot {what} the tap `{name}`")]
    Call {
        /// What it was to do.
        what: &'static str,
        /// The tap.
        name: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl TapError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let make = |name: &str, more: &str| {
            format!(
                "as root: ip tuntap add dev {name} mode tap user $USER vnet_hdr{more} && ip link set {name} up"
            )
        };
        Some(match self {
            Self::Missing => "load the module tun".to_owned(),
            Self::Denied => format!("make {DEVICE} accessible (mode 0666 is usual), or run as root"),
            Self::MayNotCreate(name) => make(name, ""),
            Self::NotOwner(name) => {
                format!("as root: ip tuntap del dev {name} mode tap, then {}", make(name, ""))
            }
            Self::Busy(name) => format!("take another tap, or end the process that has {name} open"),
            Self::OneQueue(name) => {
                format!("take queues=1, or make it anew; {}", make(name, " multi_queue"))
            }
            Self::FdNotATap(_) | Self::FdClosed(_) => {
                "pass the number of an inherited descriptor on which TUNSETIFF was done with IFF_TAP"
                    .to_owned()
            }
            Self::NoVnetHdr(_) => "open it with IFF_VNET_HDR".to_owned(),
            _ => return None,
        })
    }

    pub(super) fn open(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => Self::Missing,
            Some(libc::EACCES | libc::EPERM) => Self::Denied,
            _ => Self::Open(error),
        }
    }

    /// Names what was tried when a call fails.
    pub(super) fn call<T>(
        what: &'static str,
        name: &str,
        result: io::Result<T>,
    ) -> Result<T, Self> {
        result.map_err(|source| Self::Call {
            what,
            name: name.to_owned(),
            source,
        })
    }
}
