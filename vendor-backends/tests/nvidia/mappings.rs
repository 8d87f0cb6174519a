//! Limits of mappings in the GPU's address space, and of imports.

use mdev_core::abi::mailbox::VA_START;
use std::os::fd::AsFd;

use mdev_core::gpu::{Adoption, Backing, Client, GpuError, GuestRam, MapRequest};
use mdev_core::ids::{GpuVa, SpaceId};
use mdev_core::units::{GIB, MIB, PAGE_SIZE};
use nvidia_rm::fake_rm::FakeRm;

use crate::{DRIVER, gpu, ram, spec, try_client};

#[test]
fn pieces_of_mappings_are_limited() {
    const MAX_MAPPINGS: u64 = 65_536;
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = try_client(&rm, &mut gpu, &spec(GIB)).unwrap();
    let vram = Backing::Vram { offset: 0 };
    client.map(&MapRequest::new(GpuVa(VA_START), GIB, vram)).unwrap();
    let page = |number: u64| GpuVa(VA_START + number * PAGE_SIZE);
    let mut pieces = 1;
    let refused = loop {
        match client.unmap(SpaceId::DEFAULT, page(2 * pieces - 1), PAGE_SIZE) {
            Ok(()) => pieces += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, GpuError::Limit(_)), "{refused}");
    assert_eq!(pieces, MAX_MAPPINGS);
    let more = MapRequest::new(GpuVa(VA_START + 2 * GIB), PAGE_SIZE, vram);
    assert!(client.map(&more).is_err());
    // A whole piece can go, and the end of another.
    client.unmap(SpaceId::DEFAULT, page(2), PAGE_SIZE).unwrap();
    client.unmap(SpaceId::DEFAULT, GpuVa(VA_START + GIB - PAGE_SIZE), PAGE_SIZE).unwrap();
    client.map(&more).unwrap();
}

/// A worker has a mapping for each import, and its anchor a descriptor.
#[test]
fn imports_are_limited() {
    const MAX_MAPPED: usize = 8192;
    const MAX_KEPT: usize = 1024;
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = try_client(&rm, &mut gpu, &spec(64 * MIB)).unwrap();
    let memory = ram(2 * PAGE_SIZE);
    let page =
        || GuestRam { fd: memory.fd.as_fd(), offset: PAGE_SIZE, len: PAGE_SIZE, writable: true };
    client.take_descriptors();
    let mut imports = Vec::new();
    let refused = loop {
        match client.import(page()) {
            Ok(import) => imports.push(import),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, GpuError::Limit(_)), "{refused}");
    assert_eq!(imports.len(), MAX_MAPPED);
    let kept = client.take_descriptors();
    assert_eq!(kept.iter().filter(|kept| kept.fd.is_some()).count(), MAX_KEPT);
    assert_eq!(client.position(), None, "no other worker has them all");
    for import in imports.split_off(MAX_KEPT) {
        client.release(import).unwrap();
    }
    client.import(page()).unwrap();
    for import in imports {
        client.release(import).unwrap();
    }
}
