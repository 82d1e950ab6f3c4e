//! An open tap: the interface, and one descriptor for each of its queues.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;

use net::nic::Offloads;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::error::{DEVICE, TapError};
use super::sys::{self, IfReq, InterfaceCall};
use crate::virtio::spec::NET_HDR_LEN;

const IFF_TAP: u16 = flag(libc::IFF_TAP);
const IFF_NO_PI: u16 = flag(libc::IFF_NO_PI);
const IFF_VNET_HDR: u16 = flag(libc::IFF_VNET_HDR);
const IFF_MULTI_QUEUE: u16 = flag(libc::IFF_MULTI_QUEUE);
const IFF_ATTACH_QUEUE: u16 = flag(libc::IFF_ATTACH_QUEUE);
const IFF_DETACH_QUEUE: u16 = flag(libc::IFF_DETACH_QUEUE);
const IFF_UP: u16 = flag(libc::IFF_UP);

/// Flags of an interface are a short.
const fn flag(flag: libc::c_int) -> u16 {
    (flag & 0xffff) as u16
}

/// Packets that a drain throws away at most; more than the queue of a tap holds.
const DRAIN: usize = 4096;

/// A tap whose frames carry `struct virtio_net_hdr` of 12 bytes.
///
/// At first one queue is attached; [`Self::attach`] changes that.
#[derive(Debug)]
pub struct TapDevice {
    name: String,
    mtu: u16,
    queues: Vec<File>,
    attached: usize,
    uso: bool,
}

impl TapDevice {
    /// Opens the tap `name` with so many queues (1 or more), or makes it. A tap made here is up, has
    /// `mtu` if given, and goes away when it is closed.
    ///
    /// # Errors
    /// See [`TapError`].
    pub fn open(name: &str, queues: u16, mtu: Option<u16>) -> Result<Self, TapError> {
        check_name(name)?;
        let socket = control_socket().map_err(TapError::Open)?;
        let mut request = IfReq::new(name);
        let known = sys::interface(&socket, InterfaceCall::GetIndex, &mut request).is_ok();
        let flags = known.then(|| tun_flags(name)).flatten();
        let multi = queues > 1 || flags.is_some_and(|flags| flags & IFF_MULTI_QUEUE != 0);
        let mut files = Vec::new();
        for _ in 0..queues {
            let file = open_tun()?;
            let features = sys::features(&file).map_err(TapError::Open)?;
            if features & u32::from(IFF_VNET_HDR) == 0 {
                return Err(TapError::NoVnetHdr(name.to_owned()));
            }
            let multi = if multi { IFF_MULTI_QUEUE } else { 0 };
            let mut request = IfReq::new(name);
            request.set_flags(IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | multi);
            sys::interface(&file, InterfaceCall::SetIff, &mut request)
                .map_err(|error| attach_error(name, known, flags, multi != 0, error))?;
            files.push(file);
        }
        if !known {
            bring_up(&socket, name, mtu)?;
        }
        Self::with(name.to_owned(), files)
    }

    /// Takes descriptors on which TUNSETIFF was done, one for each queue (at least one). The numbers
    /// stay open and belong to the caller; O_NONBLOCK is set on them.
    ///
    /// # Errors
    /// See [`TapError`].
    pub fn adopt(fds: &[RawFd]) -> Result<Self, TapError> {
        let mut name = String::new();
        let mut files = Vec::new();
        for &fd in fds {
            let file = File::from(sys::duplicate(fd).map_err(|_| TapError::FdClosed(fd))?);
            let mut request = IfReq::default();
            sys::features(&file)
                .and_then(|_| sys::interface(&file, InterfaceCall::GetIff, &mut request))
                .map_err(|_| TapError::FdNotATap(fd))?;
            if request.flags() & IFF_TAP == 0 {
                return Err(TapError::FdNotATap(fd));
            }
            if request.flags() & IFF_VNET_HDR == 0 {
                return Err(TapError::NoVnetHdr(request.name()));
            }
            if files.is_empty() {
                name = request.name();
            } else if request.name() != name {
                return Err(TapError::FdMixed(fds[0], fd));
            }
            let set =
                fcntl_getfl(&file).and_then(|flags| fcntl_setfl(&file, flags | OFlags::NONBLOCK));
            TapError::call("set up", &name, set.map_err(io::Error::from))?;
            files.push(file);
        }
        Self::with(name, files)
    }

    fn with(name: String, queues: Vec<File>) -> Result<Self, TapError> {
        for queue in &queues {
            let set = sys::set_header_len(queue, NET_HDR_LEN);
            TapError::call("set the header length of", &name, set)?;
        }
        let mut device = Self {
            mtu: interface_mtu(&name).unwrap_or(1500),
            attached: queues.len(),
            queues,
            uso: false,
            name,
        };
        // Linux 6.2 and later; the same versions take such frames from the guest.
        let uso = libc::TUN_F_CSUM | libc::TUN_F_USO4 | libc::TUN_F_USO6;
        device.uso = sys::set_offload(device.fd(), uso).is_ok();
        let result = device.set_offloads(Offloads::empty());
        TapError::call("set the offloads of", &device.name, result)?;
        let result = device.attach(1);
        TapError::call("detach queues of", &device.name, result)?;
        Ok(device)
    }

