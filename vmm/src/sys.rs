//! The few system calls that neither `std` nor a crate of ours wraps.
#![expect(unsafe_code, reason = "system calls without a safe wrapper")]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::time::Duration;

use vm_memory::VolatileSlice;
use vmm_sys_util::eventfd::EventFd;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// An anonymous file of `size` bytes that cannot be resized.
///
/// # Errors
/// Fails when the host refuses.
pub fn memfd(name: &CStr, size: u64) -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: `name` is NUL-terminated; the kernel copies it.
    let fd = check(unsafe { libc::memfd_create(name.as_ptr(), flags) })?;
    // SAFETY: `fd` was just made and nobody else has it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size)?;
    // A peer that shrinks the file would make us fault.
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    // SAFETY: takes and returns integers only.
    check(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) })?;
    Ok(file)
}

/// CPU time that this process has used.
pub fn cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes one `timespec`, which `time` is.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// The host kernel's release, as `uname -r` prints it.
pub fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

/// Signals that arrive as data instead of interrupting.
pub struct SignalFd(OwnedFd);

impl SignalFd {
    /// Blocks `signals` in this thread, and those it will start, and collects them.
    ///
    /// # Errors
    /// Fails when descriptors run out.
    pub fn new(signals: &[libc::c_int]) -> io::Result<Self> {
        // SAFETY: an all-zero `sigset_t` is a valid value; `sigemptyset` follows anyway.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is a valid, exclusive `sigset_t`.
        unsafe { libc::sigemptyset(&raw mut set) };
        for &signal in signals {
            // SAFETY: as above; a bad number is refused.
            check(unsafe { libc::sigaddset(&raw mut set, signal) })?;
        }
        // SAFETY: `set` is valid; the old mask is not asked for.
        let result =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: `set` is valid; -1 asks for a new descriptor.
        let fd = check(unsafe { libc::signalfd(-1, &raw const set, flags) })?;
        // SAFETY: `fd` was just made and nobody else has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next signal that arrived.
    pub fn next(&self) -> Option<u8> {
        let mut buf = [0; size_of::<libc::signalfd_siginfo>()];
        let len = read(self.fd(), &mut buf).ok()?;
        // `ssi_signo` is the first field, a u32.
        let number = u32::from_ne_bytes(buf.get(..4)?.try_into().ok()?);
        (len == buf.len()).then_some(u8::try_from(number).ok()?)
    }

    /// To wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd as _;
        self.0.as_fd()
    }
}

/// Reads once from `fd`.
///
/// # Errors
/// As `read(2)`.
pub fn read(fd: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes at most `buf.len()` bytes to `buf`, which is exclusive.
    let n = unsafe { libc::read(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Waits until one of `fds` is readable (or at its end), or for `milliseconds`; tells which are. `None`
/// is never readable; a negative number waits for ever.
///
/// # Errors
/// As `poll(2)`; an interrupted wait is repeated.
pub fn wait_readable<const N: usize>(
    fds: [Option<BorrowedFd<'_>>; N],
    milliseconds: libc::c_int,
) -> io::Result<[bool; N]> {
    let mut polls = fds.map(|fd| libc::pollfd {
        // A negative descriptor is skipped by the kernel.
        fd: fd.map_or(-1, |fd| fd.as_raw_fd()),
        events: libc::POLLIN,
        revents: 0,
    });
    loop {
        // SAFETY: `polls` is an exclusive array of N entries.
        match check(unsafe { libc::poll(polls.as_mut_ptr(), N as libc::nfds_t, milliseconds) }) {
            Ok(_) => return Ok(polls.map(|poll| poll.revents != 0)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Lets the process open as many descriptors as it may: each flow of the guest takes one.
pub fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the pointer is to a local that lives through the call, which only writes to it.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    if known && limit.rlim_cur < limit.rlim_max {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: the pointer is to a local that lives through the call, which only reads it. When
        // it fails, the old limit stays and the network stack bounds itself by that.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }
}

/// Opens an unprivileged ICMP ("ping") socket.
///
/// # Errors
/// EACCES where `net.ipv4.ping_group_range` excludes us.
pub fn ping_socket(v6: bool) -> io::Result<OwnedFd> {
    let (family, protocol) = if v6 {
        (libc::AF_INET6, libc::IPPROTO_ICMPV6)
    } else {
        (libc::AF_INET, libc::IPPROTO_ICMP)
    };
    // SAFETY: takes and returns integers only.
    let fd =
        check(unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, protocol) })?;
    // SAFETY: `fd` was just made and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A borrow of the descriptor in `event`, which only has `AsRawFd`.
pub fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: `event` owns the descriptor, and the result borrows `event`.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// Asks for huge pages behind `slice`. Where the host has none to give, small ones do.
pub fn prefer_huge_pages(slice: &VolatileSlice<'_>) {
    let guard = slice.ptr_guard_mut();
    let start = guard.as_ptr();
    // SAFETY: the range is a live mapping that `slice` borrows; the advice does not change contents.
    unsafe { libc::madvise(start.cast(), slice.len(), libc::MADV_HUGEPAGE) };
}

/// Makes the pages behind `slice` present at once, which is cheaper than one fault for each.
/// Fails silently: they will come one by one, then.
pub fn populate(slice: &VolatileSlice<'_>) {
    let guard = slice.ptr_guard_mut();
    let start = guard.as_ptr();
    // SAFETY: the range is a live shared mapping that `slice` borrows; its contents do not change.
    unsafe { libc::madvise(start.cast(), slice.len(), libc::MADV_POPULATE_WRITE) };
}
