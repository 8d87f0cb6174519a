//! Messages of a running VM cause no allocations.

// Clippy knows only the functions marked as tests, not those that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use vfio_user_server::device::{Device, Region, pci};
use vfio_user_server::errno::Errno;
use vfio_user_server::irq::{Irq, IrqCommand};
use vfio_user_server::proto::header::{Command, Header};
use vfio_user_server::proto::message::{Access, IrqData, Request, SetIrqs};
use vfio_user_server::session::Session;
use zerocopy::{FromBytes, IntoBytes};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// System allocator that counts each thread's allocations.
struct CountingAllocator;

// SAFETY: all calls go to the system allocator; the counter is a thread-local cell.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the system allocator's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the system allocator's contract.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the system allocator's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

struct Registers([u8; 4096]);

impl Device for Registers {
    fn region(&self, index: u32) -> Option<Region<'_>> {
        (index == 0).then_some(Region::trapped(4096))
    }

    fn irq(&self, index: u32) -> Irq {
        if index == pci::INTX { Irq::INTX } else { Irq::NONE }
    }

    fn region_read(&mut self, _: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        data.copy_from_slice(&self.0[offset as usize..][..data.len()]);
        Ok(())
    }

    fn region_write(&mut self, _: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.0[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn set_irqs(&mut self, _: u32, _: IrqCommand<'_>) -> Result<(), Errno> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        Ok(())
    }
}

fn message(command: Command, payload: &[u8]) -> Vec<u8> {
    let header = Header::request(7, command, payload.len());
    [header.as_bytes(), payload].concat()
}

fn encode(request: &Request<'_>) -> Vec<u8> {
    let mut payload = Vec::new();
    request.encode(&mut payload);
    message(request.command(), &payload)
}

#[test]
fn messages_of_a_running_vm_cause_no_allocations() {
    let (mut client, server) = UnixStream::pair().unwrap();
    let mut session = Session::new(server.into()).unwrap();
    let mut device = Registers([7; 4096]);
    let mut exchange = |bytes: &[u8]| {
        client.write_all(bytes).unwrap();
        let before = ALLOCATIONS.get();
        session.on_ready(&mut device).unwrap();
        let allocations = ALLOCATIONS.get() - before;
        let mut header = [0; Header::SIZE];
        client.read_exact(&mut header).unwrap();
        let header = Header::read_from_bytes(&header).unwrap();
        assert_eq!(header.failure(), None);
        let mut payload = [0; 8192];
        client.read_exact(&mut payload[..header.size as usize - Header::SIZE]).unwrap();
        allocations
    };
    exchange(&encode(&Request::Version { major: 0, minor: 0, data: b"{}\0" }));
    let place = |count| Access { region: 0, offset: 0x10, count };
    let irqs = SetIrqs {
        index: pci::INTX,
        start: 0,
        count: 1,
        action: vfio_user_server::irq::IrqAction::Unmask,
        data: IrqData::None,
    };
    let write = |offset: u64| -> Vec<u8> {
        [&offset.to_ne_bytes()[..], &0_u32.to_ne_bytes(), &4_u32.to_ne_bytes(), &[1; 8]].concat()
    };
    let several = [&2_u64.to_ne_bytes()[..], &write(0), &write(8)].concat();
    let messages = [
        encode(&Request::RegionRead(place(4))),
        encode(&Request::RegionRead(place(4000))),
        encode(&Request::RegionWrite(place(4), &[1, 2, 3, 4])),
        message(Command::RegionWriteMulti, &several),
        encode(&Request::SetIrqs(irqs)),
        encode(&Request::GetRegionInfo { index: 0, argsz: 32 }),
        encode(&Request::Reset),
    ];
    for message in &messages {
        exchange(message); // Buffers grow to their final size.
    }
    for message in &messages {
        let allocations: u64 = (0..1000).map(|_| exchange(message)).sum();
        assert_eq!(allocations, 0, "{message:?}");
    }
}
