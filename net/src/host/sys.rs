//! System calls on datagram sockets that no crate wraps: receives in batches and into guest memory,
//! options, and the error queue.
//!
//! Addresses and control messages cross as bytes and are read without pointers.
#![expect(
    unsafe_code,
    reason = "the kernel fills guest memory through raw iovecs, and recvmmsg has no safe wrapper"
)]

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::null_mut;

use crate::udp::{Batch, DATAGRAMS, Entry, Payload, ROOM};

/// Bytes of the longest address: `struct sockaddr_in6`.
pub(super) const NAME: usize = 28;
/// Bytes of room for the control messages of a received run. There is one at most, with a number.
const CONTROL: usize = 64;
/// Bytes before the data of a control message.
pub(super) const CONTROL_HEADER: usize = size_of::<libc::cmsghdr>();

/// Descriptors that the process may have open.
pub(crate) fn descriptor_limit() -> usize {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the pointer is to a local that lives through the call, which only writes to it.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    // What POSIX promises where the kernel does not tell.
    const MINIMUM: usize = 20;
    match result {
        0 => usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX),
        _ => MINIMUM,
    }
}

/// Receives as many runs as are there and fit into `batch`.
pub(super) fn receive_batch(fd: BorrowedFd<'_>, batch: &mut Batch) -> io::Result<()> {
    batch.clear();
    let mut names = [[0_u8; NAME]; DATAGRAMS];
    let mut controls = [[0_u8; CONTROL]; DATAGRAMS];
    let mut iovecs = [EMPTY; DATAGRAMS];
    let mut messages = [libc::mmsghdr {
        msg_hdr: empty_message(),
        msg_len: 0,
    }; DATAGRAMS];
    for (((room, iovec), (name, message)), control) in batch
        .room
        .chunks_exact_mut(ROOM)
        .zip(&mut iovecs)
        .zip(names.iter_mut().zip(&mut messages))
        .zip(&mut controls)
    {
        iovec.iov_base = room.as_mut_ptr().cast();
        iovec.iov_len = room.len();
        message.msg_hdr.msg_name = name.as_mut_ptr().cast();
        message.msg_hdr.msg_namelen = NAME as u32;
        message.msg_hdr.msg_iov = iovec;
        message.msg_hdr.msg_iovlen = 1;
        message.msg_hdr.msg_control = control.as_mut_ptr().cast();
        message.msg_hdr.msg_controllen = control.len();
    }
    let n = retry(|| {
        // SAFETY: the `DATAGRAMS` messages each name one live iovec, over a chunk of `batch.room`
        // that no other message names, one address buffer of `NAME` bytes and one of `CONTROL` bytes;
        // all outlive the call and are not borrowed elsewhere while it runs.
        let n = unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                messages.as_mut_ptr(),
                DATAGRAMS as u32,
                libc::MSG_DONTWAIT,
                null_mut(),
            )
        };
        n as isize
    })?;
    for (index, message) in messages.iter().enumerate().take(n) {
        let len = (message.msg_len as usize).min(ROOM);
        let control = &controls[index][..message.msg_hdr.msg_controllen.min(CONTROL)];
        batch.entries[index] = entry(&names[index], control, len);
        batch.len = index + 1;
    }
    Ok(())
}

/// Receives one run into guest memory; what does not fit is lost.
pub(super) fn receive_into(fd: BorrowedFd<'_>, room: &Payload<'_, '_>) -> io::Result<Entry> {
    let mut iovecs = Vec::new();
    room.for_each_slice(|slice| {
        iovecs.push(libc::iovec {
            // Plain mmap regions need no guard to stay mapped; the payload's borrow keeps them.
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        });
    });
    let mut name = [0_u8; NAME];
    let mut control = [0_u8; CONTROL];
    let mut message = empty_message();
    message.msg_name = name.as_mut_ptr().cast();
    message.msg_namelen = NAME as u32;
    message.msg_iov = iovecs.as_mut_ptr();
    message.msg_iovlen = iovecs.len();
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = control.len();
    let len = retry(|| {
        // SAFETY: `message` names live buffers for the address and the control messages with their
        // lengths, and `iovecs`, each the extent of a `VolatileSlice` that `room` borrows for the whole
        // call, so the memory is mapped. It is guest memory, which nothing here takes to be stable.
        unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) }
    })?;
    let control = &control[..message.msg_controllen.min(CONTROL)];
    Ok(entry(&name, control, len.min(room.len)))
}

