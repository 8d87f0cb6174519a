//! The driver's device files for CUDA programs: a resource manager for one vGPU.
//!
//! NVIDIA's user-mode driver works on `/dev/nvidiactl`, `/dev/nvidiaN` and `/dev/nvidia-uvm`. A
//! [`NvidiaFrontEnd`] implements these files for all programs on a vGPU. It keeps a tree of *emulated*
//! objects. What changes the vGPU becomes a typed operation of its [`Client`], with handles,
//! addresses and sizes that the worker has made or checked. The rows of [`nvidia_rm`] say what is
//! done with each request.
//!
//! No request of a program is forwarded, except queries whose row has
//! [`ask`](nvidia_rm::table::Row::ask). [`query_driver`](mdev_core::gpu::Programs::query_driver)
//! passes their parameters to the GPU's driver, with exactly the length that the row has in the
//! tested series. They change nothing, and their parameters are numbers, neither pointers nor
//! handles (decision 0019).
//!
//! Reading order:
//!
//! 1. `call`: one ioctl, what it reads and what it changes
//! 2. `files`, `objects`, `memory`: the state
//!    * `extents`, `video_memory`: parts of a memory, and of the vGPU's
//!    * `descriptors`: how many files a process may have
//! 3. `escapes`, `alloc`, `control`: ioctls of the resource manager; `uvm`: of nvidia-uvm
//!    * `sharing`, `share_policy`: memory of other processes; `managed`: memory that CUDA manages
//!    * `file_memory`: memory that programs have registered
//! 4. [`identity`], [`Recorded`], `lists`: what the vGPU says of itself and of its GPU
//! 5. `faults`: what programs learn of their channels' errors
//! 6. `processes`, `status_page`: what `nvidia-smi` shows
//! 7. `journal`: the state, for a process that adopts the programs
//! 8. `refusals`: what programs asked for in vain; `shapes`: arguments, for the transport
//! 9. `testing` (feature `test-util`): front ends for tests

mod alloc;
mod call;
mod control;
mod descriptors;
mod escapes;
mod extents;
mod faults;
mod file_memory;
mod files;
pub mod identity;
mod journal;
mod lists;
mod managed;
mod memory;
mod objects;
mod processes;
mod refusals;
mod shapes;
mod share_policy;
mod sharing;
mod status_page;
#[cfg(feature = "test-util")]
pub mod testing;
mod uvm;
mod video_memory;

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};

use cuda_socket::{Fetch, FileId, IoctlRequest, MapRequest, Node, VERSION, Welcome};
use mdev_core::gpu::{Client, Pending};
use mdev_core::mem::SharedGuestMemory;
use nix::errno::Errno;
use nvidia_rm::generation::Generation;
use nvidia_rm::numbers::status;
use nvidia_rm::recording::Recorded;
use nvidia_rm::version::Layout;
use programs::front_end::{
    Changes, Damaged, FrontEnd, FrontEndSpec, GuestOutcome, Mapped, MemoryFileId, NewFiles, Opener,
    Outcome,
};
use programs::guest_memory::{FreedPages, GivenMemory};

use self::alloc::DOORBELL_BYTES;
use self::call::{Call, ProgramMemory, Stop};
use self::descriptors::Full;
use self::files::Files;
use self::identity::Identity;
use self::memory::files::Owner;
use self::memory::{Mappable, Memories};
use self::objects::{Clients, Kind, Object};
use self::refusals::Refusals;
pub use self::shapes::shapes;
use self::status_page::Utilization;
use crate::backend::BoxError;

/// Version of the driver that GPUs without a driver show to programs: that of Debian's libcuda.
pub const DRIVER_WITHOUT_GPU: &str = "550.163.01";

/// End of the GPU virtual addresses of programs.
const VA_END: u64 = 1 << 47;

/// The device files of a vGPU.
#[derive(Debug)]
pub struct NvidiaFrontEnd {
    identity: Identity,
    layout: Layout,
    queries: Recorded,
    /// Generation of the GPU, once a program has asked for an object.
    generation: Option<&'static Generation>,
    files: Files,
    clients: Clients,
    memories: Memories,
    refusals: Refusals,
    utilization: Utilization,
    last_group: u32,
    /// Limit of the descriptors of programs of the host.
    max_descriptors: usize,
}

/// Creates the device files of a vGPU.
///
/// # Errors
///
/// Fails if the driver's version is not supported.
pub fn create(spec: &FrontEndSpec) -> Result<Box<dyn FrontEnd>, BoxError> {
    let identity = Identity::of(spec);
    let layout = Layout::of_programs(&identity.driver)?;
    let queries = Recorded::hopper()?;
    let limits = (spec.max_system_bytes, spec.max_descriptors);
    Ok(Box::new(NvidiaFrontEnd::new(identity, layout, queries, limits)))
}

