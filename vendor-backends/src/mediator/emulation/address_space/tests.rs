//! Address spaces: mappings of every alignment against a model, and limits of page tables.

use std::collections::BTreeMap;

use ipc::mem::SharedMemory;
use mdev_core::abi::mailbox::{VA_END, VA_START};
use mdev_core::gpu::{Backing, CREATED_VA_END, MapRequest};
use mdev_core::ids::{GpuVa, MemoryId, SpaceId};
use mdev_core::units::MIB;
use proptest::prelude::*;

use super::page_table::{DIRECTORY, LARGE, ROOT};
use super::spaces::{MAX_CREATED, SPARE_TABLES, host_memory_bytes, max_tables};
use super::*;
use crate::mediator::wire::Refusal;

const PAGES: u64 = 3 * 512;
const DEFAULT: SpaceId = SpaceId::DEFAULT;

fn spaces() -> AddressSpaces {
    let vram = SharedMemory::new(c"test", PAGES * PAGE_SIZE).unwrap().mapping;
    AddressSpaces::new(Some(vram), 1 << 30)
}

fn vram(at: u64, len: u64, offset: u64) -> MapRequest {
    MapRequest::new(GpuVa(at), len, Backing::Vram { offset })
}

fn guest(at: u64, len: u64, memory: MemoryId) -> MapRequest {
    MapRequest::new(GpuVa(at), len, Backing::Guest { memory, offset: 0 })
}

fn load(spaces: &AddressSpaces, space: SpaceId, va: u64) -> Result<u32, MmuFault> {
    spaces.get(space).unwrap().load_u32(va)
}

#[test]
fn contiguous_pages_are_one_range() {
    let mut spaces = spaces();
    let va = VA_START + PAGE_SIZE;
    spaces.map(&vram(va, PAGES / 2 * PAGE_SIZE, PAGE_SIZE)).unwrap();
    let space = spaces.get(DEFAULT).unwrap();
    let range = space.resolve(va + 5, 2 * MIB, Access::Write).unwrap();
    assert_eq!((range.offset, range.len), (PAGE_SIZE + 5, 2 * MIB));
}

#[test]
fn unmapping_a_small_page_splits_a_large_page() {
    let mut spaces = spaces();
    spaces.map(&vram(VA_START, LARGE, 0)).unwrap();
    assert_eq!(spaces.tables.count(), 1, "one directory, no table");
    spaces.unmap(DEFAULT, GpuVa(VA_START + PAGE_SIZE), PAGE_SIZE).unwrap();
    let space = spaces.get(DEFAULT).unwrap();
    assert_eq!(space.load_u32(VA_START + PAGE_SIZE), Err(MmuFault(VA_START + PAGE_SIZE)));
    let range = space.resolve(VA_START + 2 * PAGE_SIZE, LARGE, Access::Read).unwrap();
    assert_eq!(range.len, LARGE - 2 * PAGE_SIZE);
}

#[test]
fn release_removes_all_mappings_of_the_memory() {
    let mut spaces = spaces();
    let ram = SharedMemory::new(c"guest", LARGE).unwrap().mapping;
    let id = spaces.import(ram.into()).unwrap();
    let other = spaces.create().unwrap();
    for at in [VA_START, VA_START + 4 * LARGE, VA_START + 9 * DIRECTORY + PAGE_SIZE] {
        spaces.map(&guest(at, LARGE, id)).unwrap();
        spaces.map(&guest(at, LARGE, id).in_space(other)).unwrap();
        spaces.map(&guest(at + 9 * ROOT, LARGE, id).in_space(other)).unwrap();
    }
    spaces.map(&vram(VA_START + LARGE, PAGE_SIZE, 0)).unwrap();
    spaces.release(id).unwrap();
    assert!(load(&spaces, DEFAULT, VA_START).is_err());
    assert!(load(&spaces, DEFAULT, VA_START + 9 * DIRECTORY + PAGE_SIZE).is_err());
    assert!(load(&spaces, other, VA_START).is_err());
    assert!(load(&spaces, other, VA_START + 9 * ROOT).is_err());
    assert!(load(&spaces, DEFAULT, VA_START + LARGE).is_ok());
    assert_eq!((spaces.imported_bytes(), spaces.tables.count()), (0, 2));
}

