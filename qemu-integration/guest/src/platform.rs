//! Abstraction over a VM, a test and another process on the host.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use mdev_core::abi::mailbox::Scatter;
use mdev_core::units::PAGE_SIZE;

use crate::GuestError;

/// Access to one vGPU.
pub trait Platform: Send + Sync + fmt::Debug {
    /// Returns the location for display, such as a PCI address.
    fn location(&self) -> String;

    /// Reads a control register (BAR 3). Returns all ones if the device is gone, as on PCI.
    fn read32(&self, offset: u64) -> u32;

    /// Writes a control register.
    fn write32(&self, offset: u64, value: u32);

    /// Writes a token to the doorbell page (BAR 1).
    fn ring(&self, token: u32);

    /// Returns video memory (BAR 4), if it can be mapped.
    fn vram(&self) -> Option<Window<'_>>;

    /// Returns the bytes at the start of video memory that belong to the display (the length of BAR
    /// 0).
    fn scanout_bytes(&self) -> u64;

    /// Allocates zeroed pages of guest memory at fixed addresses that the device can access.
    fn allocate(&self, bytes: u64) -> Result<GuestPages, GuestError>;

    /// Returns whether [`Self::wait`] waits for interrupts of the vGPU.
    fn interrupts(&self) -> bool {
        false
    }

    /// Waits for an interrupt since the last wait, for at most `limit`; without interrupts, for
    /// that long. Of several threads that wait, one gets the interrupt.
    fn wait(&self, limit: Duration) {
        thread::sleep(limit);
    }
}

/// Memory shared with the GPU, mapped for `'a`.
///
/// All accesses are bounds-checked. An access out of bounds is a bug and panics.
#[derive(Clone, Copy)]
pub struct Window<'a> {
    base: NonNull<u8>,
    len: usize,
    owner: PhantomData<&'a ()>,
}

// SAFETY: a window is an address range that stays mapped for 'a. Words are accessed through
// atomics, and bulk data only after the fence that shows that the GPU is done with it.
unsafe impl Send for Window<'_> {}
// SAFETY: as above.
unsafe impl Sync for Window<'_> {}

impl<'a> Window<'a> {
    /// Creates a window over mapped memory.
    ///
    /// # Safety
    /// `len` bytes from `base` (aligned to 4) stay mapped, readable and writable, for `'a`, and no
    /// Rust reference points into them.
    pub const unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, owner: PhantomData }
    }

    /// Returns the length in bytes.
    pub const fn len(&self) -> u64 {
        self.len as u64
    }

    /// Returns true if the window has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the start address in this process.
    pub const fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns a part of the window.
    #[must_use]
    pub fn part(&self, offset: u64, len: u64) -> Window<'a> {
        let start = self.check(offset, len);
        // SAFETY: the part lies within this window, and the offset of a part that is used for words
        // is checked there.
        unsafe { Window::new(self.base.add(start), len as usize) }
    }

    fn check(&self, offset: u64, len: u64) -> usize {
        let end = offset.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len as u64), "access outside of a window");
        offset as usize
    }

    fn word(&self, offset: u64) -> &'a AtomicU32 {
        let start = self.check(offset, 4);
        // SAFETY: within the window, which is mapped for 'a.
        let pointer = unsafe { self.base.add(start) }.cast::<AtomicU32>();
        assert!(pointer.is_aligned(), "misaligned word in a window");
        // SAFETY: valid, aligned, and an atomic may be shared with other writers.
        unsafe { pointer.as_ref() }
    }

    /// Reads a word with acquire ordering.
    pub fn read32(&self, offset: u64) -> u32 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Writes a word with release ordering.
    pub fn write32(&self, offset: u64, value: u32) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// Copies bytes out.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        let start = self.check(offset, bytes.len() as u64);
        // SAFETY: both ranges are valid for their length, and private memory does not overlap a
        // window.
        unsafe {
            self.base.add(start).as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
        }
    }

    /// Copies bytes in.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let start = self.check(offset, bytes.len() as u64);
        // SAFETY: both ranges are valid for their length, and private memory does not overlap a
        // window.
        unsafe {
            self.base.add(start).as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    /// Sets every byte.
    pub fn fill(&self, value: u8) {
        // SAFETY: the window is valid for its length.
        unsafe { self.base.as_ptr().write_bytes(value, self.len) }
    }
}