    /// The interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Largest IP packet of the interface when it was opened, at most 65535 bytes.
    pub fn mtu(&self) -> u16 {
        self.mtu
    }

    /// Number of queues.
    pub fn queues(&self) -> &[File] {
        &self.queues
    }

    /// The descriptor of the first queue.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.queues[0].as_fd()
    }

    /// What may be left to the host, and the host may leave to the guest.
    pub fn offloads(&self) -> Offloads {
        let uso = Offloads::GUEST_USO4 | Offloads::GUEST_USO6 | Offloads::HOST_USO;
        if self.uso {
            Offloads::all()
        } else {
            Offloads::all() - uso
        }
    }

    /// Says what frames to the guest may ask of it: the `GUEST_*` of `offloads`.
    ///
    /// # Errors
    /// As TUNSETOFFLOAD; EBADFD when the interface is gone.
    pub fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        sys::set_offload(self.fd(), tun_offload(offloads))
    }

    /// Makes the host use the first `count` queues, 1 to all.
    ///
    /// # Errors
    /// As TUNSETQUEUE; EBADFD when the interface is gone.
    pub fn attach(&mut self, count: usize) -> io::Result<()> {
        let count = count.clamp(1, self.queues.len());
        while self.attached != count {
            let (index, flags) = if self.attached > count {
                (self.attached - 1, IFF_DETACH_QUEUE)
            } else {
                (self.attached, IFF_ATTACH_QUEUE)
            };
            let mut request = IfReq::default();
            request.set_flags(flags);
            sys::interface(&self.queues[index], InterfaceCall::SetQueue, &mut request)?;
            self.attached = if self.attached > count {
                index
            } else {
                index + 1
            };
        }
        Ok(())
    }

    /// Throws away what waits for the guest in all queues.
    pub fn drain(&self) {
        let mut head = [0; NET_HDR_LEN];
        for queue in &self.queues {
            // A packet that does not fit is taken all the same.
            let taken = |result: io::Result<usize>| {
                result.map_or_else(|error| error.raw_os_error() == Some(libc::EFAULT), |_| true)
            };
            let mut left = DRAIN;
            while left > 0 && taken(sys::read(queue, &mut head, &[], &mut [])) {
                left -= 1;
            }
        }
    }
}

/// `TUN_F_*` for the `GUEST_*` of `offloads`. The kernel knows USO for both versions of IP or none.
fn tun_offload(offloads: Offloads) -> u32 {
    let mut flags = 0;
    for (needed, flag) in [
        (Offloads::GUEST_CSUM, libc::TUN_F_CSUM),
        (Offloads::GUEST_TSO4, libc::TUN_F_TSO4),
        (Offloads::GUEST_TSO6, libc::TUN_F_TSO6),
        (
            Offloads::GUEST_USO4 | Offloads::GUEST_USO6,
            libc::TUN_F_USO4 | libc::TUN_F_USO6,
        ),
    ] {
        // Without TUN_F_CSUM the kernel refuses the others.
        if offloads.contains(needed | Offloads::GUEST_CSUM) {
            flags |= flag;
        }
    }
    flags
}

/// What `dev_valid_name` of Linux takes, less what is no fixed name (`%d`).
fn check_name(name: &str) -> Result<(), TapError> {
    let bad = |c: char| matches!(c, '/' | ':' | '%') || c.is_whitespace() || c.is_control();
    let fits = (1..libc::IFNAMSIZ).contains(&name.len());
    if !fits || name == "." || name == ".." || name.chars().any(bad) {
        return Err(TapError::Name(name.to_owned()));
    }
    Ok(())
}

fn open_tun() -> Result<File, TapError> {
    File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(DEVICE)
        .map_err(TapError::open)
}

/// `IFF_*` of TUNSETIFF that the interface was made with; `None` if it is of another kind.
fn tun_flags(name: &str) -> Option<u16> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{name}/tun_flags")).ok()?;
    u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

/// Why TUNSETIFF failed on an interface that was there before (`known`) or not.
fn attach_error(
    name: &str,
    known: bool,
    flags: Option<u16>,
    multi: bool,
    error: io::Error,
) -> TapError {
    let owned = name.to_owned();
    let is_tap = flags.is_none_or(|flags| flags & IFF_TAP != 0);
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) if known => TapError::NotOwner(owned),
        Some(libc::EPERM | libc::EACCES) => TapError::MayNotCreate(owned),
        Some(libc::EBUSY) => TapError::Busy(owned),
        Some(libc::EINVAL) if known && flags.is_some() && is_tap && multi => {
            TapError::OneQueue(owned)
        }
        Some(libc::EINVAL) if known => TapError::NotATap(owned),
        _ => TapError::Call {
            what: "attach to",
            name: owned,
            source: error,
        },
    }
}

