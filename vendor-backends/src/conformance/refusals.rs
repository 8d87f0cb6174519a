//! Check of invalid requests.

use mdev_core::abi::mailbox::VA_START;
use mdev_core::gpu::{Backing, ChannelSpec, EngineKind, GpuError, MapRequest, Placement};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId};
use mdev_core::units::PAGE_SIZE;

use super::driver::{Driver, RAM_BYTES};

/// Checks that invalid mappings and channels are refused.
pub(super) fn refusals(driver: &mut Driver) {
    let memory = driver.memory();
    let client = driver.client();
    let guest = |offset| Backing::Guest { memory, offset };
    let free = VA_START + (5 << 30);
    let mut map =
        |va: u64, len: u64, backing| client.map(&MapRequest::new(GpuVa(va), len, backing));
    assert!(matches!(map(free + 1, PAGE_SIZE, guest(0)), Err(GpuError::Invalid(_))));
    assert!(matches!(map(free, 0, guest(0)), Err(GpuError::Invalid(_))));
    assert!(matches!(map(0, PAGE_SIZE, guest(0)), Err(GpuError::OutOfRange(_))));
    assert!(matches!(map(!0xfff, PAGE_SIZE, guest(0)), Err(GpuError::OutOfRange(_))));
    assert!(matches!(map(free, PAGE_SIZE, guest(RAM_BYTES)), Err(GpuError::OutOfRange(_))));
    assert!(matches!(map(free, PAGE_SIZE, guest(!0xfff)), Err(GpuError::OutOfRange(_))));
    let no_memory = Backing::Guest { memory: MemoryId(u32::MAX), offset: 0 };
    assert!(matches!(map(free, PAGE_SIZE, no_memory), Err(GpuError::NotFound(_))));
    map(free, 2 * PAGE_SIZE, guest(0)).unwrap();
    let overlap = map(free + PAGE_SIZE, PAGE_SIZE, guest(0));
    assert!(matches!(overlap, Err(GpuError::Overlap(GpuVa(va))) if va == free + PAGE_SIZE));
    let (client, default) = (driver.client(), SpaceId::DEFAULT);
    assert!(matches!(
        client.unmap(default, GpuVa(free), 3 * PAGE_SIZE),
        Err(GpuError::NotFound(_))
    ));
    client.unmap(default, GpuVa(free), 2 * PAGE_SIZE).unwrap();

    let good = ChannelSpec {
        engine: EngineKind::Copy,
        gpfifo: GpuVa(free),
        gpfifo_entries: 64,
        userd: guest(0),
        vector: 0,
        space: default,
        group: None,
        placement: Placement::default(),
        preamble: None,
    };
    for bad in [
        ChannelSpec { gpfifo: GpuVa(free + 4), ..good },
        ChannelSpec { gpfifo: GpuVa(1 << 41), ..good },
        ChannelSpec { gpfifo_entries: 63, ..good },
        ChannelSpec { gpfifo_entries: 0, ..good },
        ChannelSpec { gpfifo_entries: 1 << 17, ..good },
        ChannelSpec { userd: guest(8), ..good },
        ChannelSpec { userd: guest(RAM_BYTES), ..good },
        ChannelSpec { userd: no_memory, ..good },
        ChannelSpec { vector: 99, ..good },
        ChannelSpec { space: SpaceId(12345), ..good },
    ] {
        assert!(client.create_channel(&bad).is_err(), "{bad:?}");
    }
    assert!(client.destroy_space(default).is_err(), "the default address space always exists");
    assert!(client.destroy_space(SpaceId(12345)).is_err());
    let missing = client.destroy_channel(ChannelId(12345));
    assert!(matches!(missing, Err(GpuError::NotFound(_))));
    assert!(client.release(MemoryId(12345)).is_err());
    let limit = client.spec().max_channels;
    for _ in 0..limit {
        client.create_channel(&good).unwrap();
    }
    assert!(matches!(client.create_channel(&good), Err(GpuError::Limit(_))));
}