#[test]
fn page_tables_are_limited_and_rolled_back() {
    for created in [false, true] {
        let mut spaces = spaces();
        let space = if created { spaces.create().unwrap() } else { DEFAULT };
        let start = VA_START + if created { 5 * ROOT } else { 0 };
        let mut at = start;
        let error = loop {
            match spaces.map(&vram(at, 2 * PAGE_SIZE, 0).in_space(space)) {
                Ok(()) => at += DIRECTORY,
                Err(Refusal::VaRange) => at = at % DIRECTORY + start + LARGE,
                Err(error) => break error,
            }
        };
        assert_eq!(error, Refusal::PageTableLimit);
        assert_eq!(load(&spaces, space, at), Err(MmuFault(at)));
        assert!(spaces.tables.count() <= spaces.max_tables);
        let more = spaces.create().unwrap();
        let refused = spaces.map(&vram(start, PAGE_SIZE, 0).in_space(more));
        assert_eq!(refused, Err(Refusal::PageTableLimit), "one limit for all address spaces");
        drop(spaces.clear());
        assert_eq!(spaces.tables.count(), 0);
        assert!(spaces.get(more).is_none());
    }
}

#[test]
fn the_limit_of_page_tables_follows_the_imported_memory() {
    let mut spaces = spaces();
    let least = spaces.max_tables;
    assert_eq!(least, 2 * PAGES * PAGE_SIZE / LARGE + SPARE_TABLES, "without what may be imported");
    let ram = SharedMemory::new(c"guest", 8 * LARGE).unwrap().mapping;
    let id = spaces.import(ram.into()).unwrap();
    assert_eq!(spaces.max_tables, least + 16);
    let pages = (0..).map(|n| VA_START + n * LARGE);
    let map = |spaces: &mut AddressSpaces, at| spaces.map(&vram(at, PAGE_SIZE, 0));
    let mapped = pages.take_while(|at| map(&mut spaces, *at).is_ok()).count();
    spaces.release(id).unwrap();
    assert_eq!(spaces.max_tables, least);
    assert!(spaces.tables.count() > least, "existing tables stay: {mapped} pages");
    assert!(load(&spaces, DEFAULT, VA_START + (mapped as u64 - 1) * LARGE).is_ok());
    let next = VA_START + mapped as u64 * LARGE;
    assert_eq!(map(&mut spaces, next), Err(Refusal::PageTableLimit));
    spaces.unmap(DEFAULT, GpuVa(VA_START), PAGE_SIZE).unwrap();
    let sparse = SharedMemory::new(c"sparse", 1 << 30).unwrap().mapping;
    spaces.import(sparse.into()).unwrap();
    assert!(spaces.max_tables <= max_tables(PAGES * PAGE_SIZE, host_memory_bytes()));
}

#[test]
fn created_address_spaces_are_limited_and_have_47_bits() {
    let mut spaces = spaces();
    let space = spaces.create().unwrap();
    for at in [PAGE_SIZE, VA_START, VA_END - PAGE_SIZE, VA_END, CREATED_VA_END - PAGE_SIZE] {
        spaces.map(&vram(at, PAGE_SIZE, 0).in_space(space)).unwrap();
        assert!(load(&spaces, space, at).is_ok(), "{at:#x}");
        assert!(load(&spaces, DEFAULT, at).is_err(), "{at:#x}");
    }
    for at in [0, CREATED_VA_END, !0xfff] {
        let refused = spaces.map(&vram(at, PAGE_SIZE, 0).in_space(space));
        assert_eq!(refused, Err(Refusal::VaRange), "{at:#x}");
        assert!(load(&spaces, space, at).is_err(), "{at:#x}");
    }
    assert_eq!(spaces.map(&vram(VA_END, PAGE_SIZE, 0)), Err(Refusal::VaRange));
    for _ in 1..MAX_CREATED {
        spaces.create().unwrap();
    }
    assert_eq!(spaces.create(), Err(Refusal::SpaceLimit));
    spaces.destroy(space).unwrap();
    assert_eq!(spaces.tables.count(), 0);
    assert_eq!(spaces.destroy(space).err(), Some(Refusal::NoSpace));
    assert_eq!(spaces.map(&vram(VA_START, PAGE_SIZE, 0).in_space(space)), Err(Refusal::NoSpace));
    assert_ne!(spaces.create().unwrap(), space, "ids are not reused");
    assert_eq!(spaces.destroy(DEFAULT).err(), Some(Refusal::NoSpace));
}

