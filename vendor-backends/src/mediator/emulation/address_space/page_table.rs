//! Page tables of an address space.
//!
//! ```text
//! bits 39:30 root (1024) ─► bits 29:21 directory (512) ─► bits 20:12 table (512 pages of 4 KiB)
//! ```
//!
//! A directory entry is empty, one page of 2 MiB, or a table. Addresses of more than 40 bits, which
//! only created address spaces have, are in further roots by bits 46:40.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;

use mdev_core::units::{MIB, PAGE_SIZE, is_aligned};

use super::Access;
use super::memory::Slot;
use crate::mediator::wire::Refusal;

/// Length of a large page.
pub(super) const LARGE: u64 = 2 * MIB;
/// Address range that a directory covers.
pub(super) const DIRECTORY: u64 = 512 * LARGE;
/// Address range that a root covers: 40 bits.
pub(super) const ROOT: u64 = 1024 * DIRECTORY;

/// Page table entry: valid bit, writable bit, slot, and page number in the slot's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pte(u64);

impl Pte {
    pub fn new(slot: Slot, offset: u64, writable: bool) -> Self {
        Self(1 | u64::from(writable) << 1 | u64::from(slot.0) << 2 | (offset / PAGE_SIZE) << 18)
    }

    /// Returns whether the page may be written.
    pub fn writable(self) -> bool {
        self.0 & 2 != 0
    }

    fn valid(self) -> bool {
        self.0 & 1 != 0
    }

    #[inline]
    fn allows(self, access: Access) -> bool {
        self.valid() && (access == Access::Read || self.0 & 2 != 0)
    }

    #[inline]
    pub fn slot(self) -> Slot {
        Slot((self.0 >> 2) as u16)
    }

    #[inline]
    pub fn offset(self) -> u64 {
        (self.0 >> 18) * PAGE_SIZE
    }

