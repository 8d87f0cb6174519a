//! Fake resource manager: objects, checks and failures of NVIDIA's driver, without a GPU.
//!
//! It refuses what the driver refuses. Errors that the driver accepts and the hardware would suffer
//! from, such as freeing an object in use, are in [`FakeRm::violations`].

mod allocations;
mod controls;
mod engines;
mod ioctls;
mod objects;
mod params;
mod probes;
mod process;

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::abi::{Call, EventData, Free, UtilizationSample};
use crate::generation::{Generation, HOPPER};
use crate::rm::{Node, Request, Rm};
use crate::version::Layout;
use nix::fcntl::OFlag;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::pipe2;

pub use controls::FAILED_MULTIPROCESSOR;
pub use engines::Engines;
use objects::Objects;
pub use process::FakeProcess;

/// PCI address of the fake GPU.
pub const ADDRESS: &str = "0000:3b:00.0";

/// Video memory of the fake GPU, in bytes.
pub const VIDEO_MEMORY: u64 = 80 << 30;

/// Contexts in the log of context switches: those of guests, and those of workers' probes.
const GUEST_CONTEXT: u32 = 1;
const PROBE_CONTEXT: u32 = 2;

/// Device and inode number of an open file, which duplicated descriptors share. Inodes of memory
/// files and of pipes are numbered apart.
type FileId = (u64, u64);

/// Open device node.
#[derive(Debug)]
struct OpenFile {
    file: FileId,
    node: Node,
    /// The file is attached to a control file.
    registered: bool,
    /// The file is prepared for `mmap`.
    mapped: bool,
}

#[derive(Debug, Default)]
struct State {
    files: Vec<OpenFile>,
    objects: Objects,
    calls: u64,
    fail_at: Option<u64>,
    /// Class for whose next allocations there is no memory, and their number.
    no_memory: (u32, u32),
    log: Vec<String>,
    /// Both ends of event pipes, by the file that both are. A pipe without a writer would poll as
    /// hung up.
    event_pipes: BTreeMap<FileId, [OwnedFd; 2]>,
    /// Files for events, by their clients and numbers.
    event_files: BTreeMap<(u32, u32), FileId>,
    /// Events with data that nobody has taken.
    events: VecDeque<(FileId, EventData)>,
    /// Generation of the GPU, if it is not Hopper.
    generation: Option<&'static Generation>,
    /// Process that calls.
    process: u32,
    /// Samples of the utilization. The control is not supported before the first.
    utilization: Vec<UtilizationSample>,
}

impl State {
    fn generation(&self) -> &'static Generation {
        self.generation.unwrap_or(&HOPPER)
    }
}

/// Fake driver.
#[derive(Debug)]
pub struct FakeRm {
    version: String,
    layout: Option<Layout>,
    state: Mutex<State>,
}

impl FakeRm {
    /// Creates a driver with a version.
    pub fn new(version: &str) -> Arc<Self> {
        let layout = Layout::of(version).ok();
        Arc::new(Self { version: version.into(), layout, state: Mutex::default() })
    }

    /// Creates a driver for a GPU of a generation.
    pub fn of_generation(version: &str, generation: &'static Generation) -> Arc<Self> {
        let rm = Self::new(version);
        rm.state().generation = Some(generation);
        rm
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of objects.
    pub fn objects(&self) -> usize {
        self.state().objects.count()
    }

    /// Describes all objects and mappings, without tokens.
    pub fn describe(&self) -> Vec<String> {
        self.state().objects.describe()
    }

    /// Returns the number of calls so far.
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Makes a call fail. `number` counts as [`Self::calls`] does.
    pub fn fail_at(&self, number: Option<u64>) {
        self.state().fail_at = number;
    }

    /// Makes the next allocations of a class fail for lack of memory.
    pub fn run_out_of_memory(&self, class: u32, allocations: u32) {
        self.state().no_memory = (class, allocations);
    }

    /// Returns the errors that the driver would have accepted.
    pub fn violations(&self) -> Vec<String> {
        self.state().objects.violations.clone()
    }

    /// Takes the log: a line for each call since the previous call of this function.
    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.state().log)
    }

    /// Reports an error of the channel with a token, as the hardware's robust-channel recovery
    /// does.
    pub fn fault(&self, token: u32, code: u32) {
        self.state().objects.fault(token, code);
    }

    /// Raises an exception of a kernel in the channel with a token, by the number of the compute
    /// class's notifier. Returns whether a debugger watches it.
    pub fn raise_exception(&self, token: u32, notifier: u32) -> bool {
        let mut state = self.state();
        let raised = state.objects.exception_events(token, notifier);
        for (file, object, index) in &raised {
            let data = EventData { object: *object, index: *index, ..Default::default() };
            state.events.push_back((*file, data));
            if let Some([_, writer]) = state.event_pipes.get(file) {
                let _ = nix::unistd::write(writer, &[0]);
            }
        }
        !raised.is_empty()
    }

    /// Returns the tokens of the channels that were enabled when their group was scheduled.
    pub fn started(&self) -> Vec<u32> {
        self.state().objects.started.clone()
    }

    /// Returns whether the channel with a token is on the runlist and enabled.
    pub fn may_run(&self, token: u32) -> bool {
        self.state().objects.may_run(token)
    }

    /// Returns the time slice of the group of the channel with a token, in microseconds.
    pub fn timeslice_us(&self, token: u32) -> Option<u64> {
        self.state().objects.timeslice_us(token)
    }

    /// Returns the engine of the channel with a token, and whether the channel is on the second
    /// runqueue.
    pub fn placement(&self, token: u32) -> Option<(u32, bool)> {
        self.state().objects.placement(token)
    }

    /// Returns whether the GPU may cache what is mapped at an address in any address space.
    pub fn gpu_caches(&self, va: u64) -> Option<bool> {
        self.state().objects.gpu_caches(va)
    }

    /// Returns the size of allocated video memory, in bytes.
    pub fn video_memory(&self) -> u64 {
        self.state().objects.video_memory()
    }

    /// Returns the token that was written to the doorbell last.
    pub fn last_ring(&self) -> Option<u32> {
        self.state().objects.last_ring()
    }

    /// Sets the GPU's clock.
    pub fn set_clock(&self, now_ns: u64) {
        self.state().objects.set_clock(now_ns);
    }

    /// Logs the start or the end of a residency of `process` on the compute engine.
    pub fn log_residency(&self, start: bool, process: u64, at_ns: u64) {
        let tag = if start { crate::ctxsw_record::START } else { crate::ctxsw_record::END };
        self.state().objects.log_context_switch(tag, GUEST_CONTEXT, process, at_ns);
    }

    /// Adds a sample of the compute engine's utilization, in hundredths of a percent.
    pub fn add_utilization(&self, at_ns: u64, hundredths: u32) {
        let mut sample = UtilizationSample { at_ns, ..Default::default() };
        sample.engines[1].hundredths = hundredths;
        self.state().utilization.push(sample);
    }

    /// Sets whether the compute engine executes a kernel that does not end. Meanwhile no probe is
    /// served.
    pub fn hold_engine(&self, held: bool) {
        self.state().objects.engine_held = held;
    }

    /// Returns the number of entries that the GPU has fetched from rings of workers' probes.
    pub fn probes(&self) -> u64 {
        self.state().objects.fetched
    }
}

