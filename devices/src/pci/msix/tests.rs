use super::*;
use crate::pci::config::Identity;
use crate::testing::MockPciHost;

const ON: u16 = ENABLE;

struct Function {
    config: ConfigSpace,
    msix: Msix,
    host: MockPciHost,
}

impl Function {
    fn new() -> Self {
        let mut config = ConfigSpace::new(&Identity {
            vendor: 1,
            device: 2,
            revision: 3,
            class: 4,
            subsystem_vendor: 5,
            subsystem: 6,
        });
        let msix = Msix::new(&mut config, 3, 0x4000, 0x5000).unwrap();
        let host = MockPciHost::default();
        Self { config, msix, host }
    }

    fn control(&mut self, value: u16) {
        let at = self.msix.capability + CONTROL;
        self.config.write(at, &value.to_le_bytes());
        self.msix.config_written(&self.config, &mut self.host);
    }

    fn write(&mut self, vector: u64, dword: u64, value: u32) {
        let offset = vector * ENTRY_LEN + dword * 4;
        let data = value.to_le_bytes();
        self.msix.write_table(offset, &data, &mut self.host);
    }

    fn read(&self, vector: u64, dword: u64) -> u32 {
        let mut data = [0; 4];
        self.msix
            .read_table(vector * ENTRY_LEN + dword * 4, &mut data);
        u32::from_le_bytes(data)
    }

    fn set_up(&mut self, vector: u64) {
        self.write(vector, 0, 0xfee0_1000);
        self.write(vector, 1, 0);
        self.write(vector, 2, 0x40 + vector as u32);
    }

    fn signal(&self, vector: usize) {
        self.msix.events()[vector].write(1).unwrap();
    }

    fn pending(&mut self) -> u64 {
        let mut data = [0; 8];
        self.msix.read_pending(0, &mut data);
        u64::from_le_bytes(data)
    }

    fn sent(&self) -> Vec<u32> {
        let sent = self.host.attached().sent();
        sent.iter().map(|message| message.data).collect()
    }
}

#[test]
fn capability_tells_size_and_places() {
    let f = Function::new();
    let at = f.msix.capability;
    assert_eq!(f.config.u16(at + CONTROL), 2, "three vectors, off");
    assert_eq!(f.config.u32(at + 4), 0x4000);
    assert_eq!(f.config.u32(at + 8), 0x5000);
}

#[test]
fn an_unmasked_vector_sends_its_message() {
    let mut f = Function::new();
    f.control(ON);
    f.set_up(1);
    assert!(f.host.attached().msi.is_empty(), "still masked");
    f.write(1, 3, 0);
    f.signal(1);
    let sent = f.host.attached().sent();
    let message = MsiMessage {
        address: 0xfee0_1000,
        data: 0x41,
    };
    assert_eq!(sent, [message]);
    assert_eq!(f.pending(), 0);
}

#[test]
fn each_mask_keeps_an_interrupt_until_it_is_lifted() {
    let mut f = Function::new();
    f.set_up(2);
    f.write(2, 3, 0);
    f.signal(2);
    assert_eq!((f.pending(), f.sent()), (4, vec![]), "MSI-X is off");
    f.control(ON | FUNCTION_MASK);
    assert_eq!((f.pending(), f.sent()), (4, vec![]), "function mask");
    f.write(2, 3, 1);
    f.control(ON);
    assert_eq!((f.pending(), f.sent()), (4, vec![]), "vector mask");
    f.write(2, 3, 0);
    assert_eq!((f.pending(), f.sent()), (0, vec![0x42]));
    f.control(ON | FUNCTION_MASK);
    assert!(f.host.attached().msi.is_empty());
    f.control(ON);
    assert_eq!(f.sent(), [] as [u32; 0], "nothing comes twice");
}

#[test]
fn a_new_message_replaces_the_old_one() {
    let mut f = Function::new();
    f.control(ON);
    f.set_up(0);
    f.write(0, 3, 0);
    f.write(0, 2, 0x99);
    f.signal(0);
    assert_eq!(f.sent(), [0x99]);
    let both = [0xfee0_2000u32.to_le_bytes(), 7u32.to_le_bytes()].concat();
    f.msix.write_table(0, &both, &mut f.host);
    f.signal(0);
    assert_eq!(f.host.attached().sent()[0].address, 0x7_fee0_2000);
}

#[test]
fn a_refused_message_stays_pending() {
    let mut f = Function::new();
    f.control(ON);
    f.set_up(0);
    f.host.attached().refuse = true;
    f.write(0, 3, 0);
    f.signal(0);
    assert_eq!(f.pending(), 1);
    f.host.attached().refuse = false;
    f.write(0, 3, 1);
    f.write(0, 3, 0);
    assert_eq!(f.sent(), [0x40]);
}

#[test]
fn a_reset_drops_what_was_not_delivered() {
    let mut f = Function::new();
    f.signal(0);
    assert_eq!(f.pending(), 1);
    f.signal(1);
    f.msix.drop_pending();
    assert_eq!(f.pending(), 0);
}

#[test]
fn the_table_takes_dwords_and_has_an_end() {
    let mut f = Function::new();
    f.msix.write_table(8, &[0xff; 2], &mut f.host);
    f.msix.write_table(9, &[0xff; 4], &mut f.host);
    assert_eq!(f.read(0, 2), 0);
    f.write(0, 0, u32::MAX);
    f.write(0, 3, u32::MAX);
    assert_eq!((f.read(0, 0), f.read(0, 3)), (!3, 1));
    // Across two entries: mask of one, address of the next.
    f.msix.write_table(12, &[0; 8], &mut f.host);
    assert_eq!((f.read(0, 3), f.read(1, 0)), (0, 0));
    f.write(3, 2, 5);
    f.msix.write_table(u64::MAX - 3, &[0; 4], &mut f.host);
    assert_eq!(f.read(3, 2), 0);
    let mut data = [0xee; 8];
    f.msix.read_table(u64::MAX - 2, &mut data);
    f.msix.read_pending(u64::MAX - 2, &mut data);
    assert_eq!(data, [0; 8]);
}
