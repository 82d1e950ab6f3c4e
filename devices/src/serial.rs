//! The first serial port (COM1): a 16550A from `vm-superio`, with input that waits.
//!
//! Input is held back until the driver has enabled its receive interrupt once: a driver empties the
//! port when it opens it, so what arrived before would be lost.

use std::collections::VecDeque;
use std::io::{self, Write};

use vm_superio::Trigger;
use vm_superio::serial::{Error, NoEvents, Serial};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::bus::BusDevice;

/// Interrupt enable register, while the divisor latch is not in its place.
const IER: u64 = 1;
const IER_RECEIVED: u8 = 1;
/// Line control register.
const LCR: u64 = 3;
const LCR_DLAB: u8 = 0x80;

/// First I/O port of COM1.
pub const COM1_PORT: u16 = 0x3f8;
/// Number of I/O ports.
pub const COM1_LEN: u16 = 8;
/// Interrupt of COM1.
pub const COM1_GSI: u32 = 4;

/// Bytes of input that wait at most, beyond what the port's own FIFO holds.
///
/// A terminal's paste fits; beyond it the reader of the terminal is to wait.
pub const PENDING_MAX: usize = 4096;

struct EventFdTrigger(EventFd);

impl Trigger for EventFdTrigger {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// COM1.
pub struct Com1 {
    uart: Serial<EventFdTrigger, NoEvents, Box<dyn Write + Send>>,
    pending: VecDeque<u8>,
    room: EventFd,
    refused: bool,
    lost: u64,
    /// The divisor latch is in place of the first two registers.
    dlab: bool,
    /// The driver has enabled its receive interrupt once.
    listening: bool,
}

impl Com1 {
    /// A port whose output goes to `out`, one byte a call and flushed each time.
    ///
    /// # Errors
    /// Fails when an event descriptor cannot be made.
    pub fn new(out: Box<dyn Write + Send>) -> io::Result<Self> {
        let trigger = EventFdTrigger(EventFd::new(EFD_NONBLOCK)?);
        Ok(Self {
            uart: Serial::new(trigger, out),
            pending: VecDeque::new(),
            room: EventFd::new(EFD_NONBLOCK)?,
            refused: false,
            lost: 0,
            dlab: false,
            listening: false,
        })
    }

    /// Written for each interrupt; to be registered as an irqfd of [`COM1_GSI`].
    pub fn irq(&self) -> &EventFd {
        &self.uart.interrupt_evt().0
    }

    /// Written when all input was taken after [`Self::enqueue_input`] had refused some.
    pub fn room_event(&self) -> &EventFd {
        &self.room
    }

    /// Gives the guest input; returns how many bytes were taken. The rest is to be offered again
    /// after [`Self::room_event`].
    pub fn enqueue_input(&mut self, input: &[u8]) -> usize {
        let taken = input.len().min(PENDING_MAX - self.pending.len());
        self.refused |= taken < input.len();
        self.pending.extend(&input[..taken]);
        self.feed();
        taken
    }

    /// Bytes of output that could not be written.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Moves waiting input to the port's FIFO, once somebody listens.
    fn feed(&mut self) {
        while self.listening && !self.pending.is_empty() {
            let (bytes, _) = self.pending.as_slices();
            match self.uart.enqueue_raw_bytes(bytes) {
                // None in loop-back mode; the FIFO may be full, too.
                Ok(0) | Err(Error::FullFifo) => return,
                Ok(n) => drop(self.pending.drain(..n)),
                Err(error) => {
                    tracing::warn!(%error, "cannot interrupt the guest for serial input");
                    return;
                }
            }
        }
        if std::mem::take(&mut self.refused) {
            // Fails only when nobody ever read it.
            let _ = self.room.write(1);
        }
    }
}

/// Registers are bytes; of a wider access only the first byte counts.
impl BusDevice for Com1 {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(byte) = data.first_mut()
            && let Ok(offset) = u8::try_from(offset)
        {
            *byte = self.uart.read(offset);
            self.feed();
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        match (offset, data.first()) {
            (LCR, Some(value)) => self.dlab = value & LCR_DLAB != 0,
            (IER, Some(value)) if !self.dlab => self.listening |= value & IER_RECEIVED != 0,
            _ => {}
        }
        if let Some(&byte) = data.first()
            && let Ok(offset) = u8::try_from(offset)
            && let Err(error) = self.uart.write(offset, byte)
        {
            // A full or closed terminal must not stop the guest.
            self.lost += 1;
            if self.lost == 1 {
                tracing::warn!(%error, "serial output is lost");
            }
        }
        // Leaving loop-back mode lets input in again.
        self.feed();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn byte(port: &mut Com1, offset: u64) -> u8 {
        let mut data = [0];
        port.read(offset, &mut data);
        data[0]
    }

    #[test]
    fn output_arrives() {
        let out = Shared::default();
        let mut port = Com1::new(Box::new(out.clone())).unwrap();
        for byte in *b"ok\n" {
            port.write(0, &[byte]);
        }
        assert_eq!(*out.0.lock().unwrap(), b"ok\n");
        assert_eq!(byte(&mut port, 5) & 0x60, 0x60);
    }

    #[test]
    fn input_waits_for_a_listener() {
        let mut port = Com1::new(Box::new(io::sink())).unwrap();
        assert_eq!(port.enqueue_input(b"early"), 5);
        port.write(LCR, &[LCR_DLAB]);
        port.write(IER, &[1]);
        port.write(LCR, &[3]);
        assert_eq!(byte(&mut port, 5) & 1, 0);
        port.write(IER, &[IER_RECEIVED]);
        assert_eq!(byte(&mut port, 5) & 1, 1);
        assert_eq!(byte(&mut port, 0), b'e');
    }

    #[test]
    fn input_waits_and_is_bounded() {
        let mut port = Com1::new(Box::new(io::sink())).unwrap();
        port.write(1, &[1]); // IER: received data
        let input: Vec<u8> = (0..6000u32).map(|n| (n % 251) as u8).collect();
        let mut sent = port.enqueue_input(&input);
        assert!(sent < input.len());
        assert!(port.irq().read().is_ok());
        let mut got = Vec::new();
        while byte(&mut port, 5) & 1 != 0 {
            got.push(byte(&mut port, 0));
            if port.room_event().read().is_ok() {
                sent += port.enqueue_input(&input[sent..]);
            }
        }
        assert_eq!(sent, input.len());
        assert_eq!(got, input);
    }

    #[test]
    fn odd_accesses_are_harmless() {
        let mut port = Com1::new(Box::new(io::sink())).unwrap();
        port.read(u64::MAX, &mut [0; 8]);
        port.write(300, &[1, 2]);
        port.write(0, &[]);
        port.read(0, &mut []);
    }
}