impl FrontEnd for NvidiaFrontEnd {
    fn welcome(&self) -> Welcome {
        Welcome {
            version: VERSION,
            minors: vec![Identity::MINOR],
            proc_files: self.identity.proc_files(),
            calls: shapes(&self.layout),
        }
    }

    fn open(&mut self, file: FileId, node: Node, opener: Opener) -> Result<(), Errno> {
        match node {
            Node::Gpu(minor) if minor != Identity::MINOR => Err(Errno::ENXIO),
            _ => {
                self.check_descriptor(opener.process).map_err(|full| match full {
                    Full::Process => Errno::EMFILE,
                    Full::All => Errno::ENFILE,
                })?;
                self.files.open(file, node, opener)
            }
        }
    }

    fn node(&self, file: FileId) -> Option<Node> {
        self.files.get(file).ok().map(|file| file.node)
    }

    fn open_files(&self) -> Vec<FileId> {
        self.files.open.keys().copied().collect()
    }

    /// Closes a file and frees the clients that were created with it.
    fn close(&mut self, gpu: &mut dyn Client, file: FileId) {
        if self.files.close(file).is_none() {
            return;
        }
        for root in self.clients.of_file(file) {
            if let Ok(removed) = self.clients.remove(file, root, root) {
                self.dispose(gpu, removed);
            }
        }
    }

    fn ioctl(
        &mut self,
        gpu: &mut dyn Client,
        request: &IoctlRequest,
        shared: Option<OwnedFd>,
    ) -> Outcome {
        let mut call = Call::new(request, ProgramMemory::Host(shared));
        let errno = match self.carry_out(gpu, &mut call) {
            Ok(errno) => errno,
            Err(Missing::Program(fetch)) => return Outcome::Fetch(fetch),
            Err(Missing::Allocation(_)) => Errno::ENOMEM as i32,
        };
        let (done, memory, _) = call.finish(errno);
        let files = memory.into_iter().filter_map(|memory| match memory {
            Mappable::File(file, _) => Some(file),
            Mappable::Guest(_) => None,
        });
        Outcome::Done(done, files.collect())
    }

    fn guest_ioctl(
        &mut self,
        gpu: &mut dyn Client,
        request: &IoctlRequest,
        memory: Vec<GivenMemory>,
    ) -> GuestOutcome {
        let mut call = Call::new(request, ProgramMemory::Guest(memory));
        let errno = match self.carry_out(gpu, &mut call) {
            Ok(errno) => errno,
            Err(Missing::Program(fetch)) => return GuestOutcome::Fetch(fetch),
            Err(Missing::Allocation(len)) => return GuestOutcome::Allocate(len),
        };
        let (done, memory, _) = call.finish(errno);
        let ids = memory.into_iter().filter_map(|memory| match memory {
            Mappable::Guest(id) => Some(id),
            Mappable::File(..) => None,
        });
        GuestOutcome::Done(done, ids.collect())
    }

    fn map(&mut self, request: &MapRequest) -> Result<Mapped, Errno> {
        let file = self.files.get(request.file).map_err(|_| Errno::EBADF)?;
        let is_uvm = file.node == Node::Uvm;
        let store = if is_uvm { self.pool(file, request)? } else { file.mapped };
        if is_uvm && store.is_none() {
            self.note_empty_range(request);
        }
        let store = store.ok_or(Errno::EINVAL)?;
        if self.memories.is_doorbell(store) {
            let inside = request.len <= DOORBELL_BYTES;
            return if inside { Ok(Mapped::Doorbell) } else { Err(Errno::EINVAL) };
        }
        let len = self.memories.len(store).map_err(|_| Errno::EINVAL)?;
        if request.len == 0 || request.len > len {
            return Err(Errno::EINVAL);
        }
        match self.memories.mappable(store).map_err(|_| Errno::EIO)? {
            Some(Mappable::File(file, offset)) => Ok(Mapped::File(file, offset)),
            Some(Mappable::Guest(pages)) => Ok(Mapped::Guest(pages)),
            None => Err(Errno::EINVAL),
        }
    }

    /// Writes the notifiers of channels that have failed. Returns the files of events that are due.
    fn on_gpu_event(&mut self, gpu: &mut dyn Client, pending: Pending) -> Vec<FileId> {
        self.pass_gpu_event(gpu, pending)
    }

    fn update_utilization(&mut self, gpu: &mut dyn Client) {
        self.sample_utilization(gpu);
    }

    fn used_video_bytes(&self) -> u64 {
        self.memories.video_bytes() - self.memories.free_video_bytes()
    }

    fn video_bytes_by_process(&self) -> BTreeMap<i32, u64> {
        self.bytes_by_process()
    }

    fn process_with_managed(&self) -> Option<i32> {
        self.managing_process()
    }

    fn set_guest(&mut self, memory: SharedGuestMemory) {
        self.memories.set_guest(memory);
    }

    fn set_files(&mut self, files: Box<dyn NewFiles>) {
        self.memories.set_files(files);
    }

