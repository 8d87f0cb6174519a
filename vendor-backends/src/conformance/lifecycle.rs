//! Lifecycle of a guest's objects without any work: memory, mappings, and channels on both engines.

use std::os::fd::AsFd;

use ipc::mem::SharedMemory;
use mdev_core::abi::mailbox::VA_START;
use mdev_core::gpu::{
    Backing, ChannelSpec, Client, EngineKind, GpuError, GuestRam, MapRequest, Placement,
    SavedClient,
};
use mdev_core::ids::{GpuVa, MemoryId, SpaceId};
use mdev_core::units::{GIB, MIB, PAGE_SIZE};

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

/// Restores a saved client, whose guest memory is `ram` now. The client stays paused.
pub fn restore(
    client: &mut dyn Client,
    ram: &SharedMemory,
    saved: &SavedClient,
) -> Result<(), GpuError> {
    client.require_saving()?.pause()?;
    let memory = import(client, ram)?;
    let moved = |backing: Backing| match backing {
        Backing::Guest { offset, .. } => Backing::Guest { memory, offset },
        other => other,
    };
    for space in &saved.spaces {
        client.require_saving()?.restore_space(*space)?;
    }
    for mapping in &saved.mappings {
        client.map(&MapRequest { backing: moved(mapping.backing), ..*mapping })?;
    }
    for channel in &saved.channels {
        let mut channel = channel.clone();
        channel.spec.userd = moved(channel.spec.userd);
        client.require_saving()?.restore_channel(&channel)?;
    }
    Ok(())
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
