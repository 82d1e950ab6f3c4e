//! The configuration space of a function with a type 0 header (PCI Local Bus 3.0, 6.1).
//!
//! 256 bytes, and for each bit whether the driver may change it. Sizing a BAR needs nothing more: its
//! low address bits are not writable, so all ones written read back as the size.

/// `Command`.
pub const COMMAND: u8 = 0x04;
/// `Command`: the function answers memory accesses.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// First base address register.
pub const BAR0: u8 = 0x10;
/// Pointer to the first capability.
pub const CAPABILITIES: u8 = 0x34;
/// Capability: vendor-specific.
pub const CAP_VENDOR: u8 = 0x09;
/// Capability: MSI-X.
pub const CAP_MSIX: u8 = 0x11;

/// Kept for the driver to read; virtio devices stay off guest memory until DRIVER_OK anyway.
pub(crate) const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_INTX_DISABLE: u16 = 1 << 10;
const STATUS: u8 = 0x06;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const CACHE_LINE_SIZE: u8 = 0x0c;
const INTERRUPT_LINE: u8 = 0x3c;
/// Capabilities start behind the header.
const HEADER_LEN: usize = 0x40;
/// A memory BAR that takes a 64-bit address.
const BAR_64: u64 = 0b100;

/// The read-only part of a header.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Revision ID.
    pub revision: u8,
    /// Base class, subclass and programming interface, from the high byte down.
    pub class: u32,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
}

/// A configuration space.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: [u8; 256],
    writable: [u8; 256],
    /// Where the pointer to the next capability goes.
    link: usize,
    /// End of the last capability.
    end: usize,
}

impl ConfigSpace {
    /// A header without BARs, capabilities and interrupt pin.
    pub fn new(id: &Identity) -> Self {
        let mut space = Self {
            bytes: [0; 256],
            writable: [0; 256],
            link: CAPABILITIES.into(),
            end: HEADER_LEN,
        };
        space.put(0x00, &id.vendor.to_le_bytes());
        space.put(0x02, &id.device.to_le_bytes());
        space.put(
            0x08,
            &((id.class << 8) | u32::from(id.revision)).to_le_bytes(),
        );
        space.put(0x2c, &id.subsystem_vendor.to_le_bytes());
        space.put(0x2e, &id.subsystem.to_le_bytes());
        let command = COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_INTX_DISABLE;
        space.allow(COMMAND, &command.to_le_bytes());
        space.allow(CACHE_LINE_SIZE, &[0xff]);
        space.allow(INTERRUPT_LINE, &[0xff]);
        space
    }

    /// Makes BAR 0 and 1 one 64-bit memory BAR of `size` bytes, a power of two from 16, at `base`.
    pub fn set_bar(&mut self, size: u64, base: u64) {
        let mask = !(size - 1);
        self.put(BAR0, &((base & mask) | BAR_64).to_le_bytes());
        self.allow(BAR0, &mask.to_le_bytes());
    }

    /// Where the driver put the BAR.
    pub fn bar(&self) -> u64 {
        u64::from(self.u32(BAR0) & !0xf) | u64::from(self.u32(BAR0 + 4)) << 32
    }

