//! Checks of several address spaces and of groups of channels. A backend may refuse both.

use mdev_core::abi::{copy, host, notifier};
use mdev_core::gpu::{
    Backing, CREATED_VA_END, ChannelSpec, EngineKind, GpuError, MapRequest, Placement,
};
use mdev_core::ids::{GpuVa, MemoryId, SpaceId};
use mdev_core::units::{MIB, PAGE_SIZE};

use super::driver::{DATA, Driver, Pushbuffer, RAM_BYTES, Ring};

/// Address that is mapped to different memory in each address space.
const SHARED: u64 = 0x7f00_0000_0000;

/// Creates an address space with the guest's memory at its usual address. Returns `None` if the
/// backend has only one.
fn create(driver: &mut Driver) -> Option<SpaceId> {
    let space = match driver.client().create_space() {
        Err(GpuError::Unsupported(_)) => return None,
        space => space.unwrap(),
    };
    let (va, memory) = (GpuVa(driver.va(0)), driver.memory());
    let ram = MapRequest::new(va, RAM_BYTES, Backing::Guest { memory, offset: 0 });
    driver.client().map(&ram.in_space(space)).unwrap();
    Some(space)
}

fn ring(driver: &mut Driver, space: SpaceId) -> Ring {
    let mut ring = driver.ring_in(EngineKind::Copy, space, None);
    driver.finish(&mut ring, bind());
    ring
}

fn bind() -> Pushbuffer {
    Pushbuffer::default().copy_method(host::SET_OBJECT, &[copy::CLASS])
}

/// Checks that a channel reaches only the memory of its own address space.
pub(super) fn separation(driver: &mut Driver) {
    let Some(first) = create(driver) else { return };
    let second = create(driver).unwrap();
    let len = PAGE_SIZE as u32;
    let mut memories = Vec::new();
    for (space, value) in [(first, 1_u8), (second, 2)] {
        let (ram, memory) = driver.import(MIB);
        ram.mapping.write(0, &[value; PAGE_SIZE as usize]).unwrap();
        map(driver, space, SHARED, memory);
        // At an address of its own.
        map(driver, space, CREATED_VA_END - u64::from(value) * MIB, memory);
        memories.push((ram, memory));
    }
    for (space, value) in [(first, 1_u8), (second, 2)] {
        let mut ring = ring(driver, space);
        let to = driver.va(DATA);
        for from in [SHARED, CREATED_VA_END - u64::from(value) * MIB] {
            driver.write(DATA, &[0; PAGE_SIZE as usize]);
            driver.finish(&mut ring, Pushbuffer::default().copy(from, to, len));
            assert_eq!(driver.read(DATA, PAGE_SIZE as usize), [value; PAGE_SIZE as usize]);
        }
        // The other's address.
        let other = CREATED_VA_END - u64::from(3 - value) * MIB;
        driver.submit(&mut ring, Pushbuffer::default().copy(to, other, len));
        assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT);
        driver.destroy(ring);
    }
    let mut ring = driver.ring(EngineKind::Copy);
    let push = Pushbuffer::default().copy(driver.va(DATA), SHARED, len);
    driver.submit(&mut ring, push);
    assert_eq!(driver.expect_fault(&ring).error, notifier::MMU_FAULT, "the default address space");
    for (index, (ram, memory)) in memories.into_iter().enumerate() {
        let mut byte = [0];
        ram.mapping.read(0, &mut byte).unwrap();
        assert_eq!(usize::from(byte[0]), index + 1, "not written");
        driver.client().release(memory).unwrap();
    }
    for space in [first, second] {
        let unmapped = driver.client().unmap(space, GpuVa(SHARED), PAGE_SIZE);
        assert!(matches!(unmapped, Err(GpuError::NotFound(_))), "a release unmaps everywhere");
    }
}

fn map(driver: &mut Driver, space: SpaceId, va: u64, memory: MemoryId) {
    let backing = Backing::Guest { memory, offset: 0 };
    driver.client().map(&MapRequest::new(GpuVa(va), MIB, backing).in_space(space)).unwrap();
}

/// Checks that an address space takes its channels along, and a reset all created ones.
pub(super) fn destruction(driver: &mut Driver) {
    let Some(space) = create(driver) else { return };
    let mut kept = driver.ring(EngineKind::Copy);
    let gone = ring(driver, space);
    driver.client().destroy_space(space).unwrap();
    let status = driver.client().query_channel(gone.id());
    assert!(matches!(status, Err(GpuError::NotFound(_))), "{status:?}");
    driver.finish(&mut kept, Pushbuffer::default());
    assert!(matches!(driver.client().destroy_space(space), Err(GpuError::NotFound(_))));
    let memory = driver.memory();
    let request = MapRequest::new(GpuVa(SHARED), MIB, Backing::Guest { memory, offset: 0 });
    assert!(driver.client().map(&request.in_space(space)).is_err());

    let reset = create(driver).unwrap();
    assert_ne!(reset, space);
    driver.client().reset().unwrap();
    assert!(matches!(driver.client().destroy_space(reset), Err(GpuError::NotFound(_))));
    driver.map_ram();

    let limit = (0..=1024).find_map(|_| driver.client().create_space().err());
    assert!(matches!(limit, Some(GpuError::Limit(_))), "{limit:?}");
}

/// Checks that channels of a group work, and share an engine and an address space.
pub(super) fn groups(driver: &mut Driver) {
    let Some(space) = create(driver) else { return };
    let mut first = driver.ring_in(EngineKind::Copy, space, Some(7));
    let mut second = driver.ring_in(EngineKind::Copy, space, Some(7));
    driver.finish(&mut second, bind());
    driver.finish(&mut first, bind());
    let userd = Backing::Guest { memory: driver.memory(), offset: 0 };
    let spec = ChannelSpec {
        engine: EngineKind::Copy,
        gpfifo: GpuVa(driver.va(0)),
        gpfifo_entries: 64,
        userd,
        vector: 0,
        space: SpaceId::DEFAULT,
        group: Some(7),
        placement: Placement::default(),
        preamble: None,
    };
    let refused = driver.client().create_channel(&spec);
    assert!(matches!(refused, Err(GpuError::Invalid(_))), "{refused:?}");
    driver.client().create_channel(&ChannelSpec { group: Some(8), ..spec }).unwrap();
}
