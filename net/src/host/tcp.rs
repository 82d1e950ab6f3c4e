//! TCP sockets of the host.

use std::io::{self, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::time::Duration;

use mio::net::TcpStream;
use socket2::SockRef;
use vm_memory::VolatileSlice;

use super::peek::{From, discard, peek_guest, set_peek_offset};
use super::send::send_guest;
use crate::tcp::socket::TcpSocket;

/// A host socket of one flow.
#[derive(Debug)]
pub struct OsTcp {
    stream: TcpStream,
    peek: Peek,
}

/// How this socket's queue is looked into.
#[derive(Debug)]
enum Peek {
    /// By SO_PEEK_OFF; this is where the kernel stands, in bytes from the front.
    Offset(usize),
    /// From the front, with what is in flight copied to nowhere.
    Skip,
}

impl OsTcp {
    /// Wraps a connecting or connected stream.
    pub(super) fn new(stream: TcpStream) -> Self {
        // The guest has its own Nagle and keepalive timers; these options only keep the host's from
        // adding delays, and from holding on to a dead peer. A failure costs nothing but that.
        let _ = stream.set_nodelay(true);
        let _ = SockRef::from(&stream).set_keepalive(true);
        // Urgent bytes stay in the stream (RFC 6093, 5). Apart from it, they would be missing from what
        // a peek copies but not from what it counts.
        let inline = SockRef::from(&stream).set_out_of_band_inline(true);
        if let Err(error) = inline {
            tracing::debug!(%error, "urgent data will be lost");
        }
        Self {
            stream,
            peek: Peek::Skip,
        }
    }
}

impl TcpSocket for OsTcp {
    fn connect_result(&mut self) -> io::Result<()> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        match self.stream.peer_addr() {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                Err(io::ErrorKind::WouldBlock.into())
            }
            Err(error) => Err(error),
        }
    }

    fn read(&mut self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.stream.read_vectored(pieces)
    }

    fn keep_peek_offset(&mut self) -> bool {
        let kept = set_peek_offset(self.stream.as_fd(), 0).is_ok();
        if kept {
            self.peek = Peek::Offset(0);
        }
        kept
    }

    fn peek_guest(
        &mut self,
        skip: usize,
        slices: &[VolatileSlice<'_>],
        at: usize,
        len: usize,
    ) -> io::Result<usize> {
        let fd = self.stream.as_fd();
        match &mut self.peek {
            Peek::Offset(offset) => {
                if *offset != skip {
                    set_peek_offset(fd, skip)?;
                    *offset = skip;
                }
                let n = peek_guest(fd, From::Offset, slices, at, len)?;
                *offset += n;
                Ok(n)
            }
            Peek::Skip => peek_guest(fd, From::Front(skip), slices, at, len),
        }
    }

    fn discard(&mut self, n: usize) -> io::Result<usize> {
        let n = discard(self.stream.as_fd(), n)?;
        if let Peek::Offset(offset) = &mut self.peek {
            // As the kernel does.
            *offset = offset.saturating_sub(n);
        }
        Ok(n)
    }

    fn write_guest(&mut self, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
        send_guest(self.stream.as_fd(), slices)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn shutdown_write(&mut self) {
        // Fails only when the connection is gone, which the next read tells.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    fn reset(&mut self) {
        let _ = SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
    }
}
