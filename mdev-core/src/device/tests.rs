//! Tests of the virtual function through the interfaces of a session and a guest's driver.

mod bars;
mod checkpoint;
mod handover;
mod interrupts;
mod lifecycle;
mod mailbox;
mod properties;
mod saved;
mod screen;

use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use foreign_fds::ForeignFd;
use pci_registers::IrqIndex;
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromBytes, IntoBytes};

use super::{DisplayLimits, FunctionSpec, VirtualFunction};
use crate::abi::control::reg;
use crate::abi::mailbox::{Header, Opcode, PAGE_BYTES, PAYLOAD, Status};
use crate::ids::{GuestPa, VgpuId};
use crate::mem::DmaAccess;
use crate::testing::{Recorder, Shared, guest_ram};
use crate::units::MIB;

const FRAMEBUFFER: u32 = 0;
const DOORBELL: u32 = 1;
const DISPLAY: u32 = 2;
const CONTROL: u32 = 3;
const VRAM: u32 = 4;
const CONFIG: u32 = 7;

/// Address of the mailbox page. Guest RAM starts at 0.
const MAILBOX: u64 = 0x8000;
const RAM: u64 = 16 * MIB;

/// Virtual function with guest RAM, and a minimal driver.
struct Guest {
    function: VirtualFunction,
    record: Shared,
    ram: File,
}

fn spec(display: bool) -> FunctionSpec {
    FunctionSpec {
        vgpu: VgpuId(uuid::Uuid::from_u128(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff)),
        type_name: "SOFT-1Q".into(),
        display: display.then_some(DisplayLimits { max_width: 800, max_height: 600 }),
        doorbell_mapped: true,
    }
}

impl Guest {
    fn new() -> Self {
        Self::with(true)
    }

    fn with(display: bool) -> Self {
        let (client, record) = Recorder::new();
        let mut function = VirtualFunction::new(&spec(display), client).unwrap();
        let (ram, fd) = guest_ram(RAM);
        function
            .dma_map(GuestPa(0), RAM, DmaAccess::READ | DmaAccess::WRITE, Some((fd, 0)))
            .unwrap();
        let mut guest = Self { function, record, ram };
        guest.write32(CONTROL, reg::MAILBOX_LO, MAILBOX as u32);
        guest
    }

    fn read32(&mut self, region: u32, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.function.region_read(region, offset, &mut data).unwrap();
        u32::from_le_bytes(data)
    }

    fn write32(&mut self, region: u32, offset: u64, value: u32) {
        self.function.region_write(region, offset, &value.to_le_bytes()).unwrap();
    }

    fn read16(&mut self, region: u32, offset: u64) -> u16 {
        let mut data = [0; 2];
        self.function.region_read(region, offset, &mut data).unwrap();
        u16::from_le_bytes(data)
    }

    fn write16(&mut self, region: u32, offset: u64, value: u16) {
        self.function.region_write(region, offset, &value.to_le_bytes()).unwrap();
    }

    fn set_triggers(&mut self, index: IrqIndex, events: Vec<Option<OwnedFd>>) {
        let events = events.into_iter().map(|event| event.map(ForeignFd::from)).collect();
        self.function.change_interrupts(|irq| irq.set_triggers(index, 0, events)).unwrap();
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.record.lock().unwrap().calls)
    }

    /// Sends a request. Returns its status and the payload of the reply.
    fn request(&mut self, opcode: Opcode, payload: &[u8]) -> (Status, Vec<u8>) {
        let header = Header {
            opcode: opcode as u32,
            status: 0xdead,
            request_bytes: payload.len() as u32,
            cookie: 0x1234_5678_9abc,
            ..Header::default()
        };
        self.ram.write_all_at(header.as_bytes(), MAILBOX).unwrap();
        self.ram.write_all_at(payload, MAILBOX + PAYLOAD as u64).unwrap();
        self.ring()
    }

    fn ring(&mut self) -> (Status, Vec<u8>) {
        self.write32(CONTROL, reg::MAILBOX_DOORBELL, 1);
        let mut page = [0; PAGE_BYTES];
        self.ram.read_exact_at(&mut page, MAILBOX).unwrap();
        let (header, _) = Header::read_from_prefix(&page).unwrap();
        assert_eq!(header.status, self.read32(CONTROL, reg::MAILBOX_STATUS));
        let reply = page[PAYLOAD..PAYLOAD + header.reply_bytes as usize].to_vec();
        (Status::from_number(header.status), reply)
    }
}

/// Returns an eventfd and a duplicate of its descriptor.
fn event() -> (EventFd, OwnedFd) {
    let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let copy = event.try_clone().unwrap();
    // SAFETY: the duplicate gives up its descriptor.
    (event, unsafe { OwnedFd::from_raw_fd(copy.into_raw_fd()) })
}

/// Returns the number of signals of an eventfd since the last call.
fn signals(event: &EventFd) -> u64 {
    event.read().unwrap_or(0)
}
