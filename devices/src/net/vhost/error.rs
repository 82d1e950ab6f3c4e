//! Why the kernel does not carry the frames.

use std::io;

/// Where vhost-net is.
const DEVICE: &str = "/dev/vhost-net";

/// Why vhost-net does not do what we want. [`Self::hint`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum VhostError {
    /// The kernel has no vhost-net.
    #[error("cannot open `{DEVICE}`: no such device")]
    Missing,
    /// It has, but not for us.
    #[error("cannot open `{DEVICE}`: permission denied")]
    Denied,
    /// It has, but it does not open.
    #[error("cannot open `{DEVICE}`")]
    Open(#[source] vhost::Error),
    /// It does not know VIRTIO 1.
    #[error("`{DEVICE}` lacks VIRTIO_F_VERSION_1")]
    Legacy,
    /// A call failed.
    #[error("vhost-net cannot {what}")]
    Call {
        /// What it was to do.
        what: &'static str,
        /// Why not.
        #[source]
        source: vhost::Error,
    },
}

impl VhostError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Missing => Some("load the module vhost_net, or take vhost=off".to_owned()),
            Self::Denied => Some(format!(
                "give yourself access to {DEVICE} (group kvm on Debian), or take vhost=off"
            )),
            _ => None,
        }
    }

    pub(super) fn open(error: vhost::Error) -> Self {
        let vhost::Error::VhostOpen(cause) = &error else {
            return Self::Open(error);
        };
        match cause.kind() {
            io::ErrorKind::NotFound => Self::Missing,
            io::ErrorKind::PermissionDenied => Self::Denied,
            _ if matches!(cause.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => Self::Missing,
            _ => Self::Open(error),
        }
    }

    pub(super) fn call(what: &'static str, source: vhost::Error) -> Self {
        Self::Call { what, source }
    }
}
