//! Mappings of files that another process may truncate.
//!
//! A client passes the file of its guest's memory and keeps it. If the client truncates the file,
//! an access to a mapping beyond the new end raises SIGBUS. The SIGBUS handler of a
//! [`GuardedMapping`] replaces the missing page, with up to 64 MiB around it, by zeros and marks
//! the mapping as poisoned, so that the owner can drop the client. Replacing large parts keeps the
//! number of ranges in the address space small, which the kernel limits (`vm.max_map_count`).
//! Replacing them in parts keeps the handler short: it runs on the engine of all tenants.
//!
//! * [`held`]: threads that page faults hold

pub mod held;

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

use vm_memory::VolatileSlice;

use crate::units::{PAGE_SIZE, is_aligned};

/// Maximum number of guarded mappings of a process. A GPU process has 256 imports of each vGPU; the
/// kernel allows 65530 ranges of memory by default.
pub const MAX_MAPPINGS: usize = 32_768;

/// Size of the parts of a mapping that are replaced at once.
const PART: usize = 64 << 20;

/// Protection of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Loads only.
    ReadOnly,
    /// Loads and stores.
    ReadWrite,
}

/// Shared mapping of a file range that survives the file's truncation.
///
/// Whole pages of the file are mapped. With huge pages the mapping can therefore begin before the
/// requested range and end after it; only the requested range is accessible.
#[derive(Debug)]
pub struct GuardedMapping {
    start: NonNull<u8>,
    len: usize,
    /// Range of whole pages, for the kernel.
    pages: Pages,
    slot: usize,
}

/// Range of mapped pages.
#[derive(Clone, Copy, Debug)]
struct Pages {
    start: usize,
    len: usize,
}

// SAFETY: the mapping is owned memory; all accesses are volatile or atomic, and the slot is only
// accessed atomically.
unsafe impl Send for GuardedMapping {}
// SAFETY: as above; `&GuardedMapping` provides only volatile slices and raw pointers.
unsafe impl Sync for GuardedMapping {}

impl GuardedMapping {
    /// Maps `len` bytes of `fd` from `offset`, shared. Offset and length must be multiples of the
    /// page size. The file must belong to this process or a trusted one: others' are mapped by
    /// [`MemoryFile::map`](crate::memory_file::MemoryFile::map).
    pub fn map(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        protection: Protection,
    ) -> io::Result<Self> {
        if !is_aligned(len as u64, PAGE_SIZE) {
            return Err(invalid());
        }
        Self::map_whole_pages(fd, offset, len, PAGE_SIZE, protection)
    }

    /// Maps `len` bytes of `fd` from `offset`, shared, in whole pages of `page_size` bytes.
    pub(crate) fn map_whole_pages(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        page_size: u64,
        protection: Protection,
    ) -> io::Result<Self> {
        if len == 0 || !is_aligned(offset, PAGE_SIZE) || !page_size.is_power_of_two() {
            return Err(invalid());
        }
        let first = offset & !(page_size - 1);
        let end = offset.checked_add(len as u64).and_then(|end| {
            end.checked_next_multiple_of(page_size).filter(|end| i64::try_from(*end).is_ok())
        });
        let end = end.ok_or_else(invalid)?;
        let whole = usize::try_from(end - first).map_err(|_| invalid())?;
        install_handler()?;
        let slot = claim_slot()?;
        let flags = match protection {
            Protection::ReadOnly => libc::PROT_READ,
            Protection::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                whole,
                flags,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                fd.as_raw_fd(),
                first.cast_signed(),
            )
        };
        let base = match NonNull::new(address.cast::<u8>()) {
            Some(base) if address != libc::MAP_FAILED => base,
            _ => {
                let error = io::Error::last_os_error();
                SLOTS[slot].release();
                return Err(error);
            }
        };
        let pages = Pages { start: base.as_ptr().expose_provenance(), len: whole };
        SLOTS[slot].watch(pages);
        // SAFETY: the requested range begins less than one page after the mapping's start.
        let start = unsafe { base.add((offset - first) as usize) };
        Ok(Self { start, len, pages, slot })
    }

    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the length in bytes, which is never zero.
    #[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the mapping for volatile access. Stores to a read-only mapping fault.
    pub fn slice(&self) -> VolatileSlice<'_> {
        // SAFETY: start and len describe a mapping that lives as long as the borrow of self.
        unsafe { VolatileSlice::new(self.start.as_ptr(), self.len) }
    }

    /// Returns true after an access beyond the end of the file. Such loads return zeros, and such
    /// stores are lost.
    pub fn poisoned(&self) -> bool {
        SLOTS[self.slot].poisoned.load(Ordering::Acquire)
    }
}

/// Report of the first failure to unmap memory.
static UNMAP_FAILURE: Once = Once::new();

impl Drop for GuardedMapping {
    fn drop(&mut self) {
        let Pages { start, len } = self.pages;
        // First: another thread's mapping can have the range as soon as it is free.
        SLOTS[self.slot].unwatch();
        // SAFETY: the pages are this mapping, and no borrow of it is left.
        if unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), len) } == 0 {
            SLOTS[self.slot].release();
            return;
        }
        let error = io::Error::last_os_error();
        // At least the file's pages must not stay in use. The slot does, with the address range.
        let released = map_zeros(start, len, libc::PROT_NONE);
        UNMAP_FAILURE.call_once(|| {
            let what = if released { "its address range" } else { "its memory" };
            log::error!(
                "Cannot unmap {len:#x} bytes of shared memory, {what} stays in use: {error}"
            );
        });
    }
}

