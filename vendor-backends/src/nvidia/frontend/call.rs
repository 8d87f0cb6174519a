//! An ioctl in progress: its argument, the program's memory, and what it changes.

use std::os::fd::{AsFd, OwnedFd};

use cuda_socket::{Block, Done, Fetch, FileId, IoctlRequest, Place, Range, SharedRange};
use mdev_core::gpu::GpuError;
use mdev_core::units::PAGE_SIZE;
use nix::errno::Errno;
use nvidia_rm::bytes::put_u32;
use nvidia_rm::numbers::status;
use nvidia_rm::table::Form;
use programs::guest_memory::GivenMemory;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::file_memory::FileMemory;
use super::memory::{Mappable, SystemMemory};

/// Why a request ends before its success.
#[derive(Debug)]
pub enum Stop {
    /// The program's memory is needed first. Nothing was changed.
    Fetch(Fetch),
    /// So many bytes of new memory of the VM are needed first. Nothing was changed.
    Allocate(u64),
    /// The resource manager's status (`NV_STATUS`).
    Status(u32),
    /// An error of the system call.
    Errno(Errno),
}

impl Stop {
    /// The request has an invalid form.
    pub const INVALID: Self = Self::Errno(Errno::EINVAL);
}

impl From<GpuError> for Stop {
    fn from(error: GpuError) -> Self {
        log::debug!("{error}");
        Self::Status(match error {
            // The program's side repeats the request.
            GpuError::Later(_) => return Self::Errno(Errno::EAGAIN),
            GpuError::Invalid(_) | GpuError::OutOfRange(_) | GpuError::Overlap(_) => {
                status::INVALID_ARGUMENT
            }
            GpuError::NotFound(_) => status::OBJECT_NOT_FOUND,
            GpuError::Limit(_) => status::INSUFFICIENT_RESOURCES,
            GpuError::Fragmented { .. } => status::NO_MEMORY,
            GpuError::Unsupported(_) => status::NOT_SUPPORTED,
            GpuError::Lost(_) => status::GPU_IS_LOST,
            GpuError::Io(error) => {
                log::warn!("{error}");
                status::INSUFFICIENT_RESOURCES
            }
        })
    }
}

/// An ioctl in progress.
#[derive(Debug)]
pub struct Call<'a> {
    request: &'a IoctlRequest,
    /// The argument, as the program gets it back.
    pub argument: Vec<u8>,
    memory: ProgramMemory,
    writes: Vec<Block>,
    places: Vec<(Place, Mappable)>,
}

/// Memory that came with an ioctl.
#[derive(Debug)]
pub enum ProgramMemory {
    /// File of [`IoctlRequest::shared`], of a program of the host.
    Host(Option<OwnedFd>),
    /// Pages of a VM, for a program there.
    Guest(Vec<GivenMemory>),
}

impl<'a> Call<'a> {
    /// Begins an ioctl that came with memory.
    pub fn new(request: &'a IoctlRequest, memory: ProgramMemory) -> Self {
        let argument = request.argument.clone();
        Self { request, argument, memory, writes: Vec::new(), places: Vec::new() }
    }

    /// Returns the file that the ioctl is for.
    pub fn file(&self) -> FileId {
        self.request.file
    }

    /// Returns the request number.
    pub fn request(&self) -> u32 {
        self.request.request
    }

    /// Ends the ioctl with an `errno`, or 0. Returns the memory of its places as well, and the
    /// memory that it did not use.
    pub fn finish(self, errno: i32) -> (Done, Vec<Mappable>, ProgramMemory) {
        let (places, memory) = self.places.into_iter().unzip();
        let Self { argument, writes, memory: rest, .. } = self;
        (Done { errno, argument, writes, places }, memory, rest)
    }

    /// Returns the argument as a structure, which may be shorter than the argument.
    pub fn read<T: FromBytes>(&self) -> Result<T, Stop> {
        T::read_from_prefix(&self.argument).map(|(value, _)| value).map_err(|_| Stop::INVALID)
    }

    /// Replaces the start of the argument.
    pub fn write<T: IntoBytes + Immutable>(&mut self, value: &T) -> Result<(), Stop> {
        value.write_to_prefix(&mut self.argument).map_err(|_| Stop::INVALID)
    }

    /// Changes the start of the argument.
    pub fn change<T: FromBytes + IntoBytes + Immutable>(
        &mut self,
        change: impl FnOnce(&mut T),
    ) -> Result<(), Stop> {
        let mut value = self.read()?;
        change(&mut value);
        self.write(&value)
    }

    /// Returns the address with which the argument of a request of nvidia-uvm begins.
    pub fn base(&self) -> Result<u64, Stop> {
        self.read()
    }

    /// Returns the address and the length with which the argument of a request of nvidia-uvm
    /// begins.
    pub fn range(&self) -> Result<(u64, u64), Stop> {
        let [base, length] = self.read()?;
        Ok((base, length))
    }

    /// Writes the status of the request, where the argument has it.
    pub fn set_status(&mut self, form: Option<&Form>, status: u32) -> Result<(), Stop> {
        match form.and_then(|form| form.status) {
            Some(at) => put_u32(&mut self.argument, at, status).ok_or(Stop::INVALID),
            None if status == status::OK => Ok(()),
            None => Err(Stop::INVALID),
        }
    }

    /// Returns a structure of the program's memory.
    pub fn params<T: FromBytes>(&self, address: u64) -> Result<T, Stop> {
        let bytes = self.block(address, size_of::<T>())?;
        T::read_from_bytes(&bytes).map_err(|_| Stop::INVALID)
    }

