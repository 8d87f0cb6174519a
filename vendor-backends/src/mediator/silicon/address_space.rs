//! A vGPU's GPU virtual address space: 40 bits, page tables of 4 KiB and 2 MiB pages, and the memory behind them.
//!
//! ```text
//! bits 39:30 root (1024) ─► bits 29:21 directory (512: empty, one 2 MiB page, or) ─► bits 20:12 table (512 pages)
//! ```
//!
//! The tables are written by control requests and read by the engine, each while it holds the vGPU's lock.

use std::sync::Arc;

use mdev_core::abi::mailbox::{VA_END, VA_START};
use mdev_core::ids::{GpuVa, MemoryId};
use mdev_core::units::{MIB, PAGE_SIZE, is_aligned};

use crate::mediator::hardware::Attachment;
use crate::mediator::wire::Refusal;
use crate::mem::Mapping;

/// The large page.
const LARGE: u64 = 2 * MIB;
/// What a directory covers.
const DIRECTORY: u64 = 512 * LARGE;
/// Most imports at a time.
const MAX_MEMORIES: usize = 256;
/// Tables that any vGPU may have besides those that its memory needs.
const SPARE_TABLES: u64 = 1024;

/// An address that is not mapped, or not so that it may be accessed in that way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmuFault(pub u64);

/// How memory is about to be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read.
    Read,
    /// Written, or read and written.
    Write,
}

/// Which memory is behind a mapping: slot 0 is video memory, slot n+1 the import with id n.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(u16);

impl Slot {
    /// Video memory.
    pub const VRAM: Self = Self(0);
}

/// Memory that an address space may map.
#[derive(Debug)]
pub struct Memory {
    /// How the device reaches it, where it does so by itself. Ends before the mapping.
    pub attachment: Option<Attachment>,
    /// How this process does.
    pub mapping: Arc<Mapping>,
}

impl From<Arc<Mapping>> for Memory {
    fn from(mapping: Arc<Mapping>) -> Self {
        Self { attachment: None, mapping }
    }
}

/// Contiguous memory behind an address.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// What it is in.
    pub mapping: &'a Mapping,
    /// Byte offset into it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Where the device sees the first of them, where it does.
    pub bus: Option<u64>,
}

/// A page table entry: valid, writable, slot, page number in the slot's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pte(u64);

impl Pte {
    fn new(slot: Slot, offset: u64, writable: bool) -> Self {
        Self(1 | u64::from(writable) << 1 | u64::from(slot.0) << 2 | (offset / PAGE_SIZE) << 18)
    }

    fn valid(self) -> bool {
        self.0 & 1 != 0
    }

    fn allows(self, access: Access) -> bool {
        self.valid() && (access == Access::Read || self.0 & 2 != 0)
    }

    fn slot(self) -> Slot {
        Slot((self.0 >> 2) as u16)
    }

    fn offset(self) -> u64 {
        (self.0 >> 18) * PAGE_SIZE
    }

    /// The entry of the `index`th small page of this large one.
    fn part(self, index: usize) -> Self {
        Self(self.0 + ((index as u64) << 18))
    }
}

#[derive(Debug)]
struct Table {
    pages: [Pte; 512],
    used: u16,
}

impl Table {
    fn empty() -> Box<Self> {
        Box::new(Self { pages: [Pte(0); 512], used: 0 })
    }
}

#[derive(Debug, Default)]
enum Entry {
    #[default]
    Empty,
    Large(Pte),
    Table(Box<Table>),
}

#[derive(Debug)]
struct Directory {
    entries: Vec<Entry>,
    used: u16,
}

/// One address space and the memory that it may map.
#[derive(Debug)]
pub struct AddressSpace {
    root: Vec<Option<Box<Directory>>>,
    memories: Vec<Option<Memory>>,
    imported: u64,
    max_import: u64,
    tables: u64,
    max_tables: u64,
}

impl AddressSpace {
    /// An empty one over a partition of video memory, where there is one.
    pub fn new(vram: Option<Arc<Mapping>>, max_import: u64) -> Self {
        let vram_bytes = vram.as_ref().map_or(0, |vram| vram.len());
        let pages = vram_bytes.saturating_add(max_import) / LARGE;
        Self {
            root: (0..VA_END / DIRECTORY).map(|_| None).collect(),
            memories: vec![vram.map(Memory::from)],
            imported: 0,
            max_import,
            tables: 0,
            max_tables: pages.saturating_mul(2).saturating_add(SPARE_TABLES),
        }
    }

