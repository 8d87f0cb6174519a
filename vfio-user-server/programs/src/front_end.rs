//! The device files of a GPU's driver for all programs on a vGPU.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::{fmt, io};

use cuda_socket::{Done, Fetch, FileId, IoctlRequest, MapRequest, Node, Welcome};
use mdev_core::gpu::{Client, Pending};
use mdev_core::ids::VgpuId;
use mdev_core::mem::SharedGuestMemory;
use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use crate::guest_memory::{FreedPages, GivenMemory};

/// What a new front end has to know of its vGPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrontEndSpec {
    /// The vGPU. Its UUID is that of the GPU which programs see.
    pub vgpu: VgpuId,
    /// Name of the GPU.
    pub name: String,
    /// Version of the GPU's driver. `None` for a GPU without one.
    pub driver: Option<String>,
    /// Video memory, in bytes.
    pub vram_bytes: u64,
    /// System memory that programs may have for the GPU, in bytes.
    pub max_system_bytes: u64,
    /// Limit of the descriptors of programs of the host: open files, and files with memory.
    pub max_descriptors: usize,
}

/// Process that opened a device node, of the host or of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opener {
    /// Id of the process. None that is not positive is known.
    pub process: i32,
    /// Tells processes apart that had the same id one after the other. 0 in a VM, whose driver
    /// names the id alone.
    pub instance: u64,
    /// Effective user, if known.
    pub user: Option<u32>,
}

impl Opener {
    /// Creates a description of a process.
    pub const fn new(process: i32, user: Option<u32>) -> Self {
        Self { process, instance: 0, user }
    }

    /// Returns the description with a number that no other process of this id has.
    #[must_use]
    pub const fn with_instance(self, instance: u64) -> Self {
        Self { instance, ..self }
    }

    /// Returns whether both are known to be one process.
    pub fn is_same_process(&self, other: &Self) -> bool {
        self.process > 0 && (self.process, self.instance) == (other.process, other.instance)
    }

    /// Returns whether both are known to be of one user.
    pub fn is_same_user(&self, other: &Self) -> bool {
        self.user.is_some() && self.user == other.user
    }
}

/// The device files of a driver, as programs on a vGPU use them.
///
/// Requests come from programs: nothing in them is trusted. They have their effects on the vGPU
/// through its [`Client`] alone.
pub trait FrontEnd: fmt::Debug + Send {
    /// Returns what a program has to know first.
    fn welcome(&self) -> Welcome;

    /// Opens a device node for a process. `file` is a new id.
    ///
    /// # Errors
    ///
    /// Returns what `open()` fails with.
    fn open(&mut self, file: FileId, node: Node, opener: Opener) -> Result<(), Errno>;

    /// Returns the device node of an open file.
    fn node(&self, file: FileId) -> Option<Node>;

    /// Returns the open files.
    fn open_files(&self) -> Vec<FileId>;

    /// Closes a file and frees what was created with it.
    fn close(&mut self, gpu: &mut dyn Client, file: FileId);

    /// Carries out an ioctl of a program of the host. `shared` is the file that came with it.
    fn ioctl(
        &mut self,
        gpu: &mut dyn Client,
        request: &IoctlRequest,
        shared: Option<OwnedFd>,
    ) -> Outcome;

    /// Carries out an ioctl of a program in a VM, with memory that came with it.
    fn guest_ioctl(
        &mut self,
        gpu: &mut dyn Client,
        request: &IoctlRequest,
        memory: Vec<GivenMemory>,
    ) -> GuestOutcome;

    /// Returns the memory that a mapping of a file shows.
    ///
    /// # Errors
    ///
    /// Returns what `mmap()` fails with.
    fn map(&mut self, request: &MapRequest) -> Result<Mapped, Errno>;

    /// Passes conditions of the GPU to programs. Returns the files that become readable, in
    /// ascending order.
    fn on_gpu_event(&mut self, gpu: &mut dyn Client, pending: Pending) -> Vec<FileId>;

    /// Reads how much of the engine the vGPU uses, for programs that ask for it.
    fn update_utilization(&mut self, gpu: &mut dyn Client);

    /// Returns the bytes of video memory that programs have allocated.
    fn used_video_bytes(&self) -> u64;

    /// Returns the bytes of video memory that each process has allocated.
    fn video_bytes_by_process(&self) -> BTreeMap<i32, u64>;

    /// Returns a process that has managed memory, which cannot be saved.
    fn process_with_managed(&self) -> Option<i32>;

    /// Makes the programs those of a VM with this memory.
    fn set_guest(&mut self, memory: SharedGuestMemory);

    /// Sets the maker of files for programs of the host.
    fn set_files(&mut self, files: Box<dyn NewFiles>);

    /// Returns what has changed since the last call, if something has.
    fn take_changes(&mut self) -> Option<Changes>;

    /// Returns all of the state, as changes of a new front end.
    fn all(&self) -> Changes;

    /// Returns a file with system memory.
    fn memory_file(&self, id: MemoryFileId) -> Option<BorrowedFd<'_>>;

    /// Returns ids and numbers of ranges of a VM's pages that are in use.
    fn guest_pages(&self) -> Vec<(u64, usize)>;

    /// Adopts the programs of another process, from the changes in its journal, in order. Nothing
    /// may have used this front end. `take_file` returns the files with system memory.
    /// Makes no request to the GPU.
    ///
    /// A compromised worker may have written the changes. They can harm that vGPU only.
    ///
    /// # Errors
    ///
    /// Fails if the state is damaged.
    fn adopt(
        &mut self,
        changes: &[Vec<u8>],
        freed: &FreedPages,
        take_file: &mut dyn FnMut(MemoryFileId) -> Option<OwnedFd>,
    ) -> Result<(), Damaged>;
}

/// What a program of the host gets from an ioctl.
#[derive(Debug)]
pub enum Outcome {
    /// It is to send more of its memory.
    Fetch(Fetch),
    /// The result, with the files of its places.
    Done(Done, Vec<OwnedFd>),
}

/// What a program in a VM gets from an ioctl.
#[derive(Debug)]
pub enum GuestOutcome {
    /// It is to send more of its memory.
    Fetch(Fetch),
    /// So many bytes of new memory are needed. Nothing has changed.
    Allocate(u64),
    /// The result, with the ids of its places' pages.
    Done(Done, Vec<u64>),
}

/// Memory to map into a program.
#[derive(Debug)]
pub enum Mapped {
    /// The doorbell page.
    Doorbell,
    /// A file, from an offset in bytes.
    File(OwnedFd, u64),
    /// Pages of a VM, by their id.
    Guest(u64),
}

/// Number of a file with system memory, which several memory objects may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemoryFileId(pub u32);

/// Maker of files for new system memory.
pub trait NewFiles: fmt::Debug + Send {
    /// Returns a file of `len` bytes of zeros with a number. A process that repeats another's
    /// request must get the same file, which the GPU may have.
    ///
    /// # Errors
    ///
    /// Fails if there is no memory or descriptor.
    fn create(&mut self, id: MemoryFileId, len: u64) -> io::Result<OwnedFd>;
}

/// Changes of a front end, for a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// The changes, in the front end's own form.
    pub bytes: Vec<u8>,
    /// [Files with memory](FrontEnd::memory_file) that may be new or gone.
    pub files: Vec<MemoryFileId>,
}

/// A recorded state contradicts itself, or is beyond a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("The recorded state of the programs is damaged: {0}")]
pub struct Damaged(pub &'static str);