    /// Returns the entry of the `index`th small page from this one on.
    #[inline]
    fn small_page(self, index: usize) -> Self {
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

impl Directory {
    /// Unmaps all pages of `slot`. Returns the number of freed tables.
    fn unmap_slot(&mut self, slot: Slot) -> u64 {
        let mut freed = 0;
        for entry in &mut self.entries {
            match entry {
                Entry::Large(pte) if pte.slot() == slot => {
                    *entry = Entry::Empty;
                    self.used -= 1;
                }
                Entry::Table(table) => {
                    for page in &mut table.pages {
                        if page.valid() && page.slot() == slot {
                            *page = Pte(0);
                            table.used -= 1;
                        }
                    }
                    if table.used == 0 {
                        *entry = Entry::Empty;
                        self.used -= 1;
                        freed += 1;
                    }
                }
                Entry::Empty | Entry::Large(_) => {}
            }
        }
        freed
    }
}

/// Directories of a terabyte.
type Root = Vec<Option<Box<Directory>>>;

fn empty_root() -> Root {
    (0..ROOT / DIRECTORY).map(|_| None).collect()
}

/// Page tables of one address space.
#[derive(Debug)]
pub struct PageTables {
    /// Root of the addresses of 40 bits.
    root: Root,
    /// Roots of the addresses above, by bits 46:40, each with its number of directories.
    high: BTreeMap<u64, (Root, u16)>,
    count: u64,
}

impl Default for PageTables {
    fn default() -> Self {
        Self { root: empty_root(), high: BTreeMap::new(), count: 0 }
    }
}

impl PageTables {
    /// Maps a range without mapped pages to contiguous memory; `first` is the entry of its first
    /// page. Adds at most `room` roots, directories and tables. An error changes nothing.
    pub(super) fn map(&mut self, range: Range<u64>, first: Pte, room: u64) -> Result<(), Refusal> {
        let max_count = self.count.saturating_add(room);
        let mut at = range.start;
        while at < range.end {
            let pte = first.small_page(((at - range.start) / PAGE_SIZE) as usize);
            let Some(mapped) = self.map_next(at, range.end - at, pte, max_count) else {
                self.clear(range.start..at);
                return Err(Refusal::PageTableLimit);
            };
            at += mapped;
        }
        Ok(())
    }

    /// Returns the directory that covers `at`.
    #[inline]
    fn directory(&self, at: u64) -> Option<&Directory> {
        match self.root.get((at / DIRECTORY) as usize) {
            Some(directory) => directory.as_deref(),
            None => self.high_directory(at),
        }
    }

    #[cold]
    #[inline(never)]
    fn high_directory(&self, at: u64) -> Option<&Directory> {
        self.high.get(&(at / ROOT))?.0[(at % ROOT / DIRECTORY) as usize].as_deref()
    }

    fn directory_mut(&mut self, at: u64) -> Option<&mut Directory> {
        let index = (at % ROOT / DIRECTORY) as usize;
        let root = match at / ROOT {
            0 => &mut self.root,
            high => &mut self.high.get_mut(&high)?.0,
        };
        root[index].as_deref_mut()
    }

    /// Returns the directory that covers `at`. Adds it, and its root, if `max_count` allows.
    fn make_directory(&mut self, at: u64, max_count: u64) -> Option<&mut Directory> {
        let room = max_count.saturating_sub(self.count);
        let index = (at % ROOT / DIRECTORY) as usize;
        let (root, used) = match at / ROOT {
            0 => (&mut self.root, &mut 0),
            high => {
                let new_root = !self.high.contains_key(&high);
                if new_root && room < 2 {
                    return None;
                }
                self.count += u64::from(new_root);
                let (root, used) = self.high.entry(high).or_insert_with(|| (empty_root(), 0));
                (root, used)
            }
        };
        if root[index].is_none() {
            if room == 0 {
                return None;
            }
            let entries = (0..512).map(|_| Entry::Empty).collect();
            root[index] = Some(Box::new(Directory { entries, used: 0 }));
            self.count += 1;
            *used += 1;
        }
        root[index].as_deref_mut()
    }

    /// Maps one large page, or small pages up to the end of their table. Returns the mapped length,
    /// or `None` at the limit of page tables.
    fn map_next(&mut self, at: u64, left: u64, pte: Pte, max_count: u64) -> Option<u64> {
        let large = left >= LARGE && is_aligned(at, LARGE) && is_aligned(pte.offset(), LARGE);
        self.make_directory(at, max_count)?;
        let full = self.count >= max_count;
        let directory = self.directory_mut(at)?;
        let entry = &mut directory.entries[directory_index(at)];
        if matches!(entry, Entry::Empty) {
            if large {
                *entry = Entry::Large(pte);
                directory.used += 1;
                return Some(LARGE);
            }
            if full {
                self.free_if_empty(at);
                return None;
            }
            *entry = Entry::Table(Table::empty());
            directory.used += 1;
            self.count += 1;
        }
        if let Some(directory) = self.directory_mut(at)
            && let Entry::Table(table) = &mut directory.entries[directory_index(at)]
        {
            // Fill the table in one go: a large guest buffer that is not aligned has many small
            // pages.
            let first = table_index(at);
            let pages = (left / PAGE_SIZE).min(512 - first as u64) as usize;
            for (index, page) in table.pages[first..first + pages].iter_mut().enumerate() {
                *page = pte.small_page(index);
            }
            table.used += pages as u16;
            return Some(pages as u64 * PAGE_SIZE);
        }
        None
    }

    /// Unmaps a range. Adds at most `room` tables. An error, such as a page that is not mapped,
    /// changes nothing.
    pub fn unmap(&mut self, range: Range<u64>, room: u64) -> Result<(), Refusal> {
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
        if splits > room {
            return Err(Refusal::PageTableLimit);
        }
        self.clear(range);
        Ok(())
    }

    /// Returns the entry of the small page at `va`, and the bytes from `va` to the end of the small
    /// or large page. Returns `None` if the access is not allowed.
    #[inline]
    pub(super) fn translate(&self, va: u64, access: Access) -> Option<(Pte, u64)> {
        let directory = self.directory(va)?;
        let (pte, left) = match &directory.entries[directory_index(va)] {
            Entry::Empty => return None,
            Entry::Large(pte) => (pte.small_page(table_index(va)), LARGE - va % LARGE),
            Entry::Table(table) => (table.pages[table_index(va)], PAGE_SIZE - va % PAGE_SIZE),
        };
        pte.allows(access).then_some((pte, left))
    }

    /// Returns the first mapped address of a range.
    pub fn first_mapped(&self, range: Range<u64>) -> Option<u64> {
        let mut at = range.start;
        while at < range.end {
            let end = ((at / LARGE + 1) * LARGE).min(range.end);
            match self.entry(at) {
                Entry::Empty => {}
                Entry::Large(_) => return Some(at),
                Entry::Table(table) => {
                    let first = table_index(at);
                    let last = first + ((end - at) / PAGE_SIZE) as usize;
                    let mapped = table.pages[first..last].iter().position(|page| page.valid());
                    if let Some(index) = mapped {
                        return Some(at + index as u64 * PAGE_SIZE);
                    }
                }
            }
            at = end;
        }
        None
    }

    /// Returns the directories and the addresses from which on they cover.
    fn directories(&self) -> impl Iterator<Item = (u64, &Directory)> {
        let high = self.high.iter().map(|(number, (root, _))| (*number, root));
        std::iter::once((0, &self.root)).chain(high).flat_map(|(number, root)| {
            let directories = (0..).zip(root);
            directories.filter_map(move |(index, directory)| {
                Some((number * ROOT + index * DIRECTORY, directory.as_deref()?))
            })
        })
    }

    /// Calls `visit` with each mapped range of contiguous memory: its first address and entry, and
    /// its length in bytes.
    pub(super) fn for_each(&self, mut visit: impl FnMut(u64, Pte, u64)) {
        let mut current: Option<(u64, Pte, u64)> = None;
        let mut add = |at: u64, pte: Pte, len: u64| match &mut current {
            Some((start, first, mapped))
                if *start + *mapped == at
                    && first.small_page((*mapped / PAGE_SIZE) as usize) == pte =>
            {
                *mapped += len;
            }
            _ => {
                if let Some((start, first, mapped)) = current.replace((at, pte, len)) {
                    visit(start, first, mapped);
                }
            }
        };
        for (start, directory) in self.directories() {
            for (index, entry) in (0..).zip(&directory.entries) {
                let at = start + index * LARGE;
                match entry {
                    Entry::Empty => {}
                    Entry::Large(pte) => add(at, *pte, LARGE),
                    Entry::Table(table) => {
                        let pages = (0..).zip(&table.pages).filter(|(_, page)| page.valid());
                        pages.for_each(|(page, pte): (u64, _)| {
                            add(at + page * PAGE_SIZE, *pte, PAGE_SIZE);
                        });
                    }
                }
            }
        }
        if let Some((start, first, mapped)) = current {
            visit(start, first, mapped);
        }
    }

    /// Unmaps all pages of `slot`.
    pub fn unmap_slot(&mut self, slot: Slot) {
        let low = self.root.iter_mut().map(|directory| (directory, None));
        let high = self.high.values_mut().flat_map(|(root, used)| {
            let used = Cell::from_mut(used);
            root.iter_mut().map(move |directory| (directory, Some(used)))
        });
        for (place, used) in low.chain(high) {
            let Some(directory) = place else { continue };
            self.count -= directory.unmap_slot(slot);
            if directory.used == 0 {
                *place = None;
                self.count -= 1;
                if let Some(used) = used {
                    used.set(used.get() - 1);
                }
            }
        }
        let roots = self.high.len();
        self.high.retain(|_, (_, used)| *used > 0);
        self.count -= (roots - self.high.len()) as u64;
    }

    /// Returns the number of directories, tables, and roots but the first.
    pub fn count(&self) -> u64 {
        self.count
    }

    fn entry(&self, at: u64) -> &Entry {
        let directory = self.directory(at);
        directory.map_or(&Entry::Empty, |directory| &directory.entries[directory_index(at)])
    }

    /// Unmaps all mapped pages of a range. Splits large pages at its ends.
    fn clear(&mut self, range: Range<u64>) {
        let mut at = range.start;
        while at < range.end {
            let end = ((at / LARGE + 1) * LARGE).min(range.end);
            let mut count = self.count;
            if let Some(directory) = self.directory_mut(at) {
                let entry = &mut directory.entries[directory_index(at)];
                if let Entry::Large(pte) = *entry
                    && end - at < LARGE
                {
                    let mut table = Table::empty();
                    table.used = 512;
                    for (index, page) in table.pages.iter_mut().enumerate() {
                        *page = pte.small_page(index);
                    }
                    *entry = Entry::Table(table);
                    count += 1;
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
                            count -= 1;
                        }
                    }
                }
            }
            self.count = count;
            self.free_if_empty(at);
            at = end;
        }
    }

    /// Frees the directory that covers `at` if it is empty, and its root.
    fn free_if_empty(&mut self, at: u64) {
        let index = (at % ROOT / DIRECTORY) as usize;
        let is_empty = |root: &Root| root[index].as_ref().is_some_and(|found| found.used == 0);
        let Some((root, used)) = self.high.get_mut(&(at / ROOT)) else {
            if at < ROOT && is_empty(&self.root) {
                self.root[index] = None;
                self.count -= 1;
            }
            return;
        };
        if is_empty(root) {
            root[index] = None;
            *used -= 1;
            self.count -= 1;
            if *used == 0 {
                self.high.remove(&(at / ROOT));
                self.count -= 1;
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