    /// Appends a capability: what follows its ID and link, and which bits of that may be written.
    /// Returns its offset, or `None` when there is no room.
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> Option<u8> {
        let at = self.end.next_multiple_of(4);
        let end = at.checked_add(2 + body.len()).filter(|end| *end <= 256)?;
        let offset = u8::try_from(at).ok()?;
        self.bytes[at] = id;
        self.bytes[at + 2..end].copy_from_slice(body);
        self.allow(offset + 2, writable);
        self.bytes[self.link] = offset;
        (self.link, self.end) = (at + 1, end);
        self.put(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        Some(offset)
    }

    /// Reads; bytes beyond the space read as zero.
    pub fn read(&self, offset: u8, data: &mut [u8]) {
        for (at, byte) in (usize::from(offset)..).zip(data) {
            *byte = self.bytes.get(at).copied().unwrap_or(0);
        }
    }

    /// Writes the bits that may be written.
    pub fn write(&mut self, offset: u8, data: &[u8]) {
        let at = usize::from(offset)..;
        let places = self.bytes.iter_mut().zip(&self.writable).skip(at.start);
        for ((byte, mask), new) in places.zip(data) {
            *byte = (*byte & !mask) | (new & mask);
        }
    }

    /// Sets bytes, also those that the driver cannot write.
    pub fn put(&mut self, offset: u8, data: &[u8]) {
        for (byte, new) in self.bytes.iter_mut().skip(offset.into()).zip(data) {
            *byte = *new;
        }
    }

    /// The 16 bits at `offset`.
    pub fn u16(&self, offset: u8) -> u16 {
        let mut data = [0; 2];
        self.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    /// The 32 bits at `offset`.
    pub fn u32(&self, offset: u8) -> u32 {
        let mut data = [0; 4];
        self.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn allow(&mut self, offset: u8, mask: &[u8]) {
        for (old, new) in self.writable.iter_mut().skip(offset.into()).zip(mask) {
            *old = *new;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: Identity = Identity {
        vendor: 0x1234,
        device: 0x5678,
        revision: 1,
        class: 0x02_00_00,
        subsystem_vendor: 0x9abc,
        subsystem: 0xdef0,
    };

    #[test]
    fn header_is_where_drivers_look() {
        let space = ConfigSpace::new(&ID);
        assert_eq!(space.u32(0x00), 0x5678_1234);
        assert_eq!(space.u16(0x0a), 0x0200, "class and subclass");
        assert_eq!(space.u32(0x2c), 0xdef0_9abc);
        let mut byte = [0];
        space.read(0x08, &mut byte);
        assert_eq!(byte, [1], "revision");
        assert_eq!(space.u16(0x0e) & 0xff, 0, "type 0, one function");
        assert_eq!(space.u16(STATUS), 0, "no capabilities");
        assert_eq!(space.u16(0x3c) >> 8, 0, "no interrupt pin");
    }

    #[test]
    fn identity_cannot_be_written() {
        let mut space = ConfigSpace::new(&ID);
        for offset in (0..=252).step_by(4) {
            space.write(offset, &[0xff; 4]);
        }
        assert_eq!(space.u32(0x00), 0x5678_1234);
        assert_eq!(space.u32(0x08), 0x0200_0001);
        assert_eq!(space.u16(COMMAND), 0x0406);
        assert_eq!(space.u32(BAR0), 0, "no BAR");
    }

    #[test]
    fn all_ones_read_back_as_the_size_of_the_bar() {
        let mut space = ConfigSpace::new(&ID);
        space.set_bar(0x8000, 0xe000_0000);
        assert_eq!(space.u32(BAR0), 0xe000_0004);
        assert_eq!(space.u32(BAR0 + 4), 0);
        space.write(BAR0, &[0xff; 4]);
        space.write(BAR0 + 4, &[0xff; 4]);
        assert_eq!(space.u32(BAR0), 0xffff_8004);
        assert_eq!(space.u32(BAR0 + 4), u32::MAX);
        space.write(BAR0, &0x1234_9abcu32.to_le_bytes());
        space.write(BAR0 + 4, &2u32.to_le_bytes());
        assert_eq!(space.bar(), 0x2_1234_8000);
    }

    #[test]
    fn bytes_and_words_reach_their_part_only() {
        let mut space = ConfigSpace::new(&ID);
        space.set_bar(0x8000, 0xe000_0000);
        space.write(BAR0 + 3, &[0xd1]);
        assert_eq!(space.u32(BAR0), 0xd100_0004);
        space.write(BAR0 + 2, &[0x23, 0xc1]);
        assert_eq!(space.u32(BAR0), 0xc123_0004);
        space.write(BAR0, &[0xff, 0xff]);
        assert_eq!(space.u32(BAR0), 0xc123_8004);
        space.write(255, &[1, 2, 3, 4]);
        space.read(255, &mut [0; 4]);
    }

    #[test]
    fn capabilities_are_a_chain() {
        let mut space = ConfigSpace::new(&ID);
        let first = space
            .add_capability(CAP_VENDOR, &[1, 2, 3], &[0, 0xff])
            .unwrap();
        let second = space.add_capability(CAP_MSIX, &[4], &[]).unwrap();
        assert_eq!((first, second), (0x40, 0x48));
        assert_ne!(space.u16(STATUS) & STATUS_CAPABILITIES, 0);
        assert_eq!(space.u16(CAPABILITIES) & 0xff, 0x40);
        assert_eq!(space.u32(0x40), 0x0201_4809);
        assert_eq!(space.u32(0x48), 0x0004_0011);
        space.write(0x40, &[0xff; 4]);
        assert_eq!(space.u32(0x40), 0xff01_4809, "one byte of it is writable");
        assert_eq!(space.add_capability(CAP_VENDOR, &[0; 200], &[]), None);
        assert_eq!(space.u32(0x48), 0x0004_0011, "a failed one changes nothing");
    }
}
