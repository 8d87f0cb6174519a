//! Worker of one vGPU: a process that serves the vfio-user socket with the device model and one
//! client of the GPU.
//!
//! * [`run`]: setup from inherited descriptors
//! * [`sandbox`]: restrictions of the process
//! * `events`: event loop
//! * `function`: device model as a device of the vfio-user server
//! * `control`: connections of the manager
//! * [`journal`]: what an adopting worker needs; `anchored`: adopting it
//! * `saving`: saving and restoring, as the manager requests; `migration`: as the VM's monitor does
//! * `programs`: CUDA programs of the host on the vGPU; `queue_thread`: of the VM
//! * `front_end_spec`, `doorbell`, `request_budget`: for both

mod anchored;
mod control;
mod doorbell;
mod events;
mod front_end;
mod function;
pub mod journal;
mod migration;
mod programs;
mod queue_thread;
mod request_budget;
pub mod sandbox;
mod saving;

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use event_manager::{EventManager, SubscriberOps};
use ipc::seqpacket::SeqPacketListener;
use mdev_core::device::VirtualFunction;

use crate::spawn;
use crate::worker_protocol::{OLDEST, VERSION, WorkerRequest, WorkerSpec};
use anchored::Anchored;
use events::Worker;
use function::Function;
use programs::Programs;
use queue_thread::QueueThread;
use sandbox::system_calls::Role;
use vfio_user_server::busy_poll::BusyPoll;

/// Time after which a worker exits without a manager and a VM.
const ORPHAN_GRACE: Duration = Duration::from_secs(30);

/// Limit of the specification, in bytes.
const MAX_SPEC: u64 = 64 * 1024;

/// Descriptors that a worker inherits.
#[derive(Clone, Copy, Debug)]
pub struct WorkerArgs {
    /// File with the [`WorkerSpec`] as JSON.
    pub spec_fd: RawFd,
    /// Listening stream socket for the VM.
    pub listen_fd: RawFd,
    /// Listening seqpacket socket for the manager.
    pub control_fd: RawFd,
    /// Listening seqpacket socket for CUDA programs, if the vGPU is for them, too.
    pub programs_fd: Option<RawFd>,
    /// Connection to the GPU, for backends that use one.
    pub gpu_fd: Option<RawFd>,
    /// Journal, for a worker with an anchor.
    pub journal_fd: Option<RawFd>,
    /// Socket to the anchor.
    pub anchor_fd: Option<RawFd>,
    /// Listening seqpacket socket of an anchor, for the manager.
    pub upgrade_fd: Option<RawFd>,
}

/// Descriptors of [`WorkerArgs`] that each worker of a vGPU gets.
#[derive(Debug)]
pub struct WorkerFds {
    /// [`WorkerArgs::spec_fd`].
    pub spec: OwnedFd,
    /// [`WorkerArgs::listen_fd`].
    pub listen: OwnedFd,
    /// [`WorkerArgs::control_fd`].
    pub control: OwnedFd,
    /// [`WorkerArgs::programs_fd`].
    pub programs: Option<OwnedFd>,
    /// [`WorkerArgs::gpu_fd`].
    pub gpu: Option<OwnedFd>,
}

impl WorkerArgs {
    /// Takes the descriptors that each worker of a vGPU gets.
    pub fn take(&self) -> Result<WorkerFds> {
        Ok(WorkerFds {
            spec: inherited(self.spec_fd)?,
            listen: inherited(self.listen_fd)?,
            control: inherited(self.control_fd)?,
            programs: self.programs_fd.map(inherited).transpose()?,
            gpu: self.gpu_fd.map(inherited).transpose()?,
        })
    }
}

/// Why a worker ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The vGPU ends.
    Stopped,
    /// Another worker continues.
    Left,
}

impl End {
    /// Exit status of a worker that leaves (`EX_TEMPFAIL` of sysexits.h).
    pub const LEFT: u8 = 75;

    /// Returns the end that a request asks for.
    fn of(request: &WorkerRequest) -> Option<Self> {
        match request {
            WorkerRequest::Stop => Some(Self::Stopped),
            WorkerRequest::Leave => Some(Self::Left),
            _ => None,
        }
    }

    /// Returns the exit status.
    pub fn status(self) -> u8 {
        match self {
            Self::Stopped => 0,
            Self::Left => Self::LEFT,
        }
    }
}

