//! The example with DMA: its guest shares memory.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};
use vfio_user_server::device::pci;
use vfio_user_server::dma::DmaUnmap;
use vfio_user_server::proto::message::Request;

#[path = "../../examples/dma_engine.rs"]
#[allow(dead_code, reason = "the example's main function")]
mod example;

use self::example::DmaEngine;
use super::support::{Connection, event};

const COMMAND: u64 = 0x04;
const MEMORY_AND_BUS_MASTER: [u8; 2] = [6, 0];
const SOURCE: u64 = 0x00;
const TARGET: u64 = 0x08;
const LENGTH: u64 = 0x10;
const START: u64 = 0x14;
const STATUS: u64 = 0x18;
const DONE: u32 = 1;
const FAULT: u32 = 2;

/// DMA address of the guest's memory, above 4 GiB, and its offset in its file.
const RAM: u64 = 0x1_0000_0000;
const OFFSET: u64 = 0x1000;
const RAM_BYTES: u64 = 0x4000;

struct Guest {
    connection: Connection<DmaEngine>,
    ram: File,
}

impl Guest {
    /// Returns a guest with memory that the device may access as the flags say.
    fn new(readable: bool, writable: bool) -> Self {
        let ram = File::from(memfd_create(c"ram", MFdFlags::empty()).unwrap());
        ram.set_len(OFFSET + RAM_BYTES).unwrap();
        let mut connection = Connection::new(DmaEngine::new().unwrap());
        let map =
            Request::DmaMap { address: RAM, size: RAM_BYTES, offset: OFFSET, readable, writable };
        connection.request(&map, &[ram.as_raw_fd()]);
        connection.write(pci::CONFIG, COMMAND, &MEMORY_AND_BUS_MASTER);
        Self { connection, ram }
    }

    /// Copies and returns the status.
    fn copy(&mut self, source: u64, target: u64, length: u32) -> u32 {
        for (register, address) in [(SOURCE, source), (TARGET, target)] {
            self.connection.write(pci::BAR0, register, &(address as u32).to_le_bytes());
            self.connection.write(pci::BAR0, register + 4, &((address >> 32) as u32).to_le_bytes());
        }
        self.connection.write(pci::BAR0, LENGTH, &length.to_le_bytes());
        self.connection.write(pci::BAR0, START, &[0; 4]);
        self.connection.read(pci::BAR0, STATUS)
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read_exact_at(&mut bytes, OFFSET + at).unwrap();
        bytes
    }
}

#[test]
fn a_copy_moves_guest_memory_and_raises_an_interrupt() {
    let mut guest = Guest::new(true, true);
    let event = event();
    guest.connection.set_msi(Some(&event));
    guest.ram.write_all_at(b"some bytes of the guest", OFFSET + 0x10).unwrap();
    assert_eq!(guest.copy(RAM + 0x10, RAM + 0x2001, 23), DONE);
    assert_eq!(guest.bytes(0x2000, 25), b"\0some bytes of the guest\0");
    assert_eq!(event.read(), Ok(1));
}

#[test]
fn impossible_copies_are_faults_and_write_nothing() {
    let mut guest = Guest::new(true, true);
    let before = guest.bytes(0, RAM_BYTES as usize);
    for (source, target, length) in [
        (RAM - 1, RAM, 8),
        (RAM, RAM + RAM_BYTES - 4, 8),
        (RAM + RAM_BYTES, RAM, 1),
        (u64::MAX, RAM, 8),
        (RAM, RAM, u32::MAX),
        (0, RAM, 8),
    ] {
        assert_eq!(guest.copy(source, target, length), FAULT, "{source:#x} {target:#x} {length}");
    }
    assert_eq!(guest.bytes(0, RAM_BYTES as usize), before);
    assert_eq!(guest.copy(RAM, RAM + 8, 8), DONE, "the device works on");
    guest.connection.request(&Request::DmaUnmap(DmaUnmap::All), &[]);
    assert_eq!(guest.copy(RAM, RAM + 8, 8), FAULT, "the memory is unmapped");
}

#[test]
fn permissions_of_mappings_hold() {
    assert_eq!(Guest::new(true, false).copy(RAM, RAM + 8, 8), FAULT);
    assert_eq!(Guest::new(false, true).copy(RAM, RAM + 8, 8), FAULT);
}

#[test]
fn without_bus_mastering_nothing_happens() {
    let mut guest = Guest::new(true, true);
    let event = event();
    guest.connection.set_msi(Some(&event));
    guest.connection.write(pci::CONFIG, COMMAND, &[2, 0]);
    assert_eq!(guest.copy(RAM, RAM + 8, 8), 0);
    assert!(event.read().is_err(), "an MSI is a write by the bus master");
}