    /// Bytes of guest memory imported.
    pub fn imported(&self) -> u64 {
        self.imported
    }

    /// Bytes that may still be imported.
    pub fn import_room(&self) -> u64 {
        self.max_import - self.imported
    }

    /// Adds guest memory.
    pub fn import(&mut self, memory: Memory) -> Result<MemoryId, Refusal> {
        let len = memory.mapping.len();
        if len > self.import_room() {
            return Err(Refusal::ImportLimit);
        }
        let free = self.memories.iter().skip(1).position(Option::is_none);
        let id = free.unwrap_or(self.memories.len() - 1);
        if id >= MAX_MEMORIES {
            return Err(Refusal::ImportLimit);
        }
        self.imported += len;
        if id + 1 == self.memories.len() {
            self.memories.push(None);
        }
        self.memories[id + 1] = Some(memory);
        Ok(MemoryId(id as u32))
    }

    /// Removes guest memory and every mapping of it. The caller drops it, best without the lock.
    pub fn release(&mut self, id: MemoryId) -> Result<Memory, Refusal> {
        let slot = Self::slot_of(id).ok_or(Refusal::NoMemory)?;
        let memory = self.memories.get_mut(usize::from(slot.0)).and_then(Option::take);
        let memory = memory.ok_or(Refusal::NoMemory)?;
        self.imported -= memory.mapping.len();
        self.retain(|pte| pte.slot() != slot);
        Ok(memory)
    }

    /// The slot that an id names, and its memory.
    pub fn memory(&self, id: MemoryId) -> Result<(Slot, &Arc<Mapping>), Refusal> {
        let slot = Self::slot_of(id).ok_or(Refusal::NoMemory)?;
        let memory = self.memories.get(usize::from(slot.0)).and_then(Option::as_ref);
        memory.map(|memory| (slot, &memory.mapping)).ok_or(Refusal::NoMemory)
    }

    /// Video memory.
    pub fn vram(&self) -> Result<(Slot, &Arc<Mapping>), Refusal> {
        let vram = self.memories[0].as_ref().ok_or(Refusal::NoMemory)?;
        Ok((Slot::VRAM, &vram.mapping))
    }

    fn slot_of(id: MemoryId) -> Option<Slot> {
        u16::try_from(id.0).ok()?.checked_add(1).map(Slot)
    }

    /// Maps `len` bytes of a memory from `offset` at `va`. Where it fails nothing has changed.
    pub fn map(
        &mut self,
        va: GpuVa,
        len: u64,
        slot: Slot,
        offset: u64,
        writable: bool,
    ) -> Result<(), Refusal> {
        let range = check_range(va, len)?;
        let memory = self.memories.get(usize::from(slot.0)).and_then(Option::as_ref);
        let memory = memory.ok_or(Refusal::NoMemory)?;
        if !is_aligned(offset, PAGE_SIZE) {
            return Err(Refusal::Alignment);
        }
        if offset.checked_add(len).is_none_or(|end| end > memory.mapping.len()) {
            return Err(Refusal::Backing);
        }
        if writable && !memory.mapping.writable() {
            return Err(Refusal::ReadOnly);
        }
        if let Some(taken) = self.first_mapped(range.clone()) {
            return Err(Refusal::Overlap(GpuVa(taken)));
        }
        let mut at = range.start;
        while at < range.end {
            let pte = Pte::new(slot, offset + (at - range.start), writable);
            let Some(mapped) = self.map_one(at, range.end - at, pte) else {
                self.clear(range.start..at);
                return Err(Refusal::PageTableLimit);
            };
            at += mapped;
        }
        Ok(())
    }

