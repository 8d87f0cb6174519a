//! Address spaces: mappings of every alignment against a model, and limits of page tables.

use std::collections::BTreeMap;

use mdev_core::units::MIB;
use proptest::prelude::*;

use super::page_table::DIRECTORY;
use super::*;
use crate::mem::SharedMemory;

const PAGES: u64 = 3 * 512;

fn space() -> AddressSpace {
    let vram = SharedMemory::new(c"test", PAGES * PAGE_SIZE).unwrap().mapping;
    AddressSpace::new(Some(vram), 1 << 30)
}

#[test]
fn contiguous_pages_are_one_range() {
    let mut space = space();
    let va = GpuVa(VA_START + PAGE_SIZE);
    space.map(va, PAGES / 2 * PAGE_SIZE, Slot::VRAM, PAGE_SIZE, true).unwrap();
    let range = space.resolve(va.0 + 5, 2 * MIB, Access::Write).unwrap();
    assert_eq!((range.offset, range.len), (PAGE_SIZE + 5, 2 * MIB));
}

#[test]
fn unmapping_a_small_page_splits_a_large_page() {
    let mut space = space();
    space.map(GpuVa(VA_START), LARGE, Slot::VRAM, 0, true).unwrap();
    assert_eq!(space.tables.count(), 1, "one directory, no table");
    space.unmap(GpuVa(VA_START + PAGE_SIZE), PAGE_SIZE).unwrap();
    assert_eq!(space.load_u32(VA_START + PAGE_SIZE), Err(MmuFault(VA_START + PAGE_SIZE)));
    let range = space.resolve(VA_START + 2 * PAGE_SIZE, LARGE, Access::Read).unwrap();
    assert_eq!(range.len, LARGE - 2 * PAGE_SIZE);
}

#[test]
fn release_removes_all_mappings_of_the_memory() {
    let mut space = space();
    let guest = SharedMemory::new(c"guest", LARGE).unwrap().mapping;
    let id = space.import(guest.into()).unwrap();
    let slot = space.memory(id).unwrap().0;
    for at in [VA_START, VA_START + 4 * LARGE, VA_START + 9 * DIRECTORY + PAGE_SIZE] {
        space.map(GpuVa(at), LARGE, slot, 0, true).unwrap();
    }
    space.map(GpuVa(VA_START + LARGE), PAGE_SIZE, Slot::VRAM, 0, true).unwrap();
    space.release(id).unwrap();
    assert!(space.load_u32(VA_START).is_err());
    assert!(space.load_u32(VA_START + 9 * DIRECTORY + PAGE_SIZE).is_err());
    assert!(space.load_u32(VA_START + LARGE).is_ok());
    assert_eq!((space.imported_bytes(), space.tables.count()), (0, 2));
}

#[test]
fn page_tables_are_limited_and_rolled_back() {
    let mut space = space();
    let mut at = VA_START;
    let error = loop {
        match space.map(GpuVa(at), 2 * PAGE_SIZE, Slot::VRAM, 0, false) {
            Ok(()) => at += DIRECTORY,
            Err(Refusal::VaRange) => at = at % DIRECTORY + VA_START + LARGE,
            Err(error) => break error,
        }
    };
    assert_eq!(error, Refusal::PageTableLimit);
    assert_eq!(space.load_u32(at), Err(MmuFault(at)));
    assert!(space.tables.count() <= space.tables.max_count());
    drop(space.unmap_all());
    assert_eq!(space.tables.count(), 0);
}

#[test]
fn the_limit_of_page_tables_follows_the_imported_memory() {
    let mut space = space();
    let least = space.tables.max_count();
    assert_eq!(least, 2 * PAGES * PAGE_SIZE / LARGE + SPARE_TABLES, "without what may be imported");
    let guest = SharedMemory::new(c"guest", 8 * LARGE).unwrap().mapping;
    let id = space.import(guest.into()).unwrap();
    assert_eq!(space.tables.max_count(), least + 16);
    let pages = (0..).map(|n| VA_START + n * LARGE);
    let map = |space: &mut AddressSpace, at| space.map(GpuVa(at), PAGE_SIZE, Slot::VRAM, 0, false);
    let mapped = pages.take_while(|at| map(&mut space, *at).is_ok()).count();
    space.release(id).unwrap();
    assert_eq!(space.tables.max_count(), least);
    assert!(space.tables.count() > least, "existing tables stay: {mapped} pages");
    assert!(space.load_u32(VA_START + (mapped as u64 - 1) * LARGE).is_ok());
    let next = VA_START + mapped as u64 * LARGE;
    assert_eq!(map(&mut space, next), Err(Refusal::PageTableLimit));
    space.unmap(GpuVa(VA_START), PAGE_SIZE).unwrap();
    let sparse = SharedMemory::new(c"sparse", 1 << 30).unwrap().mapping;
    space.import(sparse.into()).unwrap();
    assert!(space.tables.max_count() <= max_tables(PAGES * PAGE_SIZE, host_memory_bytes()));
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

proptest! {
    #[test]
    fn behaves_like_a_map_of_pages(ops in proptest::collection::vec(op(), 1..40)) {
        let base = VA_START + DIRECTORY - 1024 * PAGE_SIZE;
        let mut space = space();
        let mut model = BTreeMap::<u64, (u64, bool)>::new();
        for op in ops {
            match op {
                Op::Map { at, pages, offset, writable } => {
                    let got = space.map(
                        GpuVa(base + at * PAGE_SIZE), pages * PAGE_SIZE,
                        Slot::VRAM, offset * PAGE_SIZE, writable,
                    );
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
                    let got = space.unmap(GpuVa(base + at * PAGE_SIZE), pages * PAGE_SIZE);
                    let whole = model.range(at..at + pages).count() as u64 == pages;
                    prop_assert_eq!(got.is_ok(), whole);
                    if whole {
                        model.retain(|page, _| !(at..at + pages).contains(page));
                    }
                }
            }
        }
        for page in 0..3200 {
            let va = base + page * PAGE_SIZE;
            let read = space.resolve(va, 1, Access::Read).map(|range| range.offset);
            let write = space.resolve(va, 1, Access::Write).map(|range| range.offset);
            let want = model.get(&page);
            let offset = want.map(|(offset, _)| offset * PAGE_SIZE).ok_or(MmuFault(va));
            prop_assert_eq!(read, offset);
            prop_assert_eq!(write.is_ok(), want.is_some_and(|(_, writable)| *writable));
        }
        drop(space.unmap_all());
        prop_assert_eq!(space.tables.count(), 0);
    }
}
