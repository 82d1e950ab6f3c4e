//! The ports by which a guest switches itself off or starts anew.

use crate::bus::BusDevice;

/// Value of the ACPI reset register, as the FADT announces it.
pub const RESET_VALUE: u8 = 1;
/// Value that enters S5: `SLP_TYP` 5 and `SLP_EN` (ACPI 6.5, 4.8.3.7).
pub const S5_VALUE: u8 = (5 << 2) | (1 << 5);
/// Port of the keyboard controller's command register.
pub const I8042_COMMAND_PORT: u16 = 0x64;
/// Keyboard controller command: pulse the CPU's reset line.
const I8042_RESET: u8 = 0xfe;

/// What the guest asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerEvent {
    /// Start anew.
    Reset,
    /// Switch off.
    PowerOff,
}

/// Called on the vCPU's thread; it should only leave a note.
pub type PowerHandler = Box<dyn Fn(PowerEvent) + Send>;

/// A one-byte port that is both the ACPI sleep control and the ACPI reset register.
pub struct AcpiPower(PowerHandler);

impl AcpiPower {
    /// Calls `handler` when the guest writes a value that means something.
    pub fn new(handler: PowerHandler) -> Self {
        Self(handler)
    }
}

impl BusDevice for AcpiPower {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        match (offset, data.first()) {
            (0, Some(&RESET_VALUE)) => (self.0)(PowerEvent::Reset),
            (0, Some(&S5_VALUE)) => (self.0)(PowerEvent::PowerOff),
            _ => {}
        }
    }
}

/// As much of a keyboard controller as it takes to reset the machine: its command port.
///
/// It reads as zero: the input buffer is empty, which is what a guest waits for.
pub struct I8042Reset(PowerHandler);

impl I8042Reset {
    /// Calls `handler` when the guest pulses the reset line.
    pub fn new(handler: PowerHandler) -> Self {
        Self(handler)
    }
}

impl BusDevice for I8042Reset {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if offset == 0 && data.first() == Some(&I8042_RESET) {
            (self.0)(PowerEvent::Reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn handler() -> (PowerHandler, mpsc::Receiver<PowerEvent>) {
        let (sender, receiver) = mpsc::channel();
        let send = move |event| sender.send(event).unwrap();
        (Box::new(send), receiver)
    }

    #[test]
    fn acpi_port() {
        let (handler, events) = handler();
        let mut port = AcpiPower::new(handler);
        for value in 0..=u8::MAX {
            port.write(0, &[value]);
        }
        port.write(1, &[RESET_VALUE]);
        port.write(0, &[]);
        let seen: Vec<_> = events.try_iter().collect();
        assert_eq!(seen, [PowerEvent::Reset, PowerEvent::PowerOff]);
        let mut data = [0xff; 4];
        port.read(0, &mut data);
        assert_eq!(data, [0; 4]);
    }

    #[test]
    fn keyboard_controller() {
        let (handler, events) = handler();
        let mut port = I8042Reset::new(handler);
        port.write(0, &[0xd1]);
        assert_eq!(events.try_recv(), Err(mpsc::TryRecvError::Empty));
        port.write(0, &[0xfe]);
        assert_eq!(events.try_recv(), Ok(PowerEvent::Reset));
    }
}