    /// Maps one page of the largest size that fits, and says how large; `None` where tables are used up.
    fn map_one(&mut self, at: u64, left: u64, pte: Pte) -> Option<u64> {
        let room = self.max_tables - self.tables;
        let root = &mut self.root[(at / DIRECTORY) as usize];
        let mut made = u64::from(root.is_none());
        if made > room {
            return None;
        }
        let large = left >= LARGE && is_aligned(at, LARGE) && is_aligned(pte.offset(), LARGE);
        let directory = root.get_or_insert_with(|| {
            Box::new(Directory { entries: (0..512).map(|_| Entry::Empty).collect(), used: 0 })
        });
        self.tables += made;
        let entry = &mut directory.entries[directory_index(at)];
        if matches!(entry, Entry::Empty) {
            if large {
                *entry = Entry::Large(pte);
                directory.used += 1;
                return Some(LARGE);
            }
            made += 1;
            if made > room {
                self.free_if_empty(at);
                return None;
            }
            *entry = Entry::Table(Table::empty());
            directory.used += 1;
            self.tables += 1;
        }
        if let Entry::Table(table) = entry {
            // Fill the whole table in one go: a large guest buffer that is not aligned has many small pages.
            let first = table_index(at);
            let pages = (left / PAGE_SIZE).min(512 - first as u64) as usize;
            for (index, page) in table.pages[first..first + pages].iter_mut().enumerate() {
                *page = pte.part(index);
            }
            table.used += pages as u16;
            return Some(pages as u64 * PAGE_SIZE);
        }
        None
    }

    /// Unmaps a range, all of which must be mapped; else nothing changes.
    pub fn unmap(&mut self, va: GpuVa, len: u64) -> Result<(), Refusal> {
        let range = check_range(va, len)?;
        let mut at = range.start;
        let mut splits = 0;
        while at < range.end {
            let end = ((at / LARGE + 1) * LARGE).min(range.end);
            match self.entry(at) {
                Entry::Large(_) => splits += u64::from(end - at < LARGE),
                Entry::Table(table) => {
                    let first = table_index(at);
                    let last = first + ((end - at) / PAGE_SIZE) as usize;
                    if table.pages[first..last].iter().any(|page| !page.valid()) {
                        return Err(Refusal::NoMapping);
                    }
                }
                Entry::Empty => return Err(Refusal::NoMapping),
            }
            at = end;
        }
        if splits > self.max_tables - self.tables {
            return Err(Refusal::PageTableLimit);
        }
        self.clear(range);
        Ok(())
    }

    /// Unmaps everything.
    pub fn unmap_all(&mut self) {
        self.root.iter_mut().for_each(|directory| *directory = None);
        self.tables = 0;
    }

    /// Whether a guest has taken memory away behind our back.
    pub fn poisoned(&self) -> bool {
        self.memories.iter().flatten().any(|memory| memory.mapping.poisoned())
    }

