//! Journals: a worker continues with any state that a worker could leave that a guest has taken
//! over. It then asks the GPU for nothing that a guest could not ask for, and nothing stays
//! imported.
#![no_main]

use std::os::fd::OwnedFd;

use fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use mdev_core::device::{Descriptor, FunctionSpec, JournaledFunction, VirtualFunction};
use mdev_core::ids::{GuestPa, MemoryId, VgpuId};
use mdev_core::mem::{DmaAccess, JournaledMap, JournaledMemory, JournaledPart};
use mdev_core::testing::{Recorder, guest_ram};
use nix::sys::eventfd::EventFd;

const RAM: u64 = 1 << 20;
/// Regions of a PCI device in VFIO, and one more.
const REGIONS: u8 = 10;

fn spec() -> FunctionSpec {
    FunctionSpec {
        vgpu: VgpuId(uuid::Uuid::from_u128(7)),
        type_name: "FUZZ-8MC".into(),
        display: None,
        doorbell_mapped: true,
    }
}

/// Returns the state of a worker with some bytes changed, or any bytes.
fn state(input: &mut Input<'_>) -> Vec<u8> {
    if input.byte() % 8 == 0 {
        let len = usize::from(input.byte()) * 8;
        return input.bytes(len).to_vec();
    }
    let (client, _record) = Recorder::new();
    let mut function = VirtualFunction::new(&spec(), client).expect("a function");
    let (_file, fd) = guest_ram(RAM);
    let both = DmaAccess::READ | DmaAccess::WRITE;
    function.dma_map(GuestPa(0), RAM, both, Some((fd, 0))).expect("maps");
    access(&mut function, input, 4);
    let mut state = postcard::to_stdvec(&function.journaled()).expect("memory");
    for _ in 0..input.byte() % 16 {
        let at = input.u32() as usize % state.len();
        state[at] = input.byte();
    }
    state
}

/// Reads and writes registers.
fn access(function: &mut VirtualFunction, input: &mut Input<'_>, limit: usize) {
    for _ in 0..limit {
        if input.is_empty() {
            return;
        }
        let (kind, offset) = (input.byte(), input.number() % 0x2000);
        let region = u32::from(kind % REGIONS);
        let mut data = input.bytes(1 << (kind >> 6)).to_vec();
        // The session checks that an access is inside its region.
        let size = function.region(region).map_or(0, |info| info.size);
        if offset + data.len() as u64 > size {
            continue;
        }
        let _ = if kind & 16 == 0 {
            function.region_read(region, offset, &mut data)
        } else {
            function.region_write(region, offset, &data)
        };
    }
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let state = state(&mut input);
    let Ok(state) = postcard::from_bytes::<JournaledFunction<'_>>(&state) else { return };
    let (client, record) = Recorder::new();
    let mut function = VirtualFunction::new(&spec(), client).expect("a function");
    let maps: Vec<JournaledMap> = (0..input.byte() % 6)
        .map(|number| {
            let size = input.number();
            let imported = input.byte() & 1 == 1;
            // The GPU knows the imports that the worker before has made.
            record.lock().expect("no panic").imports.insert(number.into(), size);
            JournaledMap {
                address: GuestPa(input.number()),
                size,
                access: DmaAccess::from_bits_truncate(input.byte().into()),
                offset: (input.byte() & 7 != 0).then(|| input.number()),
                import: imported.then_some(MemoryId(number.into())),
            }
        })
        .collect();
    let parts: Vec<JournaledPart> = (8..8 + input.byte() % 6)
        .map(|number| {
            let (address, len) = (GuestPa(input.number()), input.number());
            record.lock().expect("no panic").imports.insert(number.into(), len);
            JournaledPart { address, len, import: MemoryId(number.into()) }
        })
        .collect();
    let has_files = input.byte();
    let take = |what| match what {
        Descriptor::Memory(_) => (has_files & 7 != 0).then(|| guest_ram(RAM).1),
        Descriptor::Event(_) => EventFd::new().ok().map(OwnedFd::from),
    };
    if function.adopt(&state, &JournaledMemory { maps, parts }, take).is_err() {
        return;
    }
    function.answer_later();
    if input.byte() & 1 == 0 {
        function.write_answer();
    } else {
        function.drop_answer();
    }
    let _ = postcard::to_stdvec(&function.journaled()).expect("memory");
    access(&mut function, &mut input, 64);
    function.write_answer();
    function.reset();
    function.detach();
});
