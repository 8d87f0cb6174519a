//! PCI device that copies guest memory and raises an interrupt, served to one client at a time:
//!
//! ```text
//! cargo run -p vfio-user-server --example dma_engine -- /tmp/dma.sock
//! qemu-system-x86_64 -object memory-backend-memfd,id=ram,size=4G,share=on -machine q35,memory-backend=ram ... \
//!     -device '{"driver": "vfio-user-pci", "socket": {"type": "unix", "path": "/tmp/dma.sock"}}'
//! ```
//!
//! A driver enables memory, bus mastering and MSI, writes two DMA addresses and a length, and
//! writes `START`. The interrupt says that `STATUS` has the result.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;

use foreign_fds::ForeignFd;
use vfio_user_server::device::{Device, pci};
use vfio_user_server::dma::{DmaMap, DmaUnmap};
use vfio_user_server::errno::Errno;
use vfio_user_server::irq::IrqCommand;
use vfio_user_server::layout::{Layout, LayoutError};
use vfio_user_server::pci_function::PciFunction;
use vfio_user_server::pci_registers::{Bank, Bar, Identity, Row, Width::W32};
use vfio_user_server::session::Session;

const BAR_BYTES: u64 = 4096;
/// Device id in QEMU's vendor range, class "unassigned".
const IDENTITY: Identity = Identity::new(0x1b36, 0x0010, 0xff_00_00);
/// Longest copy in bytes. The guest's vCPU waits for it; longer ones belong on a thread.
const MAX_COPY: u32 = 1 << 20;

/// Values of `STATUS`.
const DONE: u32 = 1;
const FAULT: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Reg {
    SourceLow,
    SourceHigh,
    TargetLow,
    TargetHigh,
    Length,
    Start,
    Status,
}

/// A range of guest memory.
#[derive(Debug)]
struct GuestRange {
    size: u64,
    file: File,
    /// Offset of the range in the file.
    offset: u64,
    readable: bool,
    writable: bool,
}

/// Guest memory that the client shares, by DMA address.
#[derive(Debug, Default)]
struct GuestMemory(BTreeMap<u64, GuestRange>);

impl GuestMemory {
    fn map(&mut self, map: DmaMap) {
        // The device cannot reach memory without a descriptor. A read of a file that is not memory
        // could wait for a file system for ever.
        let Some(fd) = map.fd.and_then(ForeignFd::into_memory) else { return };
        let DmaMap { address, size, offset, readable, writable, .. } = map;
        self.0.insert(address, GuestRange { size, file: fd.into(), offset, readable, writable });
    }

    fn unmap(&mut self, unmap: DmaUnmap) {
        match unmap {
            DmaUnmap::Range { address, .. } => drop(self.0.remove(&address)),
            DmaUnmap::All => self.0.clear(),
        }
    }

    /// Returns the range that contains all `len` bytes at an address, and their offset in its file.
    fn find(&self, address: u64, len: usize) -> Option<(&GuestRange, u64)> {
        let (start, range) = self.0.range(..=address).next_back()?;
        let within = address - start;
        let fits = within.checked_add(len as u64).is_some_and(|end| end <= range.size);
        fits.then_some((range, range.offset.checked_add(within)?))
    }

    fn read(&self, address: u64, data: &mut [u8]) -> Option<()> {
        let (range, at) = self.find(address, data.len()).filter(|(range, _)| range.readable)?;
        range.file.read_exact_at(data, at).ok()
    }

    fn write(&self, address: u64, data: &[u8]) -> Option<()> {
        let (range, at) = self.find(address, data.len()).filter(|(range, _)| range.writable)?;
        range.file.write_all_at(data, at).ok()
    }
}

/// The device.
#[derive(Debug)]
pub(crate) struct DmaEngine {
    function: PciFunction,
    registers: Bank<Reg>,
    memory: GuestMemory,
}

impl DmaEngine {
    pub(crate) fn new() -> Result<Self, LayoutError> {
        // The size of a BAR is a power of two; the guest learns it from configuration space.
        let function = PciFunction::builder(IDENTITY)
            .bar(Bar::registers(0, "Registers", BAR_BYTES))
            .msi(1)
            .build()?;
        let rw = |reg, name, at, doc| Row::rw(reg, name, at, W32, 0, u32::MAX, doc);
        let rows = vec![
            rw(Reg::SourceLow, "SOURCE_LOW", 0x00, "DMA address of the source, low half"),
            rw(Reg::SourceHigh, "SOURCE_HIGH", 0x04, "DMA address of the source, high half"),
            rw(Reg::TargetLow, "TARGET_LOW", 0x08, "DMA address of the target, low half"),
            rw(Reg::TargetHigh, "TARGET_HIGH", 0x0c, "DMA address of the target, high half"),
            rw(Reg::Length, "LENGTH", 0x10, "Length in bytes, up to 1 MiB"),
            Row::wo(Reg::Start, "START", 0x14, W32, "A write copies and raises MSI vector 0"),
            Row::ro(Reg::Status, "STATUS", 0x18, W32, 0, "1 after a copy, 2 after a fault"),
        ];
        let registers = Bank::new(BAR_BYTES, rows);
        Ok(Self { function, registers, memory: GuestMemory::default() })
    }
}

/// Copies as the registers say. Every value is the guest's: an impossible one is a fault.
fn copy(bank: &Bank<Reg>, memory: &GuestMemory) -> Option<()> {
    let address = |low, high| u64::from(bank.get(high)) << 32 | u64::from(bank.get(low));
    let length = bank.get(Reg::Length);
    if length > MAX_COPY {
        return None;
    }
    let mut data = vec![0; length as usize];
    memory.read(address(Reg::SourceLow, Reg::SourceHigh), &mut data)?;
    memory.write(address(Reg::TargetLow, Reg::TargetHigh), &data)
}

impl Device for DmaEngine {
    fn layout(&self) -> &Layout {
        self.function.layout()
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        match index {
            pci::CONFIG => self.function.config_read(offset, data),
            _ => self.registers.read(offset, data, |_, value| value),
        }
        Ok(())
    }

    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let Self { function, registers, memory } = self;
        match index {
            pci::CONFIG if function.config_write(offset, data).reset => self.reset()?,
            pci::CONFIG => {}
            _ => registers.write(offset, data, |bank, register, _| {
                // A function without bus mastering must not access memory or send MSIs.
                if register == Reg::Start && function.config().bus_master() {
                    let status = copy(bank, memory).map_or(FAULT, |()| DONE);
                    bank.set(Reg::Status, status);
                    function.signal_msi(0);
                }
            }),
        }
        Ok(())
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        self.memory.map(map);
        Ok(())
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        self.memory.unmap(unmap);
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, command: IrqCommand<'_>) -> Result<(), Errno> {
        self.function.set_irqs(index, command)
    }

    /// Resets registers. Mappings of guest memory belong to the client and stay.
    fn reset(&mut self) -> Result<(), Errno> {
        self.function.reset();
        self.registers.reset();
        Ok(())
    }

    fn detach(&mut self) {
        self.function.detach();
        self.memory.unmap(DmaUnmap::All);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("No socket path: pass it as the argument")?;
    let listener = UnixListener::bind(&path).map_err(|e| format!("Cannot bind {path}: {e}"))?;
    let mut device = DmaEngine::new()?;
    loop {
        let (socket, _) = listener.accept()?;
        eprintln!("{}", Session::new(socket.into())?.serve(&mut device));
    }
}