    /// Memory behind `va`, as much of `len` as is contiguous.
    pub fn resolve(&self, va: u64, len: u64, access: Access) -> Result<Piece<'_>, MmuFault> {
        let (first, mut covered) = self.translate(va, access).ok_or(MmuFault(va))?;
        let start = first.offset() + va % PAGE_SIZE;
        while covered < len {
            match self.translate(va + covered, access) {
                Some((next, more))
                    if next.slot() == first.slot() && next.offset() == start + covered =>
                {
                    covered += more;
                }
                _ => break,
            }
        }
        let memory = self.memories[usize::from(first.slot().0)].as_ref().ok_or(MmuFault(va))?;
        let bus = memory.attachment.as_ref().map(|attached| attached.address + start);
        Ok(Piece { mapping: &memory.mapping, offset: start, len: covered.min(len), bus })
    }

    /// The small page at `va`, and bytes from `va` to the end of the page, large or small, that it is part of.
    fn translate(&self, va: u64, access: Access) -> Option<(Pte, u64)> {
        let directory = self.root.get((va / DIRECTORY) as usize)?.as_ref()?;
        let (pte, left) = match &directory.entries[directory_index(va)] {
            Entry::Empty => return None,
            Entry::Large(pte) => (pte.part(table_index(va)), LARGE - va % LARGE),
            Entry::Table(table) => (table.pages[table_index(va)], PAGE_SIZE - va % PAGE_SIZE),
        };
        pte.allows(access).then_some((pte, left))
    }

    /// Copies bytes out.
    pub fn read(&self, va: u64, out: &mut [u8]) -> Result<(), MmuFault> {
        let mut done = 0;
        while done < out.len() {
            let at = va.checked_add(done as u64).ok_or(MmuFault(va))?;
            let piece = self.resolve(at, (out.len() - done) as u64, Access::Read)?;
            let end = done + piece.len as usize;
            piece.mapping.read(piece.offset, &mut out[done..end]).ok_or(MmuFault(at))?;
            done = end;
        }
        Ok(())
    }

    /// Copies bytes in.
    pub fn write(&self, va: u64, bytes: &[u8]) -> Result<(), MmuFault> {
        let mut done = 0;
        while done < bytes.len() {
            let at = va.checked_add(done as u64).ok_or(MmuFault(va))?;
            let piece = self.resolve(at, (bytes.len() - done) as u64, Access::Write)?;
            let end = done + piece.len as usize;
            piece.mapping.write(piece.offset, &bytes[done..end]).ok_or(MmuFault(at))?;
            done = end;
        }
        Ok(())
    }

    /// Reads an aligned 32-bit word.
    pub fn load_u32(&self, va: u64) -> Result<u32, MmuFault> {
        let piece = self.resolve(va, 4, Access::Read)?;
        piece.mapping.load_u32(piece.offset).ok_or(MmuFault(va))
    }

    /// Reads an aligned 64-bit word.
    pub fn load_u64(&self, va: u64) -> Result<u64, MmuFault> {
        let piece = self.resolve(va, 8, Access::Read)?;
        piece.mapping.load_u64(piece.offset).ok_or(MmuFault(va))
    }

    /// Writes an aligned 32-bit word, after everything that was written before.
    pub fn store_u32(&self, va: u64, value: u32) -> Result<(), MmuFault> {
        let piece = self.resolve(va, 4, Access::Write)?;
        piece.mapping.store_u32(piece.offset, value).ok_or(MmuFault(va))
    }

    /// Writes an aligned 64-bit word, after everything that was written before.
    pub fn store_u64(&self, va: u64, value: u64) -> Result<(), MmuFault> {
        let piece = self.resolve(va, 8, Access::Write)?;
        piece.mapping.store_u64(piece.offset, value).ok_or(MmuFault(va))
    }

    /// Adds to an aligned 32-bit word.
    pub fn add_u32(&self, va: u64, value: u32) -> Result<u32, MmuFault> {
        let piece = self.resolve(va, 4, Access::Write)?;
        piece.mapping.add_u32(piece.offset, value).ok_or(MmuFault(va))
    }

    fn entry(&self, at: u64) -> &Entry {
        let directory = self.root[(at / DIRECTORY) as usize].as_ref();
        directory.map_or(&Entry::Empty, |directory| &directory.entries[directory_index(at)])
    }

    fn first_mapped(&self, range: std::ops::Range<u64>) -> Option<u64> {
        let mut at = range.start;
        while at < range.end {
            let end = ((at / LARGE + 1) * LARGE).min(range.end);
            match self.entry(at) {
                Entry::Empty => {}
                Entry::Large(_) => return Some(at),
                Entry::Table(table) => {
                    let first = table_index(at);
                    let last = first + ((end - at) / PAGE_SIZE) as usize;
                    let taken = table.pages[first..last].iter().position(|page| page.valid());
                    if let Some(index) = taken {
                        return Some(at + index as u64 * PAGE_SIZE);
                    }
                }
            }
            at = end;
        }
        None
    }

    /// Unmaps what is mapped in a range.
    fn clear(&mut self, range: std::ops::Range<u64>) {
        let mut at = range.start;
        while at < range.end {
            let end = ((at / LARGE + 1) * LARGE).min(range.end);
            if let Some(directory) = &mut self.root[(at / DIRECTORY) as usize] {
                let entry = &mut directory.entries[directory_index(at)];
                if let Entry::Large(pte) = *entry
                    && end - at < LARGE
                {
                    let mut table = Table::empty();
                    table.used = 512;
                    for (index, page) in table.pages.iter_mut().enumerate() {
                        *page = pte.part(index);
                    }
                    *entry = Entry::Table(table);
                    self.tables += 1;
                }
                match entry {
                    Entry::Empty => {}
                    Entry::Large(_) => {
                        *entry = Entry::Empty;
                        directory.used -= 1;
                    }
                    Entry::Table(table) => {
                        let first = table_index(at);
                        let last = first + ((end - at) / PAGE_SIZE) as usize;
                        for page in &mut table.pages[first..last] {
                            table.used -= u16::from(page.valid());
                            *page = Pte(0);
                        }
                        if table.used == 0 {
                            *entry = Entry::Empty;
                            directory.used -= 1;
                            self.tables -= 1;
                        }
                    }
                }
            }
            self.free_if_empty(at);
            at = end;
        }
    }

    fn free_if_empty(&mut self, at: u64) {
        let root = &mut self.root[(at / DIRECTORY) as usize];
        if root.as_ref().is_some_and(|directory| directory.used == 0) {
            *root = None;
            self.tables -= 1;
        }
    }

    /// Unmaps every page for which `keep` is false.
    fn retain(&mut self, keep: impl Fn(Pte) -> bool) {
        for root in &mut self.root {
            let Some(directory) = root else { continue };
            for entry in &mut directory.entries {
                match entry {
                    Entry::Large(pte) if !keep(*pte) => {
                        *entry = Entry::Empty;
                        directory.used -= 1;
                    }
                    Entry::Table(table) => {
                        for page in &mut table.pages {
                            if page.valid() && !keep(*page) {
                                *page = Pte(0);
                                table.used -= 1;
                            }
                        }
                        if table.used == 0 {
                            *entry = Entry::Empty;
                            directory.used -= 1;
                            self.tables -= 1;
                        }
                    }
                    Entry::Empty | Entry::Large(_) => {}
                }
            }
            if directory.used == 0 {
                *root = None;
                self.tables -= 1;
            }
        }
    }
}