/// Any socket does for questions about interfaces.
pub(super) fn control_socket() -> io::Result<std::os::fd::OwnedFd> {
    Ok(socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

fn bring_up(socket: &std::os::fd::OwnedFd, name: &str, mtu: Option<u16>) -> Result<(), TapError> {
    if let Some(mtu) = mtu {
        let mut request = IfReq::new(name);
        request.set_value(mtu.into());
        let set = sys::interface(socket, InterfaceCall::SetMtu, &mut request);
        TapError::call("set the MTU of", name, set)?;
    }
    let mut request = IfReq::new(name);
    let up = sys::interface(socket, InterfaceCall::GetFlags, &mut request).and_then(|()| {
        request.set_flags(request.flags() | IFF_UP);
        sys::interface(socket, InterfaceCall::SetFlags, &mut request)
    });
    TapError::call("bring up", name, up)
}

fn interface_mtu(name: &str) -> Option<u16> {
    let socket = control_socket().ok()?;
    let mut request = IfReq::new(name);
    sys::interface(&socket, InterfaceCall::GetMtu, &mut request).ok()?;
    Some(u16::try_from(request.value()).unwrap_or(u16::MAX))
}

/// True when the interface is up, as far as is known.
pub(super) fn is_up(name: &str) -> bool {
    let mut request = IfReq::new(name);
    let known = control_socket()
        .and_then(|socket| sys::interface(&socket, InterfaceCall::GetFlags, &mut request));
    known.is_err() || request.flags() & IFF_UP != 0
}

/// The interface's index; `None` when there is no such interface.
pub(super) fn interface_index(name: &str) -> Option<u32> {
    let socket = control_socket().ok()?;
    let mut request = IfReq::new(name);
    sys::interface(&socket, InterfaceCall::GetIndex, &mut request).ok()?;
    Some(request.value())
}

impl TapDevice {
    /// Reads one packet from queue `index` (of those that there are): its header to `head`, the frame to
    /// `slices` and then `tail`.
    pub(super) fn read(
        &self,
        index: usize,
        head: &mut [u8; NET_HDR_LEN],
        slices: &[net::nic::VolatileSlice<'_>],
        tail: &mut [u8],
    ) -> io::Result<usize> {
        sys::read(&self.queues[index], head, slices, tail)
    }

    /// Writes one packet to queue `index` (of those that there are).
    pub(super) fn write(
        &self,
        index: usize,
        head: &[u8; NET_HDR_LEN],
        slices: &[net::nic::VolatileSlice<'_>],
    ) -> io::Result<usize> {
        sys::write(&self.queues[index], head, slices)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn names() {
        for good in ["tap0", "a", "fifteen-letters", "t.1", "é"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "sixteen-letters-",
            "a/b",
            "a b",
            "tap%d",
            "a:1",
            ".",
            "..",
        ] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn nothing_without_checksums() {
        assert_eq!(tun_offload(Offloads::all() - Offloads::GUEST_CSUM), 0);
        let one = Offloads::GUEST_CSUM | Offloads::GUEST_USO4 | Offloads::GUEST_TSO4;
        assert_eq!(tun_offload(one), libc::TUN_F_CSUM | libc::TUN_F_TSO4);
        assert_eq!(tun_offload(Offloads::all()), 0x67);
    }

    #[test]
    fn descriptors_that_are_no_taps() {
        let file = File::open("/dev/null").unwrap();
        let error = TapDevice::adopt(&[file.as_raw_fd()]).unwrap_err();
        assert!(matches!(error, TapError::FdNotATap(_)), "{error}");
        let error = TapDevice::adopt(&[1 << 20]).unwrap_err();
        assert!(matches!(error, TapError::FdClosed(_)), "{error}");
        assert!(error.hint().is_some());
    }

    #[test]
    fn errors_tell_what_is_wrong() {
        let error = |known, flags, code| {
            let error = io::Error::from_raw_os_error(code);
            attach_error("t", known, flags, true, error).to_string()
        };
        assert_eq!(
            error(false, None, libc::EPERM),
            "there is no tap `t`, and making one is not permitted"
        );
        assert_eq!(
            error(true, Some(0x2), libc::EPERM),
            "the tap `t` belongs to another user"
        );
        assert_eq!(
            error(true, Some(0x2), libc::EBUSY),
            "the tap `t` is in use by another process"
        );
        assert_eq!(
            error(true, Some(0x2), libc::EINVAL),
            "the tap `t` was made without multi_queue"
        );
        assert_eq!(
            error(true, Some(0x1), libc::EINVAL),
            "the interface `t` is not a tap"
        );
        assert_eq!(
            error(true, None, libc::EINVAL),
            "the interface `t` is not a tap"
        );
    }
}
