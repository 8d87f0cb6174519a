//! Files with the system memory of programs. Each takes a descriptor of the worker.
//!
//! An *arena* is a file that the worker makes. Memory objects that are small beside their program's
//! memory lie in arenas together, so a program needs few descriptors however many objects it has.
//! A larger one has an arena of its own.
//!
//! A program that maps an object gets the file, and could map all of it. So an arena has memory of
//! one owner: a control file, or a file of nvidia-uvm, with which all of its objects were made.
//! Pages that are freed read as zeros when the owner gets them again.
//!
//! Memory that a program has registered lies in files of the program. Those of several objects are
//! often the same one, which is kept once.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use cuda_socket::FileId;
use ipc::mem::sealed_memfd;
use mdev_core::gpu::{Client, GpuError, GuestRam};
use mdev_core::ids::MemoryId;
use mdev_core::memory_file::MemoryFile;
use mdev_core::units::{GIB, MIB, PAGE_SIZE, is_aligned};
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};
use nix::sys::stat::fstat;
use nvidia_rm::numbers::status;
use programs::change_map::{ChangeMap, Changed};
use programs::front_end::{Damaged, MemoryFileId, NewFiles};
use serde::{Deserialize, Serialize};

use super::{Extent, Extents, Stop};

/// Lengths of arenas with several objects, in bytes. The next arena of an owner has a quarter of
/// the owner's bytes, within these limits: the number of arenas grows with the logarithm of the
/// bytes, and at most a fifth of them is unused.
const MIN_ARENA: u64 = 4 * MIB;
const MAX_ARENA: u64 = GIB;

/// Part of an arena that an object may have at most, to be with others in it.
const MAX_PART: u64 = 4;

/// What asks for memory.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// The control file, or file of nvidia-uvm.
    pub file: FileId,
    /// Process that opened it.
    pub process: i32,
    /// Whether the process may have another descriptor.
    pub may_add: bool,
}

/// File with memory of a program.
#[derive(Debug)]
struct File {
    fd: std::fs::File,
    owner: FileId,
    /// Process that has the descriptor in its share.
    process: i32,
    contents: Contents,
}

#[derive(Debug)]
enum Contents {
    Arena(Arena),
    /// Registered memory, of so many stores.
    Registered(u32),
}

#[derive(Debug)]
struct Arena {
    extents: Extents,
    /// It may have several objects.
    is_shared: bool,
    /// Its import into the GPU, once it was needed.
    import: Option<MemoryId>,
}

/// A file without its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    owner: FileId,
    process: i32,
    arena: Option<ArenaState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ArenaState {
    len: u64,
    is_shared: bool,
    import: Option<MemoryId>,
}

/// Place of a store in an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArenaPlace {
    /// The arena.
    pub file: MemoryFileId,
    /// Offset in bytes.
    pub start: u64,
}

/// All files with memory of a vGPU's programs.
#[derive(Debug, Default)]
pub struct Files {
    by_id: ChangeMap<MemoryFileId, File>,
    last: u32,
    /// Length of all arenas, in bytes.
    arena_bytes: u64,
    /// Maker of files, if they are not this process' own.
    maker: Option<Box<dyn NewFiles>>,
}

impl Files {
    /// Sets the maker of files.
    pub fn set_maker(&mut self, maker: Box<dyn NewFiles>) {
        self.maker = Some(maker);
    }

    /// Returns the length of all arenas, in bytes.
    pub fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    /// Returns the processes of the descriptors, one for each.
    pub fn processes(&self) -> impl Iterator<Item = i32> {
        self.by_id.values().map(|file| file.process)
    }

    /// Returns a file.
    pub fn file(&self, id: MemoryFileId) -> Option<&std::fs::File> {
        self.by_id.get(&id).map(|file| &file.fd)
    }

    /// Returns the owner of a file that has other memory of the owner, too, or may get it.
    pub fn sole_owner(&self, id: MemoryFileId) -> Option<FileId> {
        match self.by_id.get(&id) {
            Some(File { contents: Contents::Arena(Arena { is_shared: false, .. }), .. }) | None => {
                None
            }
            Some(file) => Some(file.owner),
        }
    }

