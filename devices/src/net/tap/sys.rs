//! System calls on tap descriptors.
#![expect(
    unsafe_code,
    reason = "tap ioctls, and guest memory as raw iovecs, have no safe wrapper"
)]

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd as _, OwnedFd, RawFd};

use vm_memory::VolatileSlice;
use vmm_sys_util::eventfd::EventFd;

/// IOV_MAX: pieces that one call takes.
const MAX_PIECES: usize = 1024;

/// `struct ifreq`: a name, and what the call is about.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IfReq {
    pub(super) name: [u8; libc::IFNAMSIZ],
    data: [u64; 3],
}

impl IfReq {
    /// A request about the interface `name`, of which at most 15 bytes are used.
    pub(super) fn new(name: &str) -> Self {
        let mut request = Self::default();
        let room = &mut request.name[..libc::IFNAMSIZ - 1];
        let len = name.len().min(room.len());
        room[..len].copy_from_slice(&name.as_bytes()[..len]);
        request
    }

    /// The name in it.
    pub(super) fn name(&self) -> String {
        let name = self.name.split(|byte| *byte == 0).next();
        String::from_utf8_lossy(name.unwrap_or_default()).into_owned()
    }

    /// `ifr_flags`.
    pub(super) fn flags(&self) -> u16 {
        (self.value() & 0xffff) as u16
    }

    pub(super) fn set_flags(&mut self, flags: u16) {
        self.set_value(flags.into());
    }

    /// `ifr_mtu`, `ifr_ifindex`: the first int of the union.
    pub(super) fn value(&self) -> u32 {
        let [a, b, c, d, ..] = self.data[0].to_ne_bytes();
        u32::from_ne_bytes([a, b, c, d])
    }

    pub(super) fn set_value(&mut self, value: u32) {
        let [a, b, c, d] = value.to_ne_bytes();
        self.data[0] = u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0]);
    }
}

const _: () = assert!(size_of::<IfReq>() == size_of::<libc::ifreq>());

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A call that reads and writes a `struct ifreq`.
///
/// # Errors
/// As the call.
pub(super) fn interface(fd: impl AsFd, call: InterfaceCall, request: &mut IfReq) -> io::Result<()> {
    let at: *mut IfReq = request;
    // SAFETY: each of these calls touches one `struct ifreq`, whose size and layout `IfReq` has, and
    // which is exclusively ours here.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), call as libc::Ioctl, at) })
}

/// Calls for [`interface`].
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub(super) enum InterfaceCall {
    /// Make or attach to an interface.
    SetIff = libc::TUNSETIFF,
    /// Which interface a descriptor is attached to.
    GetIff = libc::TUNGETIFF,
    /// Attach or detach a queue.
    SetQueue = libc::TUNSETQUEUE,
    GetFlags = libc::SIOCGIFFLAGS,
    SetFlags = libc::SIOCSIFFLAGS,
    GetMtu = libc::SIOCGIFMTU,
    SetMtu = libc::SIOCSIFMTU,
    GetIndex = libc::SIOCGIFINDEX,
}

/// TUNGETFEATURES: `IFF_*` that the driver knows.
///
/// # Errors
/// ENOTTY or EINVAL when `fd` is not of the driver.
pub(super) fn features(fd: impl AsFd) -> io::Result<u32> {
    let mut features: libc::c_uint = 0;
    let at = &raw mut features;
    // SAFETY: the call writes one unsigned int, which `features` is.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TUNGETFEATURES, at) })?;
    Ok(features)
}

/// TUNSETVNETHDRSZ: bytes of header ahead of each frame.
///
/// # Errors
/// As the call.
pub(super) fn set_header_len(fd: impl AsFd, len: usize) -> io::Result<()> {
    let len = libc::c_int::try_from(len).unwrap_or(libc::c_int::MAX);
    let at = &raw const len;
    // SAFETY: the call reads one int, which `len` is.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TUNSETVNETHDRSZ, at) })
}

/// TUNSETOFFLOAD: `TUN_F_*` that frames read from the tap may ask for.
///
/// # Errors
/// EINVAL when the kernel does not know one of them.
pub(super) fn set_offload(fd: impl AsFd, offload: u32) -> io::Result<()> {
    let offload = libc::c_ulong::from(offload);
    // SAFETY: the call takes an integer.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TUNSETOFFLOAD, offload) })
}

/// A duplicate of the descriptor with number `fd`, closed on exec.
///
/// # Errors
/// EBADF when there is no such descriptor.
pub(super) fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes and returns integers only; whatever `fd` is, it stays as it is.
    let new = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    check(new)?;
    // SAFETY: `new` was just made and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

/// A duplicate of an event descriptor, for calls that want the type.
///
/// # Errors
/// Fails when descriptors run out.
pub(in crate::net) fn event(fd: RawFd) -> io::Result<EventFd> {
    use std::os::fd::IntoRawFd as _;
    let fd = duplicate(fd)?.into_raw_fd();
    // SAFETY: the descriptor is open, and its ownership moves.
    Ok(unsafe { EventFd::from_raw_fd(fd) })
}

thread_local! {
    /// Meaningless between calls; here for its allocation.
    static PIECES: RefCell<Vec<libc::iovec>> = const { RefCell::new(Vec::new()) };
}

/// Calls `call` with iovecs of `head`, `slices` and `tail`, [`MAX_PIECES`] of them at most.
fn with_pieces(
    head: (*mut u8, usize),
    slices: &[VolatileSlice<'_>],
    tail: (*mut u8, usize),
    call: impl FnOnce(*const libc::iovec, libc::c_int) -> isize,
) -> io::Result<usize> {
    if slices.len() + 2 > MAX_PIECES {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    PIECES.with_borrow_mut(|pieces| {
        let own = |(at, len): (*mut u8, usize)| libc::iovec {
            iov_base: at.cast(),
            iov_len: len,
        };
        pieces.clear();
        pieces.push(own(head));
        pieces.extend(slices.iter().map(|slice| libc::iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        }));
        pieces.push(own(tail));
        let count = libc::c_int::try_from(pieces.len()).unwrap_or(libc::c_int::MAX);
        usize::try_from(call(pieces.as_ptr(), count)).map_err(|_| io::Error::last_os_error())
    })
}

/// Reads one packet: its first bytes to `head`, the next to `slices`, the others to `tail`. Returns its
/// length; what does not fit makes the call fail, and the packet is lost.
///
/// # Errors
/// As `readv`.
pub(super) fn read(
    fd: impl AsFd,
    head: &mut [u8],
    slices: &[VolatileSlice<'_>],
    tail: &mut [u8],
) -> io::Result<usize> {
    let fd = fd.as_fd().as_raw_fd();
    let head = (head.as_mut_ptr(), head.len());
    let tail = (tail.as_mut_ptr(), tail.len());
    with_pieces(head, slices, tail, |at, count| {
        // SAFETY: the kernel writes within `head` and `tail`, which are exclusive, and within mappings
        // that `slices` borrows and Rust only accesses as volatile memory.
        unsafe { libc::readv(fd, at, count) }
    })
}

/// Writes one packet that starts with `head`; returns its length.
///
/// # Errors
/// As `writev`.
pub(super) fn write(fd: impl AsFd, head: &[u8], slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let fd = fd.as_fd().as_raw_fd();
    let head = (head.as_ptr().cast_mut(), head.len());
    let tail = (std::ptr::null_mut(), 0);
    with_pieces(head, slices, tail, |at, count| {
        // SAFETY: the kernel only reads: `head`, and mappings that `slices` borrows.
        unsafe { libc::writev(fd, at, count) }
    })
}
