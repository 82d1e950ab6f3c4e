//! `sendmsg` and `sendmmsg` from guest memory.
#![expect(
    unsafe_code,
    reason = "guest memory goes to the kernel as raw iovecs, and no crate wraps that"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;

use super::sys::{CONTROL_HEADER, EMPTY, empty_message, encode, retry};
use crate::udp::Message;

/// Messages per system call.
const MESSAGES: usize = 64;
/// Bytes of a control message with a `u16`, padded.
const CONTROL: usize = (CONTROL_HEADER + 2).next_multiple_of(size_of::<usize>());

/// Sends datagrams in order without blocking; returns how many messages were taken, at least one.
///
/// # Errors
/// What `sendmmsg` reports about the first.
pub(super) fn send_messages(fd: BorrowedFd<'_>, messages: &[Message<'_, '_>]) -> io::Result<usize> {
    let messages = &messages[..messages.len().min(MESSAGES)];
    // All are filled before a pointer into them is taken, and none grows after that.
    let mut iovecs: Vec<libc::iovec> = messages
        .iter()
        .flat_map(|message| message.payload)
        .map(|slice| libc::iovec {
            // The slices outlive the call, and plain mmap regions need no guard to stay mapped.
            iov_base: slice.ptr_guard().as_ptr().cast_mut().cast(),
            iov_len: slice.len(),
        })
        .collect();
    let mut names: Vec<_> = messages.iter().map(|message| encode(message.to)).collect();
    let mut controls: Vec<_> = messages
        .iter()
        .map(|message| segment_control(message.segment.unwrap_or(0)))
        .collect();
    let mut headers = Vec::with_capacity(messages.len());
    let mut rest = iovecs.as_mut_slice();
    for ((message, (name, name_len)), control) in messages.iter().zip(&mut names).zip(&mut controls)
    {
        let (own, others) = std::mem::take(&mut rest).split_at_mut(message.payload.len());
        rest = others;
        let mut header = empty_message();
        header.msg_name = name.as_mut_ptr().cast();
        header.msg_namelen = *name_len;
        header.msg_iov = own.as_mut_ptr();
        header.msg_iovlen = own.len();
        if message.segment.is_some() {
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = control.len();
        }
        headers.push(libc::mmsghdr {
            msg_hdr: header,
            msg_len: 0,
        });
    }
    retry(|| {
        // SAFETY: there are `headers.len()` messages; each names a live address buffer, none or a live
        // control buffer, and its own part of `iovecs`. Each iovec is the extent of a `VolatileSlice`
        // that `messages` borrows for the whole call, so the memory is mapped. The kernel only reads
        // it; that the guest may write it meanwhile changes what is sent, not what is safe.
        let n = unsafe {
            libc::sendmmsg(
                fd.as_raw_fd(),
                headers.as_mut_ptr(),
                headers.len() as u32,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        n as isize
    })
}

/// The control message that has the kernel cut a message into datagrams of `segment` bytes.
fn segment_control(segment: u16) -> [u8; CONTROL] {
    let mut control = [0; CONTROL];
    control[..8].copy_from_slice(&(CONTROL_HEADER + 2).to_ne_bytes());
    control[8..12].copy_from_slice(&libc::SOL_UDP.to_ne_bytes());
    control[12..16].copy_from_slice(&libc::UDP_SEGMENT.to_ne_bytes());
    control[16..18].copy_from_slice(&segment.to_ne_bytes());
    control
}

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
    let mut iovecs = [EMPTY; BATCH];
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
