//! Reading a TCP socket's queue without taking from it, and dropping from it without reading.
//!
//! With SO_PEEK_OFF the kernel remembers where the last peek ended, lowers that by what is taken from
//! the queue, and goes on from there. Without it each peek starts at the front, so what is in flight
//! already is copied to a sink first.
#![expect(
    unsafe_code,
    reason = "guest memory goes to the kernel as raw iovecs, and no crate wraps that"
)]

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vm_memory::VolatileSlice;

/// Pieces per system call; below IOV_MAX.
const BATCH: usize = 512;
/// Bytes of the sink. Its contents mean nothing; it is used several times in one call.
const SINK: usize = 1 << 20;

/// What peeks of a thread share.
#[derive(Default)]
struct Scratch {
    /// Where bytes go that nobody wants again. Made when it is first needed.
    sink: Box<[u8]>,
    /// Meaningless between calls; here for its allocation.
    iovecs: Vec<libc::iovec>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Makes the next peek start `offset` bytes into the queue, and later ones where the one before
/// ended.
///
/// # Errors
/// EOPNOTSUPP where the kernel does not know that for this kind of socket.
pub fn set_peek_offset(fd: BorrowedFd<'_>, offset: usize) -> io::Result<()> {
    let value = libc::c_int::try_from(offset).unwrap_or(libc::c_int::MAX);
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    let at: *const libc::c_int = &raw const value;
    // SAFETY: the kernel reads `len` bytes at `at`, which points to an int that lives through it.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            at.cast(),
            len,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Where a peek starts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum From {
    /// Where the last one ended: SO_PEEK_OFF is set.
    Offset,
    /// After this many bytes of the queue, which go nowhere.
    Front(usize),
}

/// Peeks up to `len` bytes into the room that starts `at` bytes into `slices`. Returns how many bytes
/// came; if they are fewer, there are no more.
///
/// # Errors
/// What `recvmsg` reports; `WouldBlock` also when there is nothing behind the skipped bytes.
pub(crate) fn peek_guest(
    fd: BorrowedFd<'_>,
    from: From,
    slices: &[VolatileSlice<'_>],
    at: usize,
    len: usize,
) -> io::Result<usize> {
    let mut done = 0;
    loop {
        let skip = match from {
            From::Offset => 0,
            From::Front(skip) => skip + done,
        };
        // Short of `len` means that the queue is drained, so no other bound may cause it.
        match peek_some(fd, skip, slices, at + done, len - done) {
            Ok((n, room)) => {
                done += n;
                if n < room || done == len || n == 0 {
                    return Ok(done);
                }
            }
            Err(_) if done > 0 => return Ok(done),
            Err(error) => return Err(error),
        }
    }
}

/// As [`peek_guest`], in one system call; returns also how many bytes it had room for.
fn peek_some(
    fd: BorrowedFd<'_>,
    skip: usize,
    slices: &[VolatileSlice<'_>],
    at: usize,
    len: usize,
) -> io::Result<(usize, usize)> {
    SCRATCH.with_borrow_mut(|scratch| {
        if skip > 0 && scratch.sink.is_empty() {
            scratch.sink = vec![0; SINK].into();
        }
        peek(fd, skip, scratch, slices, at, len)
    })
}

fn peek(
    fd: BorrowedFd<'_>,
    mut skip: usize,
    Scratch { sink, iovecs }: &mut Scratch,
    slices: &[VolatileSlice<'_>],
    mut at: usize,
    mut len: usize,
) -> io::Result<(usize, usize)> {
    let asked = len;
    let skipped = skip;
    iovecs.clear();
    while skip > 0 && iovecs.len() < BATCH - 1 {
        let n = skip.min(sink.len());
        iovecs.push(libc::iovec {
            iov_base: sink.as_mut_ptr().cast(),
            iov_len: n,
        });
        skip -= n;
    }
    for slice in slices {
        if len == 0 || iovecs.len() == BATCH || skip > 0 {
            break;
        }
        if at >= slice.len() {
            at -= slice.len();
            continue;
        }
        let n = len.min(slice.len() - at);
        // `at + n` is within the slice, so neither fails.
        if let Ok(room) = slice.subslice(at, n) {
            iovecs.push(libc::iovec {
                // The slices outlive the call, and plain mmap regions need no guard to stay mapped.
                iov_base: room.ptr_guard_mut().as_ptr().cast(),
                iov_len: n,
            });
        }
        len -= n;
        at = 0;
    }
    let mut message = libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: iovecs.as_mut_ptr(),
        msg_iovlen: iovecs.len(),
        msg_control: std::ptr::null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    };
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: `message` names all of `iovecs`, made above. Each is the extent of a `VolatileSlice` that is borrowed
    // for the whole call, or part of `sink`, which is exclusive; so the memory is mapped and writable.
    let n = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, flags) };
    let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
    match n.checked_sub(skipped) {
        // The end of the stream gives 0 only where there is nothing to skip either.
        Some(0) if skipped > 0 => Err(io::ErrorKind::WouldBlock.into()),
        None => Err(io::ErrorKind::WouldBlock.into()),
        Some(n) => Ok((n, asked - len)),
    }
}

/// Takes up to `n` bytes from the queue without copying them; returns how many.
///
/// # Errors
/// What `recv` reports.
pub(crate) fn discard(fd: BorrowedFd<'_>, n: usize) -> io::Result<usize> {
    let flags = libc::MSG_TRUNC | libc::MSG_DONTWAIT;
    // SAFETY: with MSG_TRUNC, TCP takes bytes from its queue and writes none of them; the kernel
    // checks the (empty) range it was given.
    let n = unsafe { libc::recv(fd.as_raw_fd(), std::ptr::null_mut(), n, flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    fn wait_for(stream: &TcpStream, n: usize) {
        let mut all = vec![0; n + 1];
        while stream.peek(&mut all).unwrap() < n {}
    }

    fn peeked(stream: &TcpStream, from: From, len: usize) -> io::Result<Vec<u8>> {
        let mut memory = vec![0; len + 8];
        let (a, b) = memory.split_at_mut(5);
        let slices = [VolatileSlice::from(a), VolatileSlice::from(b)];
        let n = peek_guest(stream.as_fd(), from, &slices, 3, len)?;
        Ok(memory[3..3 + n].to_vec())
    }

    #[test]
    fn what_is_skipped_goes_nowhere_and_stays() {
        let (near, mut far) = pair();
        far.write_all(b"one two three").unwrap();
        wait_for(&near, 13);
        assert_eq!(peeked(&near, From::Front(4), 3).unwrap(), b"two");
        assert_eq!(peeked(&near, From::Front(8), 64).unwrap(), b"three");
        let error = peeked(&near, From::Front(13), 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(discard(near.as_fd(), 4).unwrap(), 4);
        assert_eq!(peeked(&near, From::Front(0), 3).unwrap(), b"two");
    }

    /// A short peek means that the queue is empty, however many pieces the room is made of.
    #[test]
    fn many_small_pieces_are_filled() {
        const PIECES: usize = 3 * BATCH;
        let (near, mut far) = pair();
        let sent: Vec<u8> = (0..7 * PIECES).map(|i| (i % 251) as u8).collect();
        far.write_all(&sent).unwrap();
        wait_for(&near, sent.len());
        let mut memory = vec![0; sent.len()];
        let pieces: Vec<_> = memory.chunks_mut(7).map(VolatileSlice::from).collect();
        for (skip, len) in [
            (0, sent.len()),
            (0, 7 * BATCH),
            (1000, 7 * BATCH + 1),
            (3, 9999),
        ] {
            let n = peek_guest(near.as_fd(), From::Front(skip), &pieces, 0, len).unwrap();
            assert_eq!(n, len.min(sent.len() - skip));
            for (at, piece) in pieces.iter().enumerate() {
                let mut bytes = [0; 7];
                piece.copy_to(&mut bytes);
                let (start, end) = (7 * at, (7 * at + 7).min(n));
                if start < end {
                    assert_eq!(bytes[..end - start], sent[skip + start..skip + end]);
                }
            }
        }
    }

    /// One byte of urgent data must not shift what is behind it.
    #[test]
    fn urgent_data_in_line_keeps_its_place() {
        let (near, far) = pair();
        let far = socket2::Socket::from(far);
        socket2::SockRef::from(&near)
            .set_out_of_band_inline(true)
            .unwrap();
        let by_offset = set_peek_offset(near.as_fd(), 0).is_ok();
        far.send(b"ab").unwrap();
        far.send_out_of_band(b"U").unwrap();
        far.send(b"cdef").unwrap();
        let mut seen = Vec::new();
        while seen.len() < 7 {
            let from = if by_offset {
                From::Offset
            } else {
                From::Front(seen.len())
            };
            // Short at the mark: what is behind it takes another peek.
            seen.extend(peeked(&near, from, 2).unwrap_or_default());
        }
        assert_eq!(seen, b"abUcdef");
        let mut left = 7;
        while left > 0 {
            left -= discard(near.as_fd(), left).unwrap();
        }
    }

    #[test]
    fn the_kernel_keeps_the_offset() {
        let (near, mut far) = pair();
        if let Err(error) = set_peek_offset(near.as_fd(), 0) {
            assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
            eprintln!("SKIPPED: this kernel has no SO_PEEK_OFF for TCP (Linux 6.9 has)");
            return;
        }
        far.write_all(b"one two three").unwrap();
        while peeked(&near, From::Offset, 4).is_err() {}
        set_peek_offset(near.as_fd(), 4).unwrap();
        assert_eq!(peeked(&near, From::Offset, 4).unwrap(), b"two ");
        assert_eq!(discard(near.as_fd(), 4).unwrap(), 4);
        assert_eq!(peeked(&near, From::Offset, 9).unwrap(), b"three");
        drop(far);
        while peeked(&near, From::Offset, 9).is_err() {}
        assert_eq!(peeked(&near, From::Offset, 9).unwrap(), b"");
        assert_eq!(discard(near.as_fd(), 9).unwrap(), 9);
    }
}