    /// Writes a structure to the program's memory when the ioctl ends.
    pub fn write_params<T: IntoBytes + Immutable>(&mut self, address: u64, params: &T) {
        self.write_block(address, params.as_bytes().to_vec());
    }

    /// Returns `len` bytes of the program's memory.
    pub fn block(&self, address: u64, len: usize) -> Result<Vec<u8>, Stop> {
        for Block { address: start, bytes } in &self.request.blocks {
            let from = address.checked_sub(*start).and_then(|from| usize::try_from(from).ok());
            let end = from.and_then(|from| from.checked_add(len));
            if let (Some(from), Some(end)) = (from, end)
                && let Some(found) = bytes.get(from..end)
            {
                return Ok(found.to_vec());
            }
        }
        if address == 0 {
            return Err(Stop::Errno(Errno::EFAULT));
        }
        let blocks = vec![Range { address, len: len as u64 }];
        Err(Stop::Fetch(Fetch { blocks, ..Default::default() }))
    }

    /// Writes to the program's memory when the ioctl ends.
    pub fn write_block(&mut self, address: u64, bytes: Vec<u8>) {
        if !bytes.is_empty() {
            self.writes.push(Block { address, bytes });
        }
    }

    /// Returns the file that a descriptor of the program stands for.
    pub fn file_of(&self, fd: i32) -> Result<FileId, Stop> {
        if let Some((_, file)) = self.request.files.iter().find(|(number, _)| *number == fd) {
            return Ok(*file);
        }
        if fd < 0 || self.request.refused.files.contains(&fd) {
            return Err(Stop::Errno(Errno::EBADF));
        }
        Err(Stop::Fetch(Fetch { files: vec![fd], ..Default::default() }))
    }

    /// Returns `len` bytes of new memory that programs can map.
    pub fn new_memory(&mut self, len: u64) -> Result<SystemMemory, Stop> {
        let ProgramMemory::Guest(given) = &mut self.memory else { return Ok(SystemMemory::New) };
        let len = len.checked_next_multiple_of(PAGE_SIZE).filter(|len| *len > 0);
        let len = len.ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        let fits = |one: &GivenMemory| one.range.is_none() && one.pages.bytes() == len;
        match given.iter().position(fits) {
            Some(at) => Ok(SystemMemory::Guest(given.swap_remove(at).pages)),
            None => Err(Stop::Allocate(len)),
        }
    }

    /// Returns memory of the program.
    pub fn share(&mut self, range: Range) -> Result<SystemMemory, Stop> {
        if let ProgramMemory::Guest(given) = &mut self.memory
            && let Some(at) = given.iter().position(|one| one.range == Some(range))
        {
            return Ok(SystemMemory::Guest(given.swap_remove(at).pages));
        }
        if self.request.refused.share.contains(&range) {
            return Err(Stop::Status(status::INVALID_ADDRESS));
        }
        match &mut self.memory {
            ProgramMemory::Host(file) if !self.request.shared.is_empty() => {
                let parts = parts_of(range, &self.request.shared);
                let memory = parts.and_then(|parts| {
                    let file = file.take()?;
                    let memory = FileMemory::of_program(file.as_fd(), parts)?;
                    Some(SystemMemory::Registered(file, memory))
                });
                memory.ok_or(Stop::Status(status::INVALID_ADDRESS))
            }
            _ => Err(Stop::Fetch(Fetch { share: vec![range], ..Default::default() })),
        }
    }

    /// Maps memory into the program when the ioctl ends.
    pub fn place(&mut self, range: Range, memory: Mappable) {
        self.places.push((Place { range, offset: memory.offset() }, memory));
    }
}

/// Returns the offsets and lengths of the parts that a range consists of, in order. `None` if they
/// are not all of the range.
fn parts_of(range: Range, shared: &[SharedRange]) -> Option<Vec<(u64, u64)>> {
    let end = range.address.checked_add(range.len)?;
    let mut shared: Vec<_> = shared.iter().collect();
    shared.sort_unstable_by_key(|part| part.range.address);
    let (mut parts, mut at) = (Vec::new(), range.address);
    for SharedRange { range: Range { address, len }, offset } in shared {
        if *address != at {
            return None;
        }
        at = at.checked_add(*len).filter(|at| *at <= end)?;
        parts.push((*offset, *len));
    }
    (at == end).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_range_are_taken_in_its_order_and_must_be_all_of_it() {
        let range = Range { address: 0x1000, len: 0x3000 };
        let part = |address, len, offset| SharedRange { range: Range { address, len }, offset };
        let (first, second) = (part(0x1000, 0x1000, 0x8000), part(0x2000, 0x2000, 0));
        let in_order = vec![(0x8000, 0x1000), (0, 0x2000)];
        assert_eq!(parts_of(range, &[second, first]), Some(in_order));
        let bad = [
            vec![],
            vec![first],
            vec![second],
            vec![first, first, second],
            vec![first, part(0x2000, 0x3000, 0)],
            vec![first, second, part(0x4000, 0x1000, 0)],
            vec![first, part(0x2000, u64::MAX, 0)],
        ];
        for shared in bad {
            assert_eq!(parts_of(range, &shared), None, "{shared:x?}");
        }
        assert_eq!(parts_of(Range { address: u64::MAX, len: 2 }, &[first]), None);
    }

    #[test]
    fn what_is_possible_later_is_repeated_by_the_programs_side() {
        let later = GpuError::Later("soon after faults");
        assert!(matches!(Stop::from(later), Stop::Errno(Errno::EAGAIN)));
    }
}
