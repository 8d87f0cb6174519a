//! Memory of the program that was made shared memory, so that the worker can give it to the GPU.
//!
//! All of it lies in one memfd of the process, the arena. An offset is used once. Between two
//! ranges lies a page that is never used, so that each mapping of the arena is one range.
//!
//! # Other threads
//!
//! Pages are copied into the arena and then replaced, a MiB at a time. A store of another thread to
//! a range between the two is lost. `cudaHostRegister` is called on buffers that are not in use
//! yet. A program whose threads write to a buffer while another one registers it must not do so.
//! Memory that CUDA itself allocates is shared from the start, and not affected.
//!
//! # Children of `fork()`
//!
//! A child gets a private view of its parent's ranges, so that its stores do not reach the parent.
//! Their first and last pages, which can hold other data of the program, are copied at once. In the
//! pages between, a child sees what the parent writes later, until it writes to the page itself.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use cuda_socket::{Range, SharedRange};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::unistd::ftruncate;

use crate::memory_maps::{self, ARENA_NAME, MemoryMap};
use crate::sys::{kernel, memory};

/// Length of an arena in bytes. Pages that were never written take no memory.
const ARENA_BYTES: u64 = 1 << 46;

/// Number of bytes that are copied and replaced at a time.
const CHUNK: u64 = 1 << 20;

/// The arena's descriptor and inode, for a child, and the number of forks.
static ARENA: (AtomicI32, AtomicU64) = (AtomicI32::new(-1), AtomicU64::new(0));
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Shared memory of the process.
#[derive(Debug, Default)]
pub struct SharedMemory {
    arena: Option<Arena>,
}

/// A range of the arena.
#[derive(Debug)]
struct Extent {
    offset: u64,
    len: u64,
    /// Number of forks before. Children may have views of older extents.
    forks: u64,
}

#[derive(Debug)]
struct Arena {
    memfd: OwnedFd,
    inode: u64,
    len: u64,
    next: u64,
    extents: Vec<Extent>,
}

impl SharedMemory {
    /// Returns a copy of the memfd's descriptor.
    pub fn duplicate(&self) -> Result<OwnedFd, Errno> {
        kernel::duplicate(self.arena.as_ref().ok_or(Errno::EBADF)?.memfd.as_raw_fd())
    }

    /// Makes a range shared memory and returns its parts, or `None` if it cannot be shared.
    pub fn share(&mut self, range: Range) -> Result<Option<Vec<SharedRange>>, Errno> {
        let usable = self.arena.as_ref().is_some_and(Arena::usable);
        if !usable {
            self.arena = Some(Arena::new()?);
        }
        let Some(arena) = &mut self.arena else { return Err(Errno::ENOMEM) };
        arena.release(&memory_maps::read()?);
        arena.share(range)
    }
}

