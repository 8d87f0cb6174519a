//! Whatever a guest writes into its mailbox and registers while its memory comes and goes: every
//! request that can be read gets a status, no address leaves what is mapped, and what was imported
//! is released.
#![no_main]

use std::os::unix::fs::FileExt;

use fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use mdev_core::abi::control::reg;
use mdev_core::abi::mailbox::{Header, PAYLOAD, Status};
use mdev_core::device::{DisplayLimits, FunctionSpec, VirtualFunction};
use mdev_core::ids::{GuestPa, VgpuId};
use mdev_core::mem::DmaAccess;
use mdev_core::testing::{Recorder, guest_ram, memory};
use zerocopy::{FromBytes, IntoBytes};

const RAM: u64 = 1 << 20;
const MAILBOX: u64 = 0x8000;
const CONTROL: u32 = 3;

/// Widths of the fields of a request's payload; the last few repeat.
fn layout(opcode: u32) -> &'static [usize] {
    match opcode {
        2 => &[8, 4, 4, 8, 8, 8, 8, 8, 8],
        3 => &[8, 8, 8, 4, 4],
        4 => &[8, 8],
        5 => &[4, 4, 8, 8, 4, 4],
        6 | 7 => &[4, 4],
        _ => &[],
    }
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let (client, books) = Recorder::new();
    books.lock().expect("no thread panics with the lock").refuse_every = Some(11);
    let spec = FunctionSpec {
        vgpu: VgpuId(uuid::Uuid::from_u128(7)),
        type_name: "FUZZ-4MQ".into(),
        display: (input.byte() & 1 == 0)
            .then_some(DisplayLimits { max_width: 800, max_height: 600 }),
        doorbell_mapped: true,
    };
    let mut function = VirtualFunction::new(&spec, client).expect("a function");
    let both = DmaAccess::READ | DmaAccess::WRITE;
    let (ram, fd) = guest_ram(RAM);
    function.dma_map(GuestPa(0), RAM, both, Some((fd, 0))).expect("RAM is mapped");
    let mut plain_mailbox = true;
    let lo = (MAILBOX as u32).to_le_bytes();
    function.region_write(CONTROL, reg::MAILBOX_LO, &lo).expect("a register");
    for _ in 0..64 {
        if input.is_empty() {
            break;
        }
        match input.byte() % 12 {
            0..6 => {
                let opcode = u32::from(input.byte() % 10);
                let mut payload = Vec::new();
                for width in layout(opcode) {
                    let mut value = input.number();
                    // GPU addresses start at 4 GiB or so: the guest knows that.
                    if *width == 8 && payload.is_empty() {
                        value = value.wrapping_add(mdev_core::abi::mailbox::VA_START);
                    }
                    payload.extend_from_slice(&value.to_le_bytes()[..*width]);
                }
                let request_bytes = match input.byte() {
                    0xff => input.u32(),
                    fewer => (payload.len() as u32).saturating_sub(u32::from(fewer & 0x80) / 16),
                };
                let header =
                    Header { opcode, status: u32::MAX, request_bytes, ..Header::default() };
                ram.write_all_at(header.as_bytes(), MAILBOX).expect("RAM");
                ram.write_all_at(&payload, MAILBOX + PAYLOAD as u64).expect("RAM");
                function
                    .region_write(CONTROL, reg::MAILBOX_DOORBELL, &[1, 0, 0, 0])
                    .expect("a register");
                if plain_mailbox {
                    let mut bytes = [0; size_of::<Header>()];
                    ram.read_exact_at(&mut bytes, MAILBOX).expect("RAM");
                    let header = Header::read_from_bytes(&bytes).expect("a header");
                    let status = Status::from_number(header.status);
                    assert!(!matches!(status, Status::BadMailbox), "it is where it was");
                    assert_eq!(Status::from_number(header.status) as u32, header.status);
                }
            }
            6 => {
                let (at, len) = (input.number(), input.number());
                let file = (input.byte() & 1 == 0)
                    .then(|| (memory(len & 0xff_ffff).into(), input.number()));
                let _ = function.dma_map(GuestPa(at), len, both, file);
            }
            7 => {
                let (at, len) = (input.number(), input.number());
                plain_mailbox &= function.dma_unmap(GuestPa(at), len).is_err() || at != 0;
            }
            8 => {
                let (region, at) = (u32::from(input.byte() % 10), input.number());
                let len = usize::from(input.byte() % 20);
                let bytes = input.bytes(len);
                plain_mailbox &= region != CONTROL && region != 7;
                let _ = function.region_write(region, at, bytes);
            }
            9 => {
                let (region, at) = (u32::from(input.byte() % 10), input.number());
                let _ = function.region_read(region, at, &mut vec![0; usize::from(input.byte())]);
            }
            10 => {
                plain_mailbox = false;
                function.reset();
            }
            _ => {
                let _ = (function.warnings(), function.scanout(), function.traps());
                let state = function.save();
                assert_eq!(function.restore(&state), Ok(()), "what a guest can set restores");
                assert_eq!(function.save(), state);
            }
        }
    }
    function.detach();
    let books = books.lock().expect("no thread panics with the lock");
    assert!(books.imports.is_empty() && books.mapped.is_empty() && books.channels.is_empty());
});