fn invalid() -> io::Error {
    io::Error::from(io::ErrorKind::InvalidInput)
}

/// Signal handler's record of a mapping. The handler can run at any moment, so each field is
/// atomic. The version is odd while the range is changed, so that the handler never combines the
/// start of one mapping with the length of the next one.
struct Slot {
    claimed: AtomicBool,
    version: AtomicUsize,
    start: AtomicUsize,
    len: AtomicUsize,
    poisoned: AtomicBool,
}

static SLOTS: [Slot; MAX_MAPPINGS] = [const {
    Slot {
        claimed: AtomicBool::new(false),
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        poisoned: AtomicBool::new(false),
    }
}; MAX_MAPPINGS];

/// Number of slots that were ever in use, the limit of the handler's search.
static HIGH_WATER: AtomicUsize = AtomicUsize::new(0);

impl Slot {
    fn watch(&self, pages: Pages) {
        self.poisoned.store(false, Ordering::Relaxed);
        self.set(pages);
    }

    fn unwatch(&self) {
        self.set(Pages { start: 0, len: 0 });
    }

    fn set(&self, Pages { start, len }: Pages) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.len.store(len, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the pages if they contain `address`.
    fn pages_with(&self, address: usize) -> Option<Pages> {
        let version = self.version.load(Ordering::SeqCst);
        let start = self.start.load(Ordering::SeqCst);
        let len = self.len.load(Ordering::SeqCst);
        let is_stable = version.is_multiple_of(2) && version == self.version.load(Ordering::SeqCst);
        let contains = start != 0 && address.checked_sub(start).is_some_and(|at| at < len);
        (is_stable && contains).then_some(Pages { start, len })
    }

    fn release(&self) {
        self.claimed.store(false, Ordering::Release);
    }
}

fn claim_slot() -> io::Result<usize> {
    let free = |slot: &Slot| {
        slot.claimed.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    };
    let slot = SLOTS
        .iter()
        .position(free)
        .ok_or_else(|| io::Error::other(format!("More than {MAX_MAPPINGS} mappings")))?;
    HIGH_WATER.fetch_max(slot + 1, Ordering::Release);
    Ok(slot)
}

/// Previous signal action, for faults outside of guarded mappings.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
static INSTALLED: OnceLock<Option<i32>> = OnceLock::new();

fn install_handler() -> io::Result<()> {
    let failure = INSTALLED.get_or_init(|| {
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: an all-zero sigaction is a valid value.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: reads the current action into memory of the right type.
        let rc = unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr()) };
        if rc != 0 {
            return io::Error::last_os_error().raw_os_error();
        }
        // SAFETY: the call above has initialized it.
        let _ = PREVIOUS.set(unsafe { previous.assume_init() });
        // SAFETY: the handler is async-signal-safe: atomics and system calls only.
        let rc = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
        if rc == 0 { None } else { io::Error::last_os_error().raw_os_error() }
    });
    failure.map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code)))
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo; si_addr is meaningful for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    // SAFETY: errno's location is valid in every thread; errno is restored for the interrupted
    // code.
    let errno = unsafe { *libc::__errno_location() };
    let handled = replace(address);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if !handled {
        pass_on(signal, info, context);
    }
}

/// Replaces the part of a mapping that contains `address`. Faults of several threads replace it
/// several times, which loses only stores to a poisoned mapping.
fn replace(address: usize) -> bool {
    let known = SLOTS.iter().take(HIGH_WATER.load(Ordering::Acquire));
    for slot in known {
        if let Some(Pages { start, len }) = slot.pages_with(address) {
            slot.poisoned.store(true, Ordering::Release);
            let at = (address - start) / PART * PART;
            let page = address & !(PAGE_SIZE as usize - 1);
            // A huge page can be longer than a part, and cannot be replaced in part. A host without
            // overcommit may have room for one page only.
            let access = libc::PROT_READ | libc::PROT_WRITE;
            return map_zeros(start + at, PART.min(len - at), access)
                || map_zeros(start, len, access)
                || map_zeros(page, PAGE_SIZE as usize, access);
        }
    }
    false
}

/// Replaces pages of a guarded mapping by private zeros.
fn map_zeros(start: usize, len: usize, protection: c_int) -> bool {
    // SAFETY: the range is in a guarded mapping, which is alive while a thread faults on it or
    // drops it; the users of a mapping expect changes of its contents at any time.
    let mapped = unsafe {
        libc::mmap(
            ptr::with_exposed_provenance_mut(start),
            len,
            protection,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

/// Passes a fault outside of guarded mappings to the previous handler. The default action ends the
/// process when the instruction is executed again.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    match PREVIOUS.get() {
        Some(previous)
            if previous.sa_sigaction != libc::SIG_DFL && previous.sa_sigaction != libc::SIG_IGN =>
        {
            type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
            // SAFETY: the address came from sigaction; a handler with one argument ignores the
            // other two registers.
            let handler: Handler = unsafe { std::mem::transmute(previous.sa_sigaction) };
            handler(signal, info, context);
        }
        _ => {
            // SAFETY: sets the default action; async-signal-safe.
            unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        }
    }
}

#[cfg(test)]
mod tests;