    /// Allocates `len` bytes, a multiple of the page size, in an arena. Other objects are in the
    /// arena, too, unless `is_alone` is true. All arenas may become `room` bytes longer.
    ///
    /// # Errors
    ///
    /// `NV_ERR_NO_MEMORY` if that is too little, `NV_ERR_INSUFFICIENT_RESOURCES` if the owner's
    /// process may have no more descriptors, or the worker cannot make a file.
    pub fn allocate(
        &mut self,
        owner: Owner,
        len: u64,
        is_alone: bool,
        room: u64,
    ) -> Result<ArenaPlace, Stop> {
        let mut total = 0;
        for (id, file) in self.by_id.iter_mut_unnoted() {
            let Contents::Arena(arena) = &mut file.contents else { continue };
            if file.owner != owner.file {
                continue;
            }
            total += arena.extents.total();
            if arena.is_shared
                && !is_alone
                && let Some(start) = arena.extents.allocate_one(len)
            {
                return Ok(ArenaPlace { file: *id, start });
            }
        }
        if len > room {
            return Err(Stop::Status(status::NO_MEMORY));
        }
        let shared = (total / 4).next_multiple_of(MIB).clamp(MIN_ARENA, MAX_ARENA);
        let is_shared = !is_alone && len <= shared / MAX_PART && shared <= room;
        let bytes = if is_shared { shared } else { len };
        let id = self.new_id(owner)?;
        let fd = match &mut self.maker {
            Some(maker) => maker.create(id, bytes),
            None => sealed_memfd(c"cuda", bytes),
        };
        let fd = std::fs::File::from(fd.map_err(GpuError::from)?);
        let mut extents = Extents::new(bytes, PAGE_SIZE);
        let start = extents.allocate_one(len).ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        let contents = Contents::Arena(Arena { extents, is_shared, import: None });
        self.insert(id, File { fd, owner: owner.file, process: owner.process, contents });
        self.arena_bytes += bytes;
        Ok(ArenaPlace { file: id, start })
    }

    /// Returns the id of a new file.
    fn new_id(&self, owner: Owner) -> Result<MemoryFileId, Stop> {
        let next = self.last.checked_add(1).filter(|_| owner.may_add);
        next.map(MemoryFileId).ok_or(Stop::Status(status::INSUFFICIENT_RESOURCES))
    }

    fn insert(&mut self, id: MemoryFileId, file: File) {
        self.last = id.0;
        self.by_id.insert(id, file);
    }

    /// Adds a program's file for a store with registered memory, or finds it.
    pub fn add_registered(&mut self, owner: Owner, fd: OwnedFd) -> Result<MemoryFileId, Stop> {
        let new = FileIdentity::of(&fd).map_err(GpuError::from)?;
        for (id, file) in self.by_id.iter_mut_unnoted() {
            if file.owner == owner.file
                && let Contents::Registered(stores) = &mut file.contents
                && FileIdentity::of(&file.fd).is_ok_and(|known| known == new)
            {
                *stores += 1;
                return Ok(*id);
            }
        }
        let id = self.new_id(owner)?;
        let contents = Contents::Registered(1);
        self.insert(
            id,
            File { fd: fd.into(), owner: owner.file, process: owner.process, contents },
        );
        Ok(id)
    }

    /// Ends a store with registered memory.
    pub fn release_registered(&mut self, id: MemoryFileId) {
        if let Some(File { contents: Contents::Registered(stores), .. }) =
            self.by_id.get_mut_unnoted(&id)
        {
            *stores -= 1;
            if *stores == 0 {
                self.by_id.remove(&id);
            }
        }
    }

    /// Returns the import of an arena.
    pub fn import(&mut self, gpu: &mut dyn Client, id: MemoryFileId) -> Result<MemoryId, GpuError> {
        const NONE: GpuError = GpuError::NotFound("memory");
        let file = self.by_id.get(&id).ok_or(NONE)?;
        let Contents::Arena(arena) = &file.contents else { return Err(NONE) };
        if let Some(import) = arena.import {
            return Ok(import);
        }
        let len = arena.extents.total();
        let import =
            gpu.import(GuestRam { fd: file.fd.as_fd(), offset: 0, len, writable: true })?;
        if let Some(File { contents: Contents::Arena(arena), .. }) = self.by_id.get_mut(&id) {
            arena.import = Some(import);
        }
        Ok(import)
    }

    /// Writes bytes of an object in an arena, from an offset in the object.
    pub fn write(&self, place: ArenaPlace, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let file = self.file(place.file).ok_or(io::ErrorKind::NotFound)?;
        file.write_all_at(bytes, place.start + offset)
    }

    /// Frees `len` bytes of an arena, and the arena with its last object. Returns its import, which
    /// the caller releases. `pins` tells whether the driver pins the pages of imports.
    pub fn free(&mut self, place: ArenaPlace, len: u64, pins: bool) -> Option<MemoryId> {
        let ArenaPlace { file: id, start: offset } = place;
        let file = self.by_id.get_mut_unnoted(&id)?;
        let Contents::Arena(arena) = &mut file.contents else { return None };
        arena.extents.release(&[Extent { offset, len }]);
        if arena.extents.is_unused() {
            let (bytes, import) = (arena.extents.total(), arena.import);
            self.by_id.remove(&id);
            self.arena_bytes -= bytes;
            return import;
        }
        // In the place of a pinned page, the program would get another one than the GPU has.
        let cleared = match arena.import {
            Some(_) if pins => write_zeros(&file.fd, offset, len),
            _ => punch_hole(&file.fd, offset, len),
        };
        // The same program alone can get the memory.
        if let Err(error) = cleared {
            log::warn!("Cannot clear memory that a program has freed: {error}");
        }
        None
    }