fn entry(name: &[u8], control: &[u8], len: usize) -> Entry {
    // An address of another family does not come out of a UDP socket.
    let nobody = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    Entry {
        from: decode(name).unwrap_or(nobody),
        len,
        segment: parse_segment(control).unwrap_or(0),
    }
}

/// An entry of the error queue (`struct sock_extended_err`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueuedError {
    /// Whom the datagram was for.
    pub(super) to: SocketAddr,
    /// The errno.
    pub(super) errno: i32,
    /// `SO_EE_ORIGIN_*`.
    pub(super) origin: u8,
    /// Type of the ICMP message.
    pub(super) kind: u8,
    /// Code of the ICMP message.
    pub(super) code: u8,
    /// MTU, for "fragmentation needed".
    pub(super) info: u32,
    /// Who sent the ICMP message.
    pub(super) offender: Option<SocketAddr>,
    /// Bytes of the datagram's payload that came with the error.
    pub(super) len: usize,
}

/// Takes the next entry off the error queue.
pub(super) fn receive_error(fd: BorrowedFd<'_>) -> io::Result<Option<QueuedError>> {
    let mut payload = [0_u8; 2048];
    let mut iovec = libc::iovec {
        iov_base: payload.as_mut_ptr().cast(),
        iov_len: payload.len(),
    };
    let mut name = [0_u8; NAME];
    let mut control = [0_u8; 512];
    let mut message = empty_message();
    message.msg_name = name.as_mut_ptr().cast();
    message.msg_namelen = NAME as u32;
    message.msg_iov = &raw mut iovec;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = control.len();
    let len = retry(|| {
        // SAFETY: `message` names one live iovec over `payload`, and live buffers for the address
        // and the control messages with their lengths; nothing else borrows them during the call.
        unsafe {
            libc::recvmsg(
                fd.as_raw_fd(),
                &raw mut message,
                libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT,
            )
        }
    })?;
    let control = &control[..message.msg_controllen.min(control.len())];
    Ok(decode(&name).and_then(|to| parse_error(control, to, len)))
}

/// Asks for the error queue.
pub(super) fn enable_error_queue(fd: BorrowedFd<'_>, v6: bool) -> io::Result<()> {
    if v6 {
        set_option(fd, libc::SOL_IPV6, libc::IPV6_RECVERR, 1)
    } else {
        set_option(fd, libc::SOL_IP, libc::IP_RECVERR, 1)
    }
}

/// Asks for datagrams of one sender and length to come as one.
pub(super) fn join_received(fd: BorrowedFd<'_>) -> io::Result<()> {
    set_option(fd, libc::SOL_UDP, libc::UDP_GRO, 1)
}

/// True when a message may hold several datagrams.
pub(super) fn takes_runs(fd: BorrowedFd<'_>) -> bool {
    // No datagrams together unless a message says so: that is the default.
    set_option(fd, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok()
}

fn set_option(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    retry(|| {
        // SAFETY: the value is a live `c_int` and its length is given.
        let result = unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                level,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as u32,
            )
        };
        result as isize
    })
    .map(drop)
}

/// Finds the first control message that is one of `wanted`, as level and type.
fn find_control<'a>(
    mut control: &'a [u8],
    wanted: &[(libc::c_int, libc::c_int)],
) -> Option<&'a [u8]> {
    while let Some(header) = control.get(..CONTROL_HEADER) {
        let len = usize::from_ne_bytes(header[..8].try_into().ok()?);
        let level = i32::from_ne_bytes(header[8..12].try_into().ok()?);
        let kind = i32::from_ne_bytes(header[12..16].try_into().ok()?);
        let data = control.get(CONTROL_HEADER..len)?;
        if wanted.contains(&(level, kind)) {
            return Some(data);
        }
        control = control.get(len.next_multiple_of(size_of::<usize>())..)?;
    }
    None
}

/// Finds the length of the datagrams in a run among control messages.
fn parse_segment(control: &[u8]) -> Option<usize> {
    let data = find_control(control, &[(libc::SOL_UDP, libc::UDP_GRO)])?;
    let segment = libc::c_int::from_ne_bytes(data.get(..4)?.try_into().ok()?);
    usize::try_from(segment).ok()
}

/// Finds the extended error among control messages.
fn parse_error(control: &[u8], to: SocketAddr, len: usize) -> Option<QueuedError> {
    const WANTED: [(libc::c_int, libc::c_int); 2] = [
        (libc::SOL_IP, libc::IP_RECVERR),
        (libc::SOL_IPV6, libc::IPV6_RECVERR),
    ];
    let data = find_control(control, &WANTED)?;
    let error = data.get(..16)?;
    let word = |at: usize| {
        let bytes = [error[at], error[at + 1], error[at + 2], error[at + 3]];
        u32::from_ne_bytes(bytes)
    };
    Some(QueuedError {
        to,
        errno: word(0).cast_signed(),
        origin: error[4],
        kind: error[5],
        code: error[6],
        info: word(8),
        offender: decode(&data[16..]),
        len,
    })
}

