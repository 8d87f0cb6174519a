//! Lifecycle of a guest's objects without any work: memory, mappings, and channels on both engines.

use std::os::fd::AsFd;

use mdev_core::abi::mailbox::VA_START;
use mdev_core::gpu::{
    Backing, ChannelSpec, Client, EngineKind, GpuError, GuestRam, MapRequest, Placement,
};
use mdev_core::ids::{GpuVa, MemoryId, SpaceId};
use mdev_core::units::{GIB, MIB, PAGE_SIZE};

use crate::mem::SharedMemory;

/// Imports `ram` as guest memory.
pub fn import(client: &mut dyn Client, ram: &SharedMemory) -> Result<MemoryId, GpuError> {
    let len = ram.mapping.len();
    client.import(GuestRam { fd: ram.fd.as_fd(), offset: 0, len, writable: true })
}

/// Returns the specification of a channel with its USERD at `userd` in guest memory.
pub fn channel_spec(engine: EngineKind, memory: MemoryId, userd: u64) -> ChannelSpec {
    ChannelSpec {
        engine,
        gpfifo: GpuVa(VA_START),
        gpfifo_entries: 64,
        userd: Backing::Guest { memory, offset: userd },
        vector: 0,
        space: SpaceId::DEFAULT,
        group: None,
        placement: Placement::default(),
        preamble: None,
    }
}

/// Runs the lifecycle on a client with at least 4 MiB of video memory and 3 channels.
pub fn run(client: &mut dyn Client) -> Result<(), GpuError> {
    let ram = SharedMemory::new(c"ram", 16 * MIB)?;
    let memory = import(client, &ram)?;
    let backing = |offset| Backing::Guest { memory, offset };
    client.map(&MapRequest::new(GpuVa(VA_START), 16 * MIB, backing(0)))?;
    let vram = Backing::Vram { offset: 2 * MIB };
    client.map(&MapRequest::new(GpuVa(VA_START + GIB), 2 * MIB, vram))?;
    let hole = GpuVa(VA_START + MIB);
    client.unmap(SpaceId::DEFAULT, hole, MIB)?;
    client.map(&MapRequest::new(hole, PAGE_SIZE, backing(0)).read_only())?;
    let copy = client.create_channel(&channel_spec(EngineKind::Copy, memory, 0x1000))?;
    let compute = client.create_channel(&channel_spec(EngineKind::Compute, memory, 0x2000))?;
    client.create_channel(&channel_spec(EngineKind::Compute, memory, 0x3000))?;
    client.query_channel(copy.id)?;
    client.destroy_channel(compute.id)?;
    client.reset()?;
    client.create_channel(&channel_spec(EngineKind::Copy, memory, 0x1000))?;
    client.release(memory)
}