impl Arena {
    fn new() -> Result<Self, Errno> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let memfd = memfd_create(c"tessera-cuda", flags)?;
        // Beyond the limit, the kernel sends a signal.
        let (limit, _) = getrlimit(Resource::RLIMIT_FSIZE)?;
        let len = if limit == RLIM_INFINITY { ARENA_BYTES } else { limit.min(ARENA_BYTES) };
        ftruncate(&memfd, len.cast_signed())?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals))?;
        let inode = kernel::status_of(memfd.as_raw_fd())?.st_ino;
        ARENA.1.store(inode, Ordering::Release);
        ARENA.0.store(memfd.as_raw_fd(), Ordering::Release);
        Ok(Self { memfd, inode, len, next: 0, extents: Vec::new() })
    }

    /// Returns whether the descriptor is still the arena. The program may have closed it.
    fn usable(&self) -> bool {
        kernel::status_of(self.memfd.as_raw_fd()).is_ok_and(|now| now.st_ino == self.inode)
    }

    /// Makes a range shared memory and returns its parts, or `None` if it cannot be shared.
    fn share(&mut self, range: Range) -> Result<Option<Vec<SharedRange>>, Errno> {
        let page = memory::page_size();
        let end = range.address.checked_add(range.len);
        let aligned = range.address.is_multiple_of(page) && range.len.is_multiple_of(page);
        if range.len == 0 || !aligned || end.is_none() {
            return Ok(None);
        }
        let maps = memory_maps::read()?;
        let mut private = Vec::new();
        let mut covered = 0;
        for map in &maps {
            let Some(part) = map.part_of(range) else { continue };
            covered += part.len;
            if map.is_own_memory() {
                private.push((part, map.protection));
            } else if !self.holds(map) {
                return Ok(None);
            }
        }
        if covered != range.len {
            return Ok(None);
        }
        for (part, protection) in private {
            self.take(part, protection)?;
        }
        let parts = memory_maps::read()?.into_iter().filter(|map| self.holds(map));
        let parts: Vec<_> = parts
            .filter_map(|map| {
                let part = map.part_of(range)?;
                Some(SharedRange { range: part, offset: map.offset + (part.address - map.start) })
            })
            .collect();
        let shared: u64 = parts.iter().map(|part| part.range.len).sum();
        Ok((shared == range.len).then_some(parts))
    }

    fn holds(&self, map: &MemoryMap) -> bool {
        map.shared && map.inode == self.inode && map.name.starts_with(ARENA_NAME)
    }

    /// Copies private memory into the arena and puts the copy in its place.
    fn take(&mut self, range: Range, protection: i32) -> Result<(), Errno> {
        let offset = self.next;
        let after = offset.checked_add(range.len).filter(|after| *after <= self.len);
        self.next = after.ok_or(Errno::ENOMEM)?.saturating_add(memory::page_size());
        let forks = FORKS.load(Ordering::Acquire);
        self.extents.push(Extent { offset, len: range.len, forks });
        let mut done = 0;
        while done < range.len {
            let len = (range.len - done).min(CHUNK);
            let chunk = Range { address: range.address + done, len };
            memory::write_file(self.memfd.as_fd(), offset + done, chunk)?;
            memory::replace(chunk, self.memfd.as_fd(), offset + done, protection)?;
            done += len;
        }
        Ok(())
    }

    /// Frees extents that the program has unmapped.
    fn release(&mut self, maps: &[MemoryMap]) {
        let forks = FORKS.load(Ordering::Acquire);
        let mapped = |extent: &Extent| {
            maps.iter().any(|map| {
                map.inode == self.inode
                    && map.offset < extent.offset + extent.len
                    && extent.offset < map.offset + (map.end - map.start)
            })
        };
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let memfd = self.memfd.as_fd();
        self.extents.retain(|extent| {
            if extent.forks != forks || mapped(extent) {
                return true;
            }
            let (offset, len) = (extent.offset.cast_signed(), extent.len.cast_signed());
            fallocate(memfd, flags, offset, len).is_err()
        });
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // The program closed the descriptor and may have opened another file with its number.
        if !self.usable()
            && let Ok(copy) = kernel::open_host_file(c"/dev/null")
        {
            let _ = std::mem::replace(&mut self.memfd, copy).into_raw_fd();
        }
    }
}

/// Notes a fork, in the parent.
pub fn forked() {
    FORKS.fetch_add(1, Ordering::AcqRel);
}

/// Gives a child of `fork()` a private view of its parent's shared memory.
pub fn separate() {
    let (fd, inode) = (ARENA.0.swap(-1, Ordering::AcqRel), ARENA.1.load(Ordering::Acquire));
    if fd < 0 || !kernel::status_of(fd).is_ok_and(|status| status.st_ino == inode) {
        return;
    }
    // SAFETY: the descriptor is the parent's arena, which the child has no owner of.
    let memfd = unsafe { OwnedFd::from_raw_fd(fd) };
    let page = memory::page_size();
    for map in memory_maps::read().unwrap_or_default() {
        if !map.shared || map.inode != inode || !map.name.starts_with(ARENA_NAME) {
            continue;
        }
        let range = Range { address: map.start, len: map.end - map.start };
        // Without memory for a view, the child shares the pages, as children of MAP_SHARED do.
        if memory::replace_private(range, memfd.as_fd(), map.offset, map.protection).is_ok() {
            memory::copy_page(map.start);
            memory::copy_page(map.end - page);
        }
    }
}