impl fmt::Debug for Window<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window({} bytes)", self.len)
    }
}

/// Guest memory that the device can access, with its address in this process and on the device.
pub struct GuestPages {
    base: NonNull<u8>,
    len: usize,
    ranges: Vec<Scatter>,
    /// Owner of the memory; frees it when dropped.
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the pages are accessed through windows only, and their owner is Send and Sync.
unsafe impl Send for GuestPages {}
// SAFETY: as above.
unsafe impl Sync for GuestPages {}

impl GuestPages {
    /// Wraps pages that `owner` keeps mapped and in place.
    ///
    /// # Safety
    /// `len` bytes from `base` (page-aligned) stay mapped until `owner` is dropped, and nothing
    /// else refers to them.
    pub unsafe fn new(
        base: NonNull<u8>,
        len: usize,
        ranges: Vec<Scatter>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        debug_assert_eq!(ranges.iter().map(|range| range.length).sum::<u64>(), len as u64);
        Self { base, len, ranges, _owner: owner }
    }

    /// Returns the window of this process.
    pub fn window(&self) -> Window<'_> {
        // SAFETY: the owner keeps the pages mapped for as long as self lives.
        unsafe { Window::new(self.base, self.len) }
    }

    /// Returns the guest-physical ranges, in order.
    pub fn ranges(&self) -> &[Scatter] {
        &self.ranges
    }

    /// Returns the guest-physical address of a byte.
    pub fn physical(&self, mut offset: u64) -> Option<u64> {
        for range in &self.ranges {
            if offset < range.length {
                return Some(range.address + offset);
            }
            offset -= range.length;
        }
        None
    }
}

impl fmt::Debug for GuestPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GuestPages({} bytes in {} ranges)", self.len, self.ranges.len())
    }
}

/// Joins adjacent pages into ranges.
pub fn coalesce(pages: impl IntoIterator<Item = u64>) -> Vec<Scatter> {
    let mut ranges: Vec<Scatter> = Vec::new();
    for address in pages {
        match ranges.last_mut() {
            Some(last) if last.address + last.length == address => last.length += PAGE_SIZE,
            _ => ranges.push(Scatter { address, length: PAGE_SIZE }),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joins_neighbours_only() {
        let ranges = coalesce([0x5000, 0x6000, 0x7000, 0x3000, 0x9000, 0xa000]);
        let plain: Vec<_> = ranges.iter().map(|r| (r.address, r.length)).collect();
        assert_eq!(plain, [(0x5000, 0x3000), (0x3000, 0x1000), (0x9000, 0x2000)]);
    }

    #[test]
    fn finds_physical_addresses_across_ranges() {
        let mut memory = vec![0u64; 3 * PAGE_SIZE as usize / 8];
        let base = NonNull::new(memory.as_mut_ptr().cast()).unwrap();
        let ranges = coalesce([0x8000, 0x9000, 0x2000]);
        // SAFETY: the vector is the owner and is not touched otherwise.
        let pages = unsafe { GuestPages::new(base, 0x3000, ranges, Box::new(memory)) };
        assert_eq!(pages.physical(0x1234), Some(0x9234));
        assert_eq!(pages.physical(0x2010), Some(0x2010));
        assert_eq!(pages.physical(0x3000), None);
        let window = pages.window();
        window.write32(0x2010, 7);
        assert_eq!(window.part(0x2000, 0x100).read32(0x10), 7);
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn stays_inside() {
        let mut memory = [0u32; 4];
        let base = NonNull::new(memory.as_mut_ptr().cast()).unwrap();
        // SAFETY: the array outlives the window and is not touched otherwise.
        unsafe { Window::new(base, 16) }.read32(16);
    }
}
