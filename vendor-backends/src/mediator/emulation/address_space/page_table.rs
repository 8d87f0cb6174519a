//! Page tables of an address space.
//!
//! ```text
//! bits 39:30 root (1024) ─► bits 29:21 directory (512) ─► bits 20:12 table (512 pages of 4 KiB)
//! ```
//!
//! A directory entry is empty, one page of 2 MiB, or a table.

use std::ops::Range;

use mdev_core::abi::mailbox::VA_END;
use mdev_core::units::{MIB, PAGE_SIZE, is_aligned};

use super::Access;
use super::memory::Slot;
use crate::mediator::wire::Refusal;

/// Length of a large page.
pub(super) const LARGE: u64 = 2 * MIB;
/// Address range that a directory covers.
pub(super) const DIRECTORY: u64 = 512 * LARGE;

/// Page table entry: valid bit, writable bit, slot, and page number in the slot's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pte(u64);

impl Pte {
    pub fn new(slot: Slot, offset: u64, writable: bool) -> Self {
        Self(1 | u64::from(writable) << 1 | u64::from(slot.0) << 2 | (offset / PAGE_SIZE) << 18)
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

/// Page tables with a limited number of directories and tables.
#[derive(Debug)]
pub struct PageTables {
    root: Vec<Option<Box<Directory>>>,
    count: u64,
    max_count: u64,
}

impl PageTables {
    /// Creates empty page tables that may grow to `max_count` directories and tables.
    pub fn new(max_count: u64) -> Self {
        Self { root: (0..VA_END / DIRECTORY).map(|_| None).collect(), count: 0, max_count }
    }

    /// Changes the limit. Directories and tables beyond a lower limit stay.
    pub fn set_max_count(&mut self, max_count: u64) {
        self.max_count = max_count;
    }

    /// Returns the number of directories and tables that may be added.
    fn room(&self) -> u64 {
        self.max_count.saturating_sub(self.count)
    }

    /// Maps a range without mapped pages to contiguous memory; `first` is the entry of its first
    /// page. An error changes nothing.
    pub(super) fn map(&mut self, range: Range<u64>, first: Pte) -> Result<(), Refusal> {
        let mut at = range.start;
        while at < range.end {
            let pte = first.small_page(((at - range.start) / PAGE_SIZE) as usize);
            let Some(mapped) = self.map_next(at, range.end - at, pte) else {
                self.clear(range.start..at);
                return Err(Refusal::PageTableLimit);
            };
            at += mapped;
        }
        Ok(())
    }

    /// Maps one large page, or small pages up to the end of their table. Returns the mapped length,
    /// or `None` at the limit of page tables.
    fn map_next(&mut self, at: u64, left: u64, pte: Pte) -> Option<u64> {
        let room = self.room();
        let root = &mut self.root[(at / DIRECTORY) as usize];
        let mut made = u64::from(root.is_none());
        if made > room {
            return None;
        }
        let large = left >= LARGE && is_aligned(at, LARGE) && is_aligned(pte.offset(), LARGE);
        let directory = root.get_or_insert_with(|| {
            Box::new(Directory { entries: (0..512).map(|_| Entry::Empty).collect(), used: 0 })
        });
        self.count += made;
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
            self.count += 1;
        }
        if let Entry::Table(table) = entry {
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

    /// Unmaps a range. An error, such as a page that is not mapped, changes nothing.
    pub fn unmap(&mut self, range: Range<u64>) -> Result<(), Refusal> {
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
        if splits > self.room() {
            return Err(Refusal::PageTableLimit);
        }
        self.clear(range);
        Ok(())
    }

    /// Unmaps all pages. Returns the previous page tables, because freeing them can take long.
    #[must_use = "freeing page tables can take long"]
    pub fn unmap_all(&mut self) -> Self {
        std::mem::replace(self, Self::new(self.max_count))
    }

    /// Returns the entry of the small page at `va`, and the bytes from `va` to the end of the small
    /// or large page. Returns `None` if the access is not allowed.
    #[inline]
    pub(super) fn translate(&self, va: u64, access: Access) -> Option<(Pte, u64)> {
        let directory = self.root.get((va / DIRECTORY) as usize)?.as_ref()?;
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

    /// Unmaps all pages of `slot`.
    pub fn unmap_slot(&mut self, slot: Slot) {
        let released = |pte: Pte| pte.slot() == slot;
        for root in &mut self.root {
            let Some(directory) = root else { continue };
            for entry in &mut directory.entries {
                match entry {
                    Entry::Large(pte) if released(*pte) => {
                        *entry = Entry::Empty;
                        directory.used -= 1;
                    }
                    Entry::Table(table) => {
                        for page in &mut table.pages {
                            if page.valid() && released(*page) {
                                *page = Pte(0);
                                table.used -= 1;
                            }
                        }
                        if table.used == 0 {
                            *entry = Entry::Empty;
                            directory.used -= 1;
                            self.count -= 1;
                        }
                    }
                    Entry::Empty | Entry::Large(_) => {}
                }
            }
            if directory.used == 0 {
                *root = None;
                self.count -= 1;
            }
        }
    }

    /// Returns the number of directories and tables.
    #[cfg(test)]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the limit of [`Self::count`].
    #[cfg(test)]
    pub fn max_count(&self) -> u64 {
        self.max_count
    }

    fn entry(&self, at: u64) -> &Entry {
        let directory = self.root[(at / DIRECTORY) as usize].as_ref();
        directory.map_or(&Entry::Empty, |directory| &directory.entries[directory_index(at)])
    }

    /// Unmaps all mapped pages of a range. Splits large pages at its ends.
    fn clear(&mut self, range: Range<u64>) {
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
                        *page = pte.small_page(index);
                    }
                    *entry = Entry::Table(table);
                    self.count += 1;
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
                            self.count -= 1;
                        }
                    }
                }
            }
            self.free_if_empty(at);
            at = end;
        }
    }

    /// Frees the directory that covers `at` if it is empty.
    fn free_if_empty(&mut self, at: u64) {
        let root = &mut self.root[(at / DIRECTORY) as usize];
        if root.as_ref().is_some_and(|directory| directory.used == 0) {
            *root = None;
            self.count -= 1;
        }
    }
}

fn directory_index(va: u64) -> usize {
    (va / LARGE % 512) as usize
}

fn table_index(va: u64) -> usize {
    (va / PAGE_SIZE % 512) as usize
}