/// Serves one vGPU until the manager tells the worker to end, or until it has had neither a manager
/// nor a VM for [`ORPHAN_GRACE`].
pub fn run(args: &WorkerArgs) -> Result<End> {
    let WorkerFds { spec, listen, control, programs, gpu } = args.take()?;
    let spec = read_spec(&spec)?;
    let listener = UnixListener::from(spawn::listening(listen)?);
    let control = SeqPacketListener::from(spawn::listening(control)?);
    let programs = programs.map(spawn::listening).transpose()?;

    let journal = args.journal_fd.map(inherited).transpose()?;
    let anchor = args.anchor_fd.map(inherited).transpose()?;
    let anchored = journal.zip(anchor).map(|(journal, socket)| Anchored::open(&journal, socket));
    let mut anchored = anchored.transpose()?;

    let position = anchored.as_ref().and_then(Anchored::position);
    let mut kept = |number| anchored.as_mut()?.take_of_client(number);
    let mut client =
        crate::backend::open_client(&spec.backend, &spec.parent, gpu, position, &mut kept)?;
    // A static program has its random bytes from a device node, which it opens here and keeps.
    getrandom::u32().context("The system has no random bytes")?;
    let driver = client.programs().map(|gpu| gpu.driver().to_owned());
    let mut function = VirtualFunction::new(&spec.function, client)
        .with_context(|| format!("vGPU {} cannot be created", spec.function.vgpu))?;
    // A client of a GPU process has no device file. Others call the driver by ioctl.
    let has_device = spec.backend != vendor_backends::mediator::BACKEND;
    sandbox::enter(Role::Worker { has_device }, &[]);
    function.start().context("Cannot start the GPU's threads")?;

    let mut queue_records = None;
    let programs = match (&spec.programs, programs) {
        (Some(programs), Some(listener)) => {
            let listener = SeqPacketListener::from(listener);
            let front_end = front_end::spec(&spec, programs, driver.as_deref());
            let gpu_event = function.gpu_event().try_clone_to_owned()?;
            let queue = QueueThread::start(function.share(), gpu_event, front_end.clone())?;
            let in_vm = queue.programs();
            queue_records = Some((queue.records(), front_end.clone()));
            function.add_queue(Box::new(queue));
            Some(Programs::new(front_end, listener, in_vm)?)
        }
        _ => None,
    };
    if let Some(anchored) = &mut anchored {
        anchored.adopt_function(&mut function)?;
        if let Some((records, front_end)) = queue_records {
            anchored.adopt_queue(records, &function, &front_end)?;
        }
    }
    let function = Function::new(function, &spec.function.type_name)?;
    let mut worker = Worker::new(spec, function, listener, control, programs)?;
    if let Some(anchored) = anchored {
        worker.adopt(anchored)?;
    }
    serve(worker)
}

/// Serves events until the worker is to end.
fn serve(worker: Worker) -> Result<End> {
    let mut events = EventManager::new().context("Cannot create an event loop")?;
    let id = events.add_subscriber(worker);
    let mut orphaned_since = None;
    loop {
        let worker = events.subscriber_mut(id).context("The event loop lost its subscriber")?;
        if let Some(end) = worker.end() {
            worker.remove_finished();
            if end == End::Left {
                // Its end would free what the next worker continues with.
                std::mem::forget(events);
            }
            return Ok(end);
        }
        if worker.should_poll() {
            if events.run_with_timeout(0).context("The event loop failed")? == 0 {
                BusyPoll::yield_cpu();
            }
            continue;
        }
        worker.time_finished();
        let timeout = if worker.is_needed() {
            orphaned_since = None;
            -1
        } else {
            let since = *orphaned_since.get_or_insert_with(Instant::now);
            let left = ORPHAN_GRACE.saturating_sub(since.elapsed());
            if left.is_zero() {
                log::info!("Neither a manager nor a VM for {} s: ending", ORPHAN_GRACE.as_secs());
                return Ok(End::Stopped);
            }
            i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX)
        };
        events.run_with_timeout(timeout).context("The event loop failed")?;
    }
}

/// Reads the specification of the vGPU.
pub fn read_spec(fd: &OwnedFd) -> Result<WorkerSpec> {
    let mut file = File::from(fd.try_clone()?);
    let mut json = String::new();
    file.rewind().context("Cannot read the specification")?;
    file.take(MAX_SPEC).read_to_string(&mut json).context("Cannot read the specification")?;
    let spec: WorkerSpec =
        serde_json::from_str(&json).context("The specification cannot be parsed")?;
    ensure!(
        (OLDEST..=VERSION).contains(&spec.version),
        "The manager speaks version {} of the control protocol, this worker {OLDEST} to {VERSION}",
        spec.version
    );
    Ok(spec)
}

/// Takes a descriptor that this worker was started with.
pub fn inherited(fd: RawFd) -> Result<OwnedFd> {
    spawn::inherited(fd).with_context(|| {
        format!("Descriptor {fd} is not open: a worker is started by vgpud, not by hand")
    })
}