/// Encodes an address as `struct sockaddr_in` or `sockaddr_in6`.
pub(super) fn encode(address: SocketAddr) -> ([u8; NAME], u32) {
    let mut name = [0; NAME];
    name[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(address) => {
            name[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
            name[4..8].copy_from_slice(&address.ip().octets());
            (name, 16)
        }
        SocketAddr::V6(address) => {
            name[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
            name[4..8].copy_from_slice(&address.flowinfo().to_ne_bytes());
            name[8..24].copy_from_slice(&address.ip().octets());
            name[24..].copy_from_slice(&address.scope_id().to_ne_bytes());
            (name, NAME as u32)
        }
    }
}

/// Undoes [`encode`].
fn decode(name: &[u8]) -> Option<SocketAddr> {
    let family = i32::from(u16::from_ne_bytes(name.get(..2)?.try_into().ok()?));
    let port = u16::from_be_bytes(name.get(2..4)?.try_into().ok()?);
    match family {
        libc::AF_INET => {
            let octets: [u8; 4] = name.get(4..8)?.try_into().ok()?;
            Some((Ipv4Addr::from(octets), port).into())
        }
        libc::AF_INET6 => {
            let octets: [u8; 16] = name.get(8..24)?.try_into().ok()?;
            let flow = u32::from_ne_bytes(name.get(4..8)?.try_into().ok()?);
            let scope = u32::from_ne_bytes(name.get(24..28)?.try_into().ok()?);
            Some(SocketAddrV6::new(Ipv6Addr::from(octets), port, flow, scope).into())
        }
        _ => None,
    }
}

pub(super) fn empty_message() -> libc::msghdr {
    libc::msghdr {
        msg_name: null_mut(),
        msg_namelen: 0,
        msg_iov: null_mut(),
        msg_iovlen: 0,
        msg_control: null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    }
}

/// Calls until the call is not interrupted by a signal.
pub(super) fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(n) = usize::try_from(call()) {
            return Ok(n);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

pub(super) const EMPTY: libc::iovec = libc::iovec {
    iov_base: null_mut(),
    iov_len: 0,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_crossing() {
        for address in ["192.0.2.1:53", "[fe80::1%7]:53", "[::1]:65535"] {
            let address: SocketAddr = address.parse().unwrap();
            assert_eq!(decode(&encode(address).0), Some(address));
        }
        assert_eq!(decode(&[0; NAME]), None);
        assert_eq!(decode(&[2, 0, 0]), None);
    }

    #[test]
    fn control_messages_cut_anywhere_are_no_error() {
        let mut control = Vec::new();
        control.extend(48_usize.to_ne_bytes());
        control.extend(libc::SOL_IP.to_ne_bytes());
        control.extend(libc::IP_RECVERR.to_ne_bytes());
        control.extend(libc::ECONNREFUSED.to_ne_bytes());
        control.extend([2, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        control.extend(&encode("192.0.2.9:0".parse().unwrap()).0[..16]);
        let to = "192.0.2.1:9".parse().unwrap();
        for cut in 0..control.len() {
            assert_eq!(parse_error(&control[..cut], to, 5), None);
        }
        let error = parse_error(&control, to, 5).unwrap();
        assert_eq!((error.origin, error.kind, error.code), (2, 3, 3));
        assert_eq!(error.offender, Some("192.0.2.9:0".parse().unwrap()));
    }

    #[test]
    fn the_length_in_a_run_is_found_behind_others() {
        let mut control = Vec::new();
        for (kind, value) in [(1_i32, 7_i32), (libc::UDP_GRO, 1472)] {
            control.extend(20_usize.to_ne_bytes());
            control.extend(libc::SOL_UDP.to_ne_bytes());
            control.extend(kind.to_ne_bytes());
            control.extend(value.to_ne_bytes());
            control.extend([0; 4]);
        }
        assert_eq!(parse_segment(&control), Some(1472));
        assert_eq!(parse_segment(&control[..24]), None);
        assert_eq!(parse_segment(&control[..43]), None);
        // A length of nothing leads nowhere, and ends.
        assert_eq!(parse_segment(&[0; 64]), None);
    }
}