impl Rm for FakeRm {
    fn version(&self) -> io::Result<String> {
        Ok(self.version.clone())
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        let mut state = self.state();
        state.count_call()?;
        let fd = match node {
            Node::Control | Node::Gpu(0) => memfd_create("fake-rm", MFdFlags::MFD_CLOEXEC)?,
            Node::Event => {
                let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
                let pipe = [reader.try_clone()?, writer];
                state.event_pipes.insert(file_id(&reader)?, pipe);
                reader
            }
            Node::Gpu(_) => return Err(io::ErrorKind::NotFound.into()),
        };
        let file = file_id(&fd)?;
        state.files.push(OpenFile { file, node, registered: false, mapped: false });
        Ok(fd)
    }

    fn ioctl(&self, fd: BorrowedFd<'_>, request: &mut Request<'_>) -> io::Result<()> {
        self.ioctl_of(0, fd, request)
    }
}

impl FakeRm {
    /// Carries out one ioctl of a process.
    fn ioctl_of(
        &self,
        process: u32,
        fd: BorrowedFd<'_>,
        request: &mut Request<'_>,
    ) -> io::Result<()> {
        let layout = self.layout.ok_or(io::ErrorKind::InvalidInput)?;
        let file = file_id(&fd)?;
        let mut state = self.state();
        state.process = process;
        // Freeing does not fail for lack of resources.
        if request.number != <Free as Call>::NUMBER {
            state.count_call()?;
        }
        let line = format!("{} {}", request.name, ioctls::describe(request));
        state.log.push(line);
        ioctls::execute(&mut state, &layout, file, request)
    }
}

impl State {
    /// Counts a call. Fails the one that [`FakeRm::fail_at`] selects.
    fn count_call(&mut self) -> io::Result<()> {
        self.calls += 1;
        if self.fail_at == Some(self.calls) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        Ok(())
    }

    /// Takes an event with data of a file, and makes the file unreadable with the last one.
    fn take_event(&mut self, file: FileId) -> Option<EventData> {
        let at = self.events.iter().position(|(of, _)| *of == file)?;
        let [reader, _] = self.event_pipes.get(&file)?;
        let _ = nix::unistd::read(reader, &mut [0]);
        self.events.remove(at).map(|(_, data)| data)
    }

    fn open_file(&mut self, file: FileId) -> io::Result<&mut OpenFile> {
        let found = self.files.iter_mut().find(|open| open.file == file);
        found.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }
}

fn id_of(file: &Metadata) -> FileId {
    (file.dev(), file.ino())
}

fn file_id(fd: &impl AsFd) -> io::Result<FileId> {
    let fd = fd.as_fd().try_clone_to_owned()?;
    Ok(id_of(&File::from(fd).metadata()?))
}

/// Returns the file of a descriptor number, as the driver resolves it.
fn id_of_number(number: i32) -> io::Result<FileId> {
    Ok(id_of(&std::fs::metadata(format!("/proc/self/fd/{number}"))?))
}

/// Opens the file of a descriptor number for writing.
fn file_of_number(number: i32) -> io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/self/fd/{number}"))
}
