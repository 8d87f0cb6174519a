//! One vGPU: a process that serves its vfio-user socket, its device model and one client of the GPU.
//!
//! [`run`] puts it together out of inherited descriptors, `sandbox` takes away what it does not need, `events` is its
//! loop, `function` adapts the device model to the protocol, `control` answers the manager, and `throttle` keeps the log
//! readable.

mod control;
mod events;
mod function;
pub mod sandbox;
pub(crate) mod throttle;

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use event_manager::{EventManager, SubscriberOps};
use mdev_core::device::VirtualFunction;
use vendor_backends::seqpacket::SeqPacketListener;

use crate::patience::Patience;
use crate::private::{VERSION, WorkerSpec};
use crate::spawn;
use events::Worker;
use function::Function;

/// How long a worker stays that has neither a manager nor a VM.
const ORPHAN_GRACE: Duration = Duration::from_secs(30);

/// Longest spec, in bytes.
const MAX_SPEC: u64 = 64 * 1024;

/// What a worker inherits.
#[derive(Clone, Copy, Debug)]
pub struct WorkerArgs {
    /// Holds a [`WorkerSpec`] as JSON.
    pub spec_fd: RawFd,
    /// Listens for the VM (stream).
    pub listen_fd: RawFd,
    /// Listens for the manager (seqpacket).
    pub control_fd: RawFd,
    /// The connection to the GPU, for backends that have one to pass.
    pub gpu_fd: Option<RawFd>,
}

/// Serves one vGPU until the manager says stop, or nobody is left to serve.
pub fn run(args: &WorkerArgs) -> Result<()> {
    let spec = read_spec(&inherited(args.spec_fd)?)?;
    let listener = UnixListener::from(spawn::listening(inherited(args.listen_fd)?)?);
    let control = SeqPacketListener::from(spawn::listening(inherited(args.control_fd)?)?);
    let gpu = args.gpu_fd.map(inherited).transpose()?;

    let client = crate::backend::open_client(&spec.backend, &spec.parent, gpu)?;
    let mut function = VirtualFunction::new(&spec.function, client)
        .with_context(|| format!("vGPU {} cannot be made", spec.function.vgpu))?;
    sandbox::enter();
    function.start().context("Cannot start the GPU's threads")?;

    let worker = Worker::new(spec, Function::new(function)?, listener, control)?;
    let mut events = EventManager::new().context("Cannot make an event loop")?;
    let id = events.add_subscriber(worker);
    let mut alone_since = None;
    loop {
        let worker = events.subscriber_mut(id).context("The event loop lost its subscriber")?;
        if worker.is_stopped() {
            return Ok(());
        }
        if worker.wants_to_look() {
            if events.run_with_timeout(0).context("The event loop failed")? == 0 {
                Patience::offer_cpu();
            }
            continue;
        }
        let timeout = if worker.is_needed() {
            alone_since = None;
            -1
        } else {
            let since = *alone_since.get_or_insert_with(Instant::now);
            let left = ORPHAN_GRACE.saturating_sub(since.elapsed());
            if left.is_zero() {
                log::info!("Neither a manager nor a VM for {} s: ending", ORPHAN_GRACE.as_secs());
                return Ok(());
            }
            i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX)
        };
        events.run_with_timeout(timeout).context("The event loop failed")?;
    }
}

fn read_spec(fd: &OwnedFd) -> Result<WorkerSpec> {
    let mut file = File::from(fd.try_clone()?);
    let mut json = String::new();
    file.rewind().context("Cannot read the spec")?;
    file.take(MAX_SPEC).read_to_string(&mut json).context("Cannot read the spec")?;
    let spec: WorkerSpec = serde_json::from_str(&json).context("The spec makes no sense")?;
    ensure!(
        spec.version == VERSION,
        "The manager speaks version {} of the private protocol, this worker {VERSION}",
        spec.version
    );
    Ok(spec)
}

/// Takes over a descriptor that was inherited at a known number.
fn inherited(fd: RawFd) -> Result<OwnedFd> {
    // SAFETY: only reads the flags of a number, whatever it names.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    ensure!(flags >= 0, "Descriptor {fd} is not open: a worker is started by vgpud, not by hand");
    // SAFETY: the manager has put the descriptor there for us, and each number is taken over once.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    Ok(fd)
}