#[derive(Clone, Debug)]
enum Op {
    Map { at: u64, pages: u64, offset: u64, writable: bool },
    Unmap { at: u64, pages: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    // Page numbers around the end of a directory, and lengths and offsets that often allow large
    // pages.
    let at = prop_oneof![0..2048u64, (0..4u64).prop_map(|n| n * 512)];
    let pages = prop_oneof![1..8u64, 1..1100u64, Just(512), Just(1024)];
    let offset = prop_oneof![0..PAGES, (0..3u64).prop_map(|n| n * 512)];
    prop_oneof![
        (at.clone(), pages.clone(), offset, any::<bool>())
            .prop_map(|(at, pages, offset, writable)| Op::Map { at, pages, offset, writable }),
        (at, pages).prop_map(|(at, pages)| Op::Unmap { at, pages }),
    ]
}

/// An operation and the address space to which it applies.
fn ops() -> impl Strategy<Value = Vec<(Op, usize)>> {
    proptest::collection::vec((op(), 0..3_usize), 1..60)
}

proptest! {
    #[test]
    fn each_address_space_behaves_like_a_map_of_pages(ops in ops()) {
        let mut spaces = spaces();
        // At the end of a directory, at the end of a root, and high up.
        let tested = [
            (DEFAULT, VA_START + DIRECTORY),
            (spaces.create().unwrap(), ROOT),
            (spaces.create().unwrap(), 0x7f12_0000_0000),
        ];
        let tested = tested.map(|(space, end)| (space, end - 1024 * PAGE_SIZE));
        let mut models: [BTreeMap<u64, (u64, bool)>; 3] = Default::default();
        for (op, index) in ops {
            let ((space, base), model) = (tested[index], &mut models[index]);
            match op {
                Op::Map { at, pages, offset, writable } => {
                    let request = vram(base + at * PAGE_SIZE, pages * PAGE_SIZE, offset * PAGE_SIZE);
                    let got = spaces.map(&MapRequest { writable, space, ..request });
                    let mapped = model.range(at..at + pages).next().map(|(at, _)| *at);
                    let want = match mapped {
                        _ if offset + pages > PAGES => Err(Refusal::Backing),
                        Some(page) => Err(Refusal::Overlap(GpuVa(base + page * PAGE_SIZE))),
                        None => Ok(()),
                    };
                    prop_assert_eq!(got, want);
                    if want.is_ok() {
                        model.extend((0..pages).map(|n| (at + n, (offset + n, writable))));
                    }
                }
                Op::Unmap { at, pages } => {
                    let va = GpuVa(base + at * PAGE_SIZE);
                    let got = spaces.unmap(space, va, pages * PAGE_SIZE);
                    let whole = model.range(at..at + pages).count() as u64 == pages;
                    prop_assert_eq!(got.is_ok(), whole);
                    if whole {
                        model.retain(|page, _| !(at..at + pages).contains(page));
                    }
                }
            }
        }
        for ((space, base), model) in tested.into_iter().zip(&models) {
            let view = spaces.get(space).unwrap();
            for page in 0..3200 {
                let va = base + page * PAGE_SIZE;
                let read = view.resolve(va, 1, Access::Read).map(|range| range.offset);
                let write = view.resolve(va, 1, Access::Write).map(|range| range.offset);
                let want = model.get(&page);
                let offset = want.map(|(offset, _)| offset * PAGE_SIZE).ok_or(MmuFault(va));
                prop_assert_eq!(read, offset);
                prop_assert_eq!(write.is_ok(), want.is_some_and(|(_, writable)| *writable));
            }
        }
        for (model, (space, base)) in models.iter().zip(tested) {
            for page in model.keys() {
                spaces.unmap(space, GpuVa(base + page * PAGE_SIZE), PAGE_SIZE).unwrap();
            }
        }
        prop_assert_eq!(spaces.tables.count(), 0, "no table is kept without a mapping");
    }
}
