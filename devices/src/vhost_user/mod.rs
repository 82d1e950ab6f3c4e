//! A device of ours behind somebody else's virtual machine: the back-end side of vhost-user.
//!
//! This is one more transport. Where [`MmioTransport`](crate::virtio::mmio::MmioTransport) shows
//! registers to a driver, `Transport` answers a front-end (QEMU, Cloud Hypervisor, crosvm, User
//! Mode Linux) that speaks for one, and drives the same
//! [`VirtioDevice`].
//!
//! ```text
//!   front-end --socket--> BackendReqHandler --> Transport --activate / suspend--> VirtioDevice
//!   guest --kick eventfd--> worker ... used ring --> Calls --call eventfd--> guest
//! ```
//!
//! A ring runs when it has an address, a doorbell and is enabled; the device runs while its
//! [required rings](VhostUser::new) do. Whatever changes that set, or what a running ring depends
//! on, suspends the device and starts it again from the same positions; only the call descriptor and
//! the memory table are swapped while it runs. When the front-end goes away the device is suspended
//! with everything behind it (flows, sockets) alive, and waits for the next one.
//!
//! What a front-end says is checked; what cannot be honoured ends its connection with an error that
//! names it. One thing is beyond checking: a front-end that shrinks the file behind guest memory
//! after it was mapped brings SIGBUS on both ends. It owns the guest, and this process serves
//! nobody else.

mod calls;
mod early;
mod memory;
mod ring;
#[cfg(test)]
mod tests;
mod transport;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use vhost::vhost_user::{
    BackendReqHandler, Error as ProtocolError, VhostUserBackendReqHandlerMut as _,
};

use self::transport::Transport;
use crate::virtio::VirtioDevice;

/// A device that serves one front-end after the other.
pub struct VhostUser {
    transport: Arc<Mutex<Transport>>,
}

/// How a front-end left.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The connection could not be set up.
    #[error("cannot talk to the front-end")]
    Connection(#[source] io::Error),
    /// It asked for something that cannot be honoured.
    #[error("the front-end broke the vhost-user protocol: {0}")]
    Protocol(ProtocolError),
}

impl VhostUser {
    /// A back-end for `device`, which runs when its first `required` rings do.
    pub fn new(device: Box<dyn VirtioDevice>, required: usize) -> Self {
        Self {
            transport: Arc::new(Mutex::new(Transport::new(device, required))),
        }
    }

    /// Serves the front-end at the other end of `stream` until it leaves. To end it from another
    /// thread, shut `stream` down.
    ///
    /// On return the device does not run, and no memory of the guest is mapped.
    ///
    /// # Errors
    /// Fails when the front-end broke the protocol. The next one may do better.
    pub fn serve(&mut self, stream: UnixStream) -> Result<(), SessionError> {
        let raw = stream.try_clone().map_err(SessionError::Connection)?;
        let mut handler = BackendReqHandler::from_stream(stream, self.transport.clone());
        let error = loop {
            let result = match self.early_request(&raw) {
                Ok(true) => Ok(()),
                Ok(false) => handler.handle_request(),
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                break error;
            }
        };
        self.transport
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .disconnect();
        match error {
            ProtocolError::Disconnected
            | ProtocolError::PartialMessage
            | ProtocolError::SocketBroken(_) => Ok(()),
            ProtocolError::SocketError(error) | ProtocolError::InvalidSocketFd(error) => {
                Err(SessionError::Connection(error))
            }
            error => Err(SessionError::Protocol(error)),
        }
    }

    /// Handles what the request handler would refuse, see [`early`]; true when there was such a thing.
    fn early_request(&self, stream: &UnixStream) -> Result<bool, ProtocolError> {
        let lock = || {
            self.transport
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        if lock().negotiated() {
            return Ok(false);
        }
        let Some(request) = early::ring_enable(stream).map_err(ProtocolError::ReqHandlerError)?
        else {
            return Ok(false);
        };
        lock().set_vring_enable(request.index, request.enable)?;
        request
            .answer(stream)
            .map_err(ProtocolError::SocketBroken)?;
        Ok(true)
    }
}
