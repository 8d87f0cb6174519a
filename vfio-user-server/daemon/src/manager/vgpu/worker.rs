//! Worker of a vGPU: its process, as this manager started or adopted it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ipc::mem::file_of;
use ipc::seqpacket::SeqPacket;
use mdev_core::ids::VgpuId;
use nix::sys::signal::Signal;

use crate::child_logs;
use crate::manager::run_dir::RunDir;
use crate::manager::sockets::Sockets;
use crate::manager::watcher::Generation;
use crate::spawn::{self, Limits, Process};
use crate::worker_client;
use crate::worker_protocol::WorkerSpec;
use vgpud_host::users::Account;

/// Limit of open files of a worker. Guest memory comes as one descriptor per range, and firmware
/// maps many ranges. The remainder is for the worker itself: a client reaches the limit of maps
/// before the worker runs out of descriptors, without which it could not accept a connection.
pub const MAX_FILES: u64 = mdev_core::mem::MAX_MAPS as u64 + 4096;

/// Limit of threads of a worker. A worker has one, and a few for an NVIDIA GPU.
pub const MAX_THREADS: u64 = 64;

/// Limit of the time that a killed worker takes to end, after which its anchor is left.
const WORKER_END_LIMIT: Duration = Duration::from_secs(60);

/// Limit of the time that an anchor takes to exit after its worker. It empties the VM's socket.
const ANCHOR_EXIT_TIMEOUT: Duration = Duration::from_millis(500);

/// Worker process of a vGPU, or its anchor.
#[derive(Debug)]
pub struct Worker {
    /// Process. An anchor ends after its worker.
    pub process: Process,
    /// Number of this start.
    pub generation: Generation,
    /// When this manager started or adopted the process.
    pub since: Instant,
    /// Why the worker cannot be queried, if its version is unsupported.
    pub foreign: Option<String>,
    control: PathBuf,
    /// Idle connection that tells the worker that it has a manager. None for a worker that has not
    /// answered this manager.
    tether: Option<SeqPacket>,
}

impl Worker {
    /// Returns the process ID of the worker itself.
    pub fn pid(&self) -> u32 {
        self.process.child().unwrap_or_else(|| self.process.pid())
    }

    /// Kills the worker itself, and then its anchor, if that does not end after the worker.
    pub fn kill(&self) {
        // An anchor that was told to end waits for its worker, so that the manager knows.
        let worker = self.process.child().and_then(|pid| Process::find_running(pid).ok());
        let Some(worker) = worker else { return self.process.signal(Signal::SIGKILL) };
        worker.signal(Signal::SIGKILL);
        let killed = self.process.another().and_then(|anchor| {
            spawn::thread("kill-anchor", move || {
                if worker.wait(WORKER_END_LIMIT) && !anchor.wait(ANCHOR_EXIT_TIMEOUT) {
                    log::warn!(
                        "Process {} does not end after its worker; killing it",
                        anchor.pid()
                    );
                    anchor.signal(Signal::SIGKILL);
                }
            })
        });
        if let Err(error) = killed {
            log::warn!("Process {} may remain: {error}", self.process.pid());
        }
    }

    /// Returns a process with its control socket, which is not connected.
    pub fn new(process: Process, generation: Generation, control: PathBuf) -> Self {
        let since = Instant::now();
        Self { process, generation, since, foreign: None, control, tether: None }
    }

    /// Connects to the control socket of a process that answers, unless that is done.
    pub fn tie(&mut self, vgpu: VgpuId) {
        if self.tether.is_some() {
            return;
        }
        self.tether = SeqPacket::connect_without_fds(&self.control, worker_client::TIMEOUT)
            .inspect_err(|error| log::warn!("Cannot connect to the worker of vGPU {vgpu}: {error}"))
            .ok();
    }
}

/// Returns the name of a vGPU's worker, and of its anchor, in the log.
fn log_name(id: VgpuId) -> String {
    format!("worker of vGPU {id}")
}

/// Reads the log of a worker that an earlier manager has started.
pub fn resume_log(run_dir: &RunDir, id: VgpuId) {
    child_logs::resume(&run_dir.worker_log(id), log_name(id));
}

/// Starts the anchor of a vGPU, which starts the worker, with its listening sockets and, where the
/// backend has one, its connection to the GPU. Process lists show `label`. The user is the
/// worker's, and either no other worker's, or all workers'.
pub fn spawn(
    run_dir: &RunDir,
    label: &str,
    spec: &WorkerSpec,
    sockets: &Sockets,
    gpu: Option<BorrowedFd<'_>>,
    (user, is_separate): (Account, bool),
) -> io::Result<Process> {
    let spec_file = file_of(c"worker-spec", &serde_json::to_vec(spec)?)?;
    let all = [
        ("--spec-fd", Some(spec_file.as_fd())),
        ("--listen-fd", Some(sockets.vfio.as_fd())),
        ("--control-fd", Some(sockets.control.as_fd())),
        ("--programs-fd", sockets.programs.as_ref().map(AsFd::as_fd)),
        ("--gpu-fd", gpu),
        ("--upgrade-fd", Some(sockets.upgrade.as_fd())),
    ];
    let (fds, args) = spawn::arguments("anchor", all);
    let limits = Limits {
        files: MAX_FILES,
        threads: is_separate.then_some(MAX_THREADS),
        // The driver of a client that has the GPU itself may count guest memory as locked.
        may_lock_memory: gpu.is_none(),
        is_oom_protected: false,
        ends_with_parent: false,
        user,
    };
    let vgpu = spec.client.vgpu;
    let log = child_logs::create(&run_dir.worker_log(vgpu), log_name(vgpu))?;
    spawn::role(label, &args, &fds, Some(log), limits)
}