    fn take_changes(&mut self) -> Option<Changes> {
        self.has_changed().then(|| self.changed_state().encode())
    }

    fn all(&self) -> Changes {
        self.whole_state().encode()
    }

    fn memory_file(&self, id: MemoryFileId) -> Option<BorrowedFd<'_>> {
        self.memories.file(id)
    }

    fn guest_pages(&self) -> Vec<(u64, usize)> {
        self.memories.guest_pages().collect()
    }

    fn adopt(
        &mut self,
        changes: &[Vec<u8>],
        freed: &FreedPages,
        take_file: &mut dyn FnMut(MemoryFileId) -> Option<OwnedFd>,
    ) -> Result<(), Damaged> {
        self.adopt_state(journal::State::follow(changes)?, freed, take_file)
    }
}

impl NvidiaFrontEnd {
    /// Creates the device files of a vGPU whose programs may have `max_system_bytes` of system
    /// memory and, on the host, `max_descriptors` files and files with memory.
    pub fn new(
        identity: Identity,
        layout: Layout,
        queries: Recorded,
        (max_system_bytes, max_descriptors): (u64, usize),
    ) -> Self {
        let memories = Memories::new(identity.vram_bytes, max_system_bytes);
        Self {
            identity,
            layout,
            queries,
            generation: None,
            files: Files::default(),
            clients: Clients::default(),
            memories,
            refusals: Refusals::default(),
            utilization: Utilization::default(),
            last_group: 0,
            max_descriptors,
        }
    }

    /// Checks that a process may have another open file, or file with memory.
    fn check_descriptor(&self, process: i32) -> Result<(), Full> {
        if self.memories.are_of_guest() {
            return Ok(());
        }
        let files = self.files.open.values().map(|file| file.opener.process);
        let holders = files.chain(self.memories.file_processes());
        descriptors::check(self.max_descriptors, process, holders)
    }

    /// Returns the owner of memory that is made with a file: the control file to which it belongs,
    /// or the file of nvidia-uvm.
    fn owner(&self, file: FileId) -> Result<Owner, Stop> {
        let file = self.files.control_of(file)?;
        let process = self.files.get(file)?.opener.process;
        let may_add = self.check_descriptor(process).is_ok();
        Ok(Owner { file, process, may_add })
    }

    /// Carries out an ioctl. Returns its `errno`, or 0.
    fn carry_out(&mut self, gpu: &mut dyn Client, call: &mut Call<'_>) -> Result<i32, Missing> {
        let node = self.files.get(call.file()).map(|file| file.node);
        let is_uvm = matches!(node, Ok(Node::Uvm));
        let result = match node {
            Ok(_) if is_uvm => self.uvm_ioctl(gpu, call),
            Ok(_) => self.rm_ioctl(gpu, call),
            Err(stop) => Err(stop),
        };
        let status = match result {
            Ok(()) => status::OK,
            Err(Stop::Fetch(fetch)) => return Err(Missing::Program(fetch)),
            Err(Stop::Allocate(len)) => return Err(Missing::Allocation(len)),
            Err(Stop::Errno(errno)) => return Ok(errno as i32),
            Err(Stop::Status(status)) => {
                let request = call.request();
                log::debug!("{request:#x} {:x?} ends with {status:#x}", call.argument.get(..24));
                status
            }
        };
        let form = if is_uvm { self.uvm_form(call.request()) } else { escapes::form(call) };
        Ok(call.set_status(form, status).map_or(Errno::EINVAL as i32, |()| 0))
    }

    /// Ends objects that were removed from the tree.
    fn dispose(&mut self, gpu: &mut dyn Client, removed: Vec<Object>) {
        for Object { kind, .. } in removed {
            let done = match kind {
                Kind::Channel { handle, ended: false, .. } => gpu.destroy_channel(handle.id),
                Kind::Memory(store) => {
                    self.memories.release(gpu, store);
                    Ok(())
                }
                Kind::Space(Some(space)) => {
                    let done = gpu.destroy_space(space);
                    if done.is_ok() {
                        self.clients.end_channels(space);
                    }
                    self.memories.forget_space(gpu, space);
                    done
                }
                _ => Ok(()),
            };
            if let Err(error) = done {
                log::warn!("{error}");
            }
        }
    }

    /// Returns the number of clients, objects, memory objects' stores and mappings.
    pub fn counts(&self) -> [usize; 4] {
        let ((clients, objects), (stores, mappings)) =
            (self.clients.counts(), self.memories.counts());
        [clients, objects, stores, mappings]
    }

    /// Returns the number of refused requests.
    pub fn refused(&self) -> u64 {
        self.refusals.count()
    }
}

/// What an ioctl needs first.
#[derive(Debug)]
enum Missing {
    /// Memory or files of the program.
    Program(Fetch),
    /// So many bytes of new memory of the VM.
    Allocation(u64),
}