fn directory_index(va: u64) -> usize {
    (va / LARGE % 512) as usize
}

fn table_index(va: u64) -> usize {
    (va / PAGE_SIZE % 512) as usize
}

fn check_range(va: GpuVa, len: u64) -> Result<std::ops::Range<u64>, Refusal> {
    if len == 0 || !is_aligned(va.0, PAGE_SIZE) || !is_aligned(len, PAGE_SIZE) {
        return Err(Refusal::Alignment);
    }
    match va.0.checked_add(len) {
        Some(end) if va.0 >= VA_START && end <= VA_END => Ok(va.0..end),
        _ => Err(Refusal::VaRange),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::mem::SharedMemory;

    const PAGES: u64 = 3 * 512;

    fn space() -> AddressSpace {
        let vram = SharedMemory::new(c"test", PAGES * PAGE_SIZE).unwrap().mapping;
        AddressSpace::new(Some(vram), 1 << 30)
    }

    #[test]
    fn contiguous_pages_are_one_piece() {
        let mut space = space();
        let va = GpuVa(VA_START + PAGE_SIZE);
        space.map(va, PAGES / 2 * PAGE_SIZE, Slot::VRAM, PAGE_SIZE, true).unwrap();
        let piece = space.resolve(va.0 + 5, 2 * MIB, Access::Write).unwrap();
        assert_eq!((piece.offset, piece.len), (PAGE_SIZE + 5, 2 * MIB));
    }

    #[test]
    fn a_page_may_be_taken_out_of_a_large_one() {
        let mut space = space();
        space.map(GpuVa(VA_START), LARGE, Slot::VRAM, 0, true).unwrap();
        assert_eq!(space.tables, 1, "one directory, no table");
        space.unmap(GpuVa(VA_START + PAGE_SIZE), PAGE_SIZE).unwrap();
        assert_eq!(space.load_u32(VA_START + PAGE_SIZE), Err(MmuFault(VA_START + PAGE_SIZE)));
        let piece = space.resolve(VA_START + 2 * PAGE_SIZE, LARGE, Access::Read).unwrap();
        assert_eq!(piece.len, LARGE - 2 * PAGE_SIZE);
    }

    #[test]
    fn release_takes_every_mapping_of_that_memory() {
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
        assert_eq!((space.imported(), space.tables), (0, 2));
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
        assert!(space.tables <= space.max_tables);
        space.unmap_all();
        assert_eq!(space.tables, 0);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Map { at: u64, pages: u64, offset: u64, writable: bool },
        Unmap { at: u64, pages: u64 },
    }

    fn op() -> impl Strategy<Value = Op> {
        // Page numbers around a directory's edge; lengths and offsets that often allow large pages.
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
                        let taken = model.range(at..at + pages).next().map(|(at, _)| *at);
                        let want = match taken {
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
                let read = space.resolve(va, 1, Access::Read).map(|piece| piece.offset);
                let write = space.resolve(va, 1, Access::Write).map(|piece| piece.offset);
                let want = model.get(&page);
                let offset = want.map(|(offset, _)| offset * PAGE_SIZE).ok_or(MmuFault(va));
                prop_assert_eq!(read, offset);
                prop_assert_eq!(write.is_ok(), want.is_some_and(|(_, writable)| *writable));
            }
            space.unmap_all();
            prop_assert_eq!(space.tables, 0);
        }
    }
}
