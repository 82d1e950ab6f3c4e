//! `sendmsg` from guest memory.
#![expect(
    unsafe_code,
    reason = "guest memory goes to the kernel as raw iovecs, and no crate wraps that"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;

/// Pieces per system call; below IOV_MAX, and small enough for the stack.
const BATCH: usize = 256;

/// Sends `slices` in order without blocking; returns how much was taken, at least one byte.
///
/// # Errors
/// What `sendmsg` reports, if nothing was sent before.
pub(crate) fn send_guest(fd: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let mut sent = 0;
    for batch in slices.chunks(BATCH) {
        let want: usize = batch.iter().map(VolatileSlice::len).sum();
        match send_batch(fd, batch) {
            Ok(n) => {
                sent += n;
                if n < want {
                    break;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && sent > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(sent)
}

fn send_batch(fd: BorrowedFd<'_>, batch: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let mut iovecs = [libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    }; BATCH];
    for (iovec, slice) in iovecs.iter_mut().zip(batch) {
        *iovec = libc::iovec {
            // The slices outlive the call, and plain mmap regions need no guard to stay mapped.
            iov_base: slice.ptr_guard().as_ptr().cast_mut().cast(),
            iov_len: slice.len(),
        };
    }
    let message = libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: iovecs.as_mut_ptr(),
        msg_iovlen: batch.len(),
        msg_control: std::ptr::null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    };
    loop {
        // SAFETY: `message` names `batch.len()` iovecs, each the extent of a `VolatileSlice` that is
        // borrowed for the whole call, so the memory is mapped. The kernel only reads it; that the
        // guest may write it meanwhile changes what is sent, not what is safe.
        let n = unsafe {
            libc::sendmsg(
                fd.as_raw_fd(),
                &raw const message,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        if let Ok(n) = usize::try_from(n) {
            return Ok(n);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn many_pieces_arrive_in_order() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let mut memory: Vec<u8> = (0..3000u32).map(|i| (i * 7 % 251) as u8).collect();
        let sent = memory.clone();
        let slices: Vec<_> = memory.chunks_mut(5).map(VolatileSlice::from).collect();
        assert_eq!(send_guest(b.as_fd(), &slices).unwrap(), 3000);
        let mut got = vec![0; 3000];
        a.read_exact(&mut got).unwrap();
        assert_eq!(got, sent);
    }
}
