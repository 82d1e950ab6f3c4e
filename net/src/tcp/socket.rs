//! What TCP needs of the host, as traits: the real sockets are in `host`, scripted ones in tests.

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;

use vm_memory::VolatileSlice;

use crate::flow::FlowId;

/// Opens host sockets. Readiness comes back edge-triggered under the [`FlowId`] given here.
pub trait TcpHost {
    /// A connected or connecting socket; dropping it closes the connection in order.
    type Socket: TcpSocket;
    /// A connection that was accepted and is not yet part of a flow.
    type Accepted;

    /// Starts to connect to `to` without blocking.
    ///
    /// # Errors
    /// Reports what `connect` does, other than that it is in progress.
    fn connect(&mut self, to: SocketAddr, id: FlowId) -> io::Result<Self::Socket>;

    /// Takes the next connection from listener `listener`.
    ///
    /// # Errors
    /// `WouldBlock` when there is none; anything else when the host cannot take it now.
    fn accept(&mut self, listener: usize) -> io::Result<(Self::Accepted, SocketAddr)>;

    /// Makes an accepted connection report its readiness as `id`.
    ///
    /// # Errors
    /// Fails when the connection cannot be watched.
    fn adopt(&mut self, accepted: Self::Accepted, id: FlowId) -> io::Result<Self::Socket>;
}

/// A host socket of one flow. No call blocks.
pub trait TcpSocket {
    /// The outcome of the connection attempt once the socket is writable or failed; `WouldBlock`
    /// while it is still under way.
    ///
    /// # Errors
    /// The reason why the attempt failed.
    fn connect_result(&mut self) -> io::Result<()>;

    /// Reads into `pieces`; 0 is the end of the far end's stream.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing, else what ended the connection.
    fn read(&mut self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Prepares for peeks at offsets. False when the host cannot do them at no cost.
    fn keep_peek_offset(&mut self) -> bool;

    /// Copies up to `len` bytes, from the one `skip` bytes past the next to be read on, to the room
    /// that starts `at` bytes into `slices`. They stay unread. 0 is the end of the far end's stream.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn peek_guest(
        &mut self,
        skip: usize,
        slices: &[VolatileSlice<'_>],
        at: usize,
        len: usize,
    ) -> io::Result<usize>;

    /// Reads up to `n` bytes to nowhere; returns how many.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn discard(&mut self, n: usize) -> io::Result<usize>;

    /// Writes guest memory, in order; returns how much was taken.
    ///
    /// # Errors
    /// `WouldBlock` when the socket is full, else what ended the connection.
    fn write_guest(&mut self, slices: &[VolatileSlice<'_>]) -> io::Result<usize>;

    /// Writes bytes of ours; returns how many were taken.
    ///
    /// # Errors
    /// As [`Self::write_guest`].
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Ends our stream; the other direction goes on.
    fn shutdown_write(&mut self);

    /// Makes the close that follows a reset rather than an orderly end.
    fn reset(&mut self);
}
