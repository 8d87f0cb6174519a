//! Saved channels of an NVIDIA GPU: a state with any changes is refused, or makes channels that a
//! guest could make; a reset leaves nothing of them.
#![no_main]

use std::sync::Arc;

use fuzz::input::Input;
use ipc::mem::SharedMemory;
use libfuzzer_sys::fuzz_target;
use mdev_core::abi::mailbox::VA_START;
use mdev_core::gpu::{
    Backing, ChannelSpec, Client, ClientSpec, EngineKind, Gpu, MapRequest, Preamble, SavedClient,
    Saving,
};
use mdev_core::ids::{ChannelId, GpuVa, SpaceId, VgpuId};
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::{self, FakeRm};
use vendor_backends::conformance::lifecycle;
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu, Options};

const DRIVER: &str = "580.142";
const VRAM: u64 = 16 * MIB;
const ENGINES: [EngineKind; 3] = [EngineKind::Compute, EngineKind::Copy, EngineKind::Compute];

thread_local!(static HOST: std::cell::RefCell<Host> = std::cell::RefCell::new(Host::new()));

/// A vGPU on a fake driver, and a state that it has had.
struct Host {
    rm: Arc<FakeRm>,
    _gpu: NvidiaGpu,
    client: NvidiaClient,
    ram: SharedMemory,
    saved: SavedClient,
}

impl Host {
    fn new() -> Self {
        let rm = FakeRm::new(DRIVER);
        rm.set_clock(1_000_000_000);
        let options = Options { direct_vram: false, ..Options::FOR_TESTS };
        let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, options).expect("a GPU");
        let spec = ClientSpec {
            vgpu: VgpuId(uuid::Uuid::from_u128(7)),
            vram_bytes: VRAM,
            framebuffer_bytes: 0,
            max_channels: 4,
            max_import_bytes: 64 * MIB,
        };
        let admission = gpu.admit(&spec).expect("room");
        let mut client =
            NvidiaClient::open(rm.clone(), admission.fd.expect("a file").into_trusted())
                .expect("a client");
        client.start().expect("starts");
        let ram = SharedMemory::new(c"ram", MIB).expect("memory");
        let memory = lifecycle::import(&mut client, &ram).expect("imported");
        let backing = Backing::Guest { memory, offset: 0 };
        client.map(&MapRequest::new(GpuVa(VA_START), MIB, backing)).expect("mapped");
        for (number, engine) in (0..).zip(ENGINES) {
            let base = number * 0x1_0000;
            let spec = ChannelSpec {
                gpfifo: GpuVa(VA_START + base),
                preamble: Preamble::new(GpuVa(VA_START + base + 0x2000), 4),
                ..lifecycle::channel_spec(engine, memory, base + 0x1000)
            };
            client.create_channel(&spec).expect("a channel");
        }
        client.pause().expect("pauses");
        let saved = client.save().expect("saves");
        client.reset().expect("resets");
        Self { rm, _gpu: gpu, client, ram, saved }
    }

    fn restore(&mut self, saved: &SavedClient) -> Result<(), mdev_core::gpu::GpuError> {
        // The device model checks them before.
        let capabilities = self.client.gpu().capabilities;
        for channel in &saved.channels {
            channel.spec.check(capabilities)?;
        }
        lifecycle::restore(&mut self.client, &self.ram, saved)
    }
}

fn change(saved: &mut SavedClient, input: &mut Input<'_>) {
    let number = usize::from(input.byte()) % saved.channels.len();
    let channel = &mut saved.channels[number];
    match input.byte() % 12 {
        0 => channel.id = ChannelId(input.number() as u32),
        1 => channel.spec.gpfifo = GpuVa(channel.spec.gpfifo.0.wrapping_add(input.number())),
        2 => channel.spec.gpfifo_entries = input.number() as u32,
        3 => channel.spec.space = SpaceId(input.number() as u32),
        4 => channel.spec.group = Some(input.number() as u32),
        5 => channel.state.truncate(usize::from(input.byte())),
        6 => channel.state = input.bytes(64).to_vec(),
        7 => {
            let again = channel.clone();
            if saved.channels.len() < 8 {
                saved.channels.push(again);
            }
        }
        8 => saved.spaces.push(SpaceId(input.number() as u32)),
        _ => {
            let at = usize::from(input.byte()) % channel.state.len().max(1);
            let bytes = input.bytes(4);
            for (to, byte) in channel.state.iter_mut().skip(at).zip(bytes) {
                *to = *byte;
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    HOST.with_borrow_mut(|host| {
        let mut input = Input(data);
        let mut saved = host.saved.clone();
        while !input.is_empty() {
            change(&mut saved, &mut input);
        }
        let _ = host.restore(&saved);
        host.client.reset().expect("resets");
        assert_eq!(host.client.usage().expect("usage").channels, 0);
        assert!(host.rm.violations().is_empty(), "{:?}", host.rm.violations());
        host.rm.take_log();
    });
});
