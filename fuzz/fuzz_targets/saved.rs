//! Saved vGPUs: a channel of any state is refused, or runs and writes only memory that is mapped
//! writable; a vGPU of any state is refused as a whole, or asks the GPU for what a guest could ask
//! for; any bytes are a stream or an error.
#![no_main]

use fuzz::emulation::Fixture;
use fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use mdev_core::device::{FunctionSpec, SavedVgpu, VirtualFunction};
use mdev_core::gpu::{SavedChannel, SavedClient};
use mdev_core::ids::{GuestPa, VgpuId};
use mdev_core::mem::DmaAccess;
use mdev_core::stream::{Head, Part, StreamReader, StreamWriter};
use mdev_core::testing::{Recorder, guest_ram};

thread_local!(static FIXTURE: Fixture = Fixture::default());

const RAM: u64 = 1 << 20;

/// Restores a vGPU. The recorder panics for a call that no guest's driver leads to.
fn restore_vgpu(input: &mut Input<'_>) {
    let spec = FunctionSpec {
        vgpu: VgpuId(uuid::Uuid::from_u128(7)),
        type_name: "FUZZ-8MC".into(),
        display: None,
        doorbell_mapped: true,
    };
    let (client, record) = Recorder::new();
    let mut function = VirtualFunction::new(&spec, client).expect("a function");
    let (_file, fd) = guest_ram(RAM);
    let both = DmaAccess::READ | DmaAccess::WRITE;
    function.dma_map(GuestPa(0), RAM, both, Some((fd, 0))).expect("maps");
    let backing = |input: &mut Input<'_>| match input.byte() % 4 {
        0 => format!("{{\"Vram\":{{\"offset\":{}}}}}", input.number()),
        1 => format!("{{\"Allocated\":{{\"memory\":1,\"offset\":{}}}}}", input.number()),
        _ => format!(
            "{{\"Guest\":{{\"memory\":{},\"offset\":{}}}}}",
            input.byte() % 3,
            input.number()
        ),
    };
    let mut saved = SavedVgpu {
        registers: function.save(),
        imports: Vec::new(),
        client: SavedClient::default(),
    };
    for _ in 0..input.byte() % 4 {
        let text = format!(
            "{{\"memory\":{},\"address\":{},\"len\":{}}}",
            input.byte() % 3,
            input.number(),
            input.number()
        );
        saved.imports.extend(serde_json::from_str::<mdev_core::device::SavedImport>(&text).ok());
    }
    for _ in 0..input.byte() % 8 {
        let text = format!(
            "{{\"space\":{},\"va\":{},\"len\":{},\"backing\":{},\"writable\":{}}}",
            // The recorder has one address space.
            0,
            input.number(),
            input.number(),
            backing(input),
            input.byte() & 1 == 0
        );
        saved
            .client
            .mappings
            .extend(serde_json::from_str::<mdev_core::gpu::MapRequest>(&text).ok());
    }
    for _ in 0..input.byte() % 3 {
        let text = format!(
            "{{\"engine\":\"Compute\",\"gpfifo\":{},\"gpfifo_entries\":{},\"userd\":{},\
             \"vector\":{},\"space\":0,\"group\":null}}",
            input.number(),
            input.number() as u32,
            backing(input),
            input.byte()
        );
        let id = mdev_core::ids::ChannelId(input.u32());
        let spec = serde_json::from_str(&text).ok();
        saved.client.channels.extend(spec.map(|spec| SavedChannel { id, spec, state: vec![] }));
    }
    if function.restore_vgpu(&saved).is_err() {
        let record = record.lock().expect("no panic");
        assert!(record.mapped.is_empty() && record.channels.is_empty() && !record.paused);
    }
}

/// Reads any bytes behind the beginning of a stream.
fn read_stream(bytes: &[u8]) {
    let head = Head {
        tessera: String::new(),
        vgpu: VgpuId(uuid::Uuid::nil()),
        mdev_type: "FUZZ".into(),
        vram_bytes: 1 << 20,
        place: None,
    };
    let writer = StreamWriter::new(Vec::new(), &head).expect("memory");
    let mut stream = writer.finish().expect("memory");
    stream.truncate(stream.len() - 20);
    stream.extend_from_slice(bytes);
    let Ok((mut reader, _)) = StreamReader::new(&stream[..]) else { return };
    let mut end = 0;
    while let Ok(part) = reader.next_part() {
        match part {
            Part::Memory { offset, data } => {
                assert!(offset >= end && offset + data.len() as u64 <= head.vram_bytes);
                end = offset + data.len() as u64;
            }
            Part::End => break,
            Part::State(_)
            | Part::Guest { .. }
            | Part::Next(_)
            | Part::Domain(_)
            | Part::Machine(_) => {}
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    match input.byte() % 4 {
        0 => restore_vgpu(&mut input),
        1 => read_stream(input.0),
        _ => FIXTURE.with(|fixture| {
            fixture.clear();
            fixture.run_restored(&mut input);
        }),
    }
});
