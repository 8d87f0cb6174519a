//! Mappings of files that another process may truncate.
//!
//! A client passes the file of its guest's memory and keeps it. If the client truncates the file,
//! an access to a mapping beyond the new end raises SIGBUS. The SIGBUS handler of a
//! [`GuardedMapping`] replaces the missing page by a page of zeros and marks the mapping as
//! poisoned, so that the worker can drop the client.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use vm_memory::VolatileSlice;

use crate::units::PAGE_SIZE;

/// Maximum number of guarded mappings of a process.
pub const MAX_MAPPINGS: usize = 8192;

/// Protection of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Loads only.
    ReadOnly,
    /// Loads and stores.
    ReadWrite,
}

/// Shared mapping of a file range that survives the file's truncation.
#[derive(Debug)]
pub struct GuardedMapping {
    start: NonNull<u8>,
    len: usize,
    slot: usize,
}

// SAFETY: the mapping is owned memory; all accesses are volatile or atomic, and the slot is only
// accessed atomically.
unsafe impl Send for GuardedMapping {}
// SAFETY: as above; `&GuardedMapping` provides only volatile slices and raw pointers.
unsafe impl Sync for GuardedMapping {}

impl GuardedMapping {
    /// Maps `len` bytes of `fd` from `offset`, shared. Offset and length must be multiples of the
    /// page size.
    pub fn map(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        protection: Protection,
    ) -> io::Result<Self> {
        let file_offset = libc::off_t::try_from(offset).map_err(|_| invalid())?;
        if len == 0 || isize::try_from(len).is_err() {
            return Err(invalid());
        }
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
                len,
                flags,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                fd.as_raw_fd(),
                file_offset,
            )
        };
        let start = match NonNull::new(address.cast::<u8>()) {
            Some(start) if address != libc::MAP_FAILED => start,
            _ => {
                let error = io::Error::last_os_error();
                SLOTS[slot].release();
                return Err(error);
            }
        };
        SLOTS[slot].watch(start.as_ptr() as usize, len);
        Ok(Self { start, len, slot })
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

impl Drop for GuardedMapping {
    fn drop(&mut self) {
        SLOTS[self.slot].unwatch();
        // SAFETY: start and len describe this mapping, and no borrow of it is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        SLOTS[self.slot].release();
    }
}

fn invalid() -> io::Error {
    io::Error::from(io::ErrorKind::InvalidInput)
}

/// Signal handler's record of a mapping. The handler can run at any moment, so each field is
/// atomic, and `start` is set last and cleared first.
struct Slot {
    claimed: AtomicBool,
    start: AtomicUsize,
    len: AtomicUsize,
    poisoned: AtomicBool,
}

static SLOTS: [Slot; MAX_MAPPINGS] = [const {
    Slot {
        claimed: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        poisoned: AtomicBool::new(false),
    }
}; MAX_MAPPINGS];

/// Number of slots that were ever in use, the limit of the handler's search.
static HIGH_WATER: AtomicUsize = AtomicUsize::new(0);

impl Slot {
    fn watch(&self, start: usize, len: usize) {
        self.poisoned.store(false, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.start.store(start, Ordering::Release);
    }

    fn unwatch(&self) {
        self.start.store(0, Ordering::Release);
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
    let handled = replace_page(address);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if !handled {
        pass_on(signal, info, context);
    }
}

fn replace_page(address: usize) -> bool {
    let known = SLOTS.iter().take(HIGH_WATER.load(Ordering::Acquire));
    for slot in known {
        let start = slot.start.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Relaxed);
        if start == 0 || address < start || address - start >= len {
            continue;
        }
        let page = address & !(PAGE_SIZE as usize - 1);
        slot.poisoned.store(true, Ordering::Release);
        // A huge page cannot be replaced in part, so the whole range becomes zeros.
        return map_zeros(page, PAGE_SIZE as usize) || map_zeros(start, len);
    }
    false
}

fn map_zeros(start: usize, len: usize) -> bool {
    // SAFETY: the range is in a guarded mapping, which is alive while a thread faults on it; the
    // users of a mapping expect changes of its contents at any time.
    let mapped = unsafe {
        libc::mmap(
            start as *mut c_void,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
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
mod tests {
    use std::os::fd::AsFd;

    use vm_memory::Bytes;

    use super::*;

    #[test]
    fn a_truncated_file_reads_as_zeros_and_poisons_the_mapping() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * PAGE_SIZE).unwrap();
        let mapping =
            GuardedMapping::map(file.as_fd(), 0, 4 * PAGE_SIZE as usize, Protection::ReadWrite)
                .unwrap();
        let other =
            GuardedMapping::map(file.as_fd(), 0, PAGE_SIZE as usize, Protection::ReadOnly).unwrap();
        mapping.slice().write_slice(&[7; 16], 3 * PAGE_SIZE as usize).unwrap();
        assert!(!mapping.poisoned());

        file.set_len(PAGE_SIZE).unwrap();
        let mut bytes = [1; 16];
        mapping.slice().read_slice(&mut bytes, 3 * PAGE_SIZE as usize).unwrap();
        assert_eq!(bytes, [0; 16]);
        assert!(mapping.poisoned());
        mapping.slice().write_slice(&[9; 16], 2 * PAGE_SIZE as usize).unwrap();

        other.slice().read_slice(&mut bytes, 0).unwrap();
        assert!(!other.poisoned(), "the remaining page is intact");
    }

    #[test]
    fn slots_are_reused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE_SIZE).unwrap();
        for _ in 0..2 * MAX_MAPPINGS {
            GuardedMapping::map(file.as_fd(), 0, PAGE_SIZE as usize, Protection::ReadOnly).unwrap();
        }
    }

    #[test]
    fn invalid_ranges_are_refused() {
        let file = tempfile::tempfile().unwrap();
        let map = |offset, len| {
            GuardedMapping::map(file.as_fd(), offset, len, Protection::ReadOnly).is_err()
        };
        assert!(map(0, 0));
        assert!(map(u64::MAX, 4096));
        assert!(map(1, 4096));
        assert!(map(0, usize::MAX));
    }
}