    /// Returns whether something has changed since the last [`Self::take_changes`].
    pub fn is_changed(&self) -> bool {
        self.by_id.is_changed()
    }

    /// Returns what has changed since the last call.
    pub fn take_changes(&mut self) -> Vec<Changed<MemoryFileId, FileState>> {
        self.by_id.take_changes(File::state)
    }

    /// Returns all of the state.
    pub fn all(&self) -> Vec<Changed<MemoryFileId, FileState>> {
        self.by_id.all(File::state)
    }

    /// Returns the number of the last file.
    pub fn last(&self) -> u32 {
        self.last
    }

    /// Adopts the files of another process, without stores.
    pub fn adopt(
        &mut self,
        last: u32,
        states: BTreeMap<MemoryFileId, FileState>,
        take_file: &mut dyn FnMut(MemoryFileId) -> Option<OwnedFd>,
    ) -> Result<(), Damaged> {
        let mut files = BTreeMap::new();
        self.last = states.keys().next_back().map_or(last, |id| id.0.max(last));
        for (id, FileState { owner, process, arena }) in states {
            let fd = take_file(id).ok_or(Damaged("a file of memory is missing"))?;
            let fd = std::fs::File::from(fd);
            let contents = match arena {
                Some(ArenaState { len, is_shared, import }) => {
                    let size = MemoryFile::new(fd.as_fd()).and_then(|file| file.len());
                    let total = self.arena_bytes.checked_add(len);
                    let fits =
                        len > 0 && is_aligned(len, PAGE_SIZE) && size.is_ok_and(|it| it == len);
                    let total = total.filter(|_| fits);
                    self.arena_bytes = total.ok_or(Damaged("an arena has another length"))?;
                    let extents = Extents::new(len, PAGE_SIZE);
                    Contents::Arena(Arena { extents, is_shared, import })
                }
                None => Contents::Registered(0),
            };
            files.insert(id, File { fd, owner, process, contents });
        }
        self.by_id = ChangeMap::unchanged(files);
        Ok(())
    }

    /// Adopts the place of a store in an arena. Returns false if that is impossible.
    pub fn adopt_place(&mut self, ArenaPlace { file, start }: ArenaPlace, len: u64) -> bool {
        match self.by_id.get_mut_unnoted(&file) {
            Some(File { contents: Contents::Arena(arena), .. }) => {
                arena.extents.take_again(Extent { offset: start, len })
            }
            _ => false,
        }
    }

    /// Adopts a store with registered memory. Returns the file.
    pub fn adopt_registered(&mut self, id: MemoryFileId) -> Option<BorrowedFd<'_>> {
        let file = self.by_id.get_mut_unnoted(&id)?;
        let Contents::Registered(stores) = &mut file.contents else { return None };
        *stores = stores.checked_add(1)?;
        Some(file.fd.as_fd())
    }

    /// Checks that each adopted file has a store.
    pub fn check_adopted(&self) -> Result<(), Damaged> {
        let is_used = |file: &File| match &file.contents {
            Contents::Arena(arena) => !arena.extents.is_unused(),
            Contents::Registered(stores) => *stores > 0,
        };
        let all_used = self.by_id.values().all(is_used);
        if all_used { Ok(()) } else { Err(Damaged("a file has no memory")) }
    }
}

impl File {
    fn state(&self) -> FileState {
        let arena = match &self.contents {
            Contents::Arena(Arena { extents, is_shared, import }) => {
                Some(ArenaState { len: extents.total(), is_shared: *is_shared, import: *import })
            }
            Contents::Registered(_) => None,
        };
        FileState { owner: self.owner, process: self.process, arena }
    }
}

/// What tells whether two descriptors are of one file, with the same rights.
#[derive(Debug, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
    flags: OFlag,
}

impl FileIdentity {
    fn of(fd: impl AsFd) -> io::Result<Self> {
        let stat = fstat(&fd)?;
        let flags = OFlag::from_bits_truncate(fcntl(&fd, FcntlArg::F_GETFL)?);
        Ok(Self { device: stat.st_dev, inode: stat.st_ino, flags })
    }
}

fn punch_hole(file: &std::fs::File, offset: u64, len: u64) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    Ok(fallocate(file, flags, offset.cast_signed(), len.cast_signed())?)
}

fn write_zeros(file: &std::fs::File, offset: u64, len: u64) -> io::Result<()> {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    for done in (0..len).step_by(ZEROS.len()) {
        let bytes = (len - done).min(ZEROS.len() as u64) as usize;
        file.write_all_at(&ZEROS[..bytes], offset + done)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
