//! Worker of a vGPU: its process, as this manager started or adopted it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Instant;

use ipc::mem::file_of;
use ipc::seqpacket::SeqPacket;
use mdev_core::ids::VgpuId;
use nix::sys::signal::Signal;

use crate::manager::sockets::Sockets;
use crate::manager::watcher::Generation;
use crate::manager::worker_users::WorkerUsers;
use crate::spawn::{self, Limits, Process};
use crate::worker_client;
use crate::worker_protocol::WorkerSpec;

/// Limit of open files of a worker. Guest memory comes as one descriptor per range, and firmware
/// maps many ranges. The remainder is for the worker itself: a client reaches the limit of maps
/// before the worker runs out of descriptors, without which it could not accept a connection.
const MAX_FILES: u64 = mdev_core::mem::MAX_MAPS as u64 + 4096;

/// Limit of threads of a worker. A worker has one, and a few for an NVIDIA GPU.
pub const MAX_THREADS: u64 = 64;

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
    /// Idle connection that tells the worker that it has a manager.
    _tether: Option<SeqPacket>,
}

impl Worker {
    /// Returns the process ID of the worker itself.
    pub fn pid(&self) -> u32 {
        self.process.child().unwrap_or_else(|| self.process.pid())
    }

    /// Kills the worker itself.
    pub fn kill(&self) {
        // An anchor that was told to end waits for its worker.
        match self.process.child().and_then(|pid| Process::find_running(pid).ok()) {
            Some(worker) => worker.signal(Signal::SIGKILL),
            None => self.process.signal(Signal::SIGKILL),
        }
    }

    /// Connects to the control socket of a running process.
    pub fn connect(
        vgpu: VgpuId,
        process: Process,
        generation: Generation,
        control: &Path,
        foreign: Option<String>,
    ) -> Self {
        let tether = SeqPacket::connect_without_fds(control, worker_client::TIMEOUT)
            .inspect_err(|error| log::warn!("Cannot connect to the worker of vGPU {vgpu}: {error}"))
            .ok();
        Self { process, generation, since: Instant::now(), foreign, _tether: tether }
    }
}

/// Starts the anchor of a vGPU, which starts the worker, with its listening sockets and, where the
/// backend has one, its connection to the GPU. Process lists show `label`.
pub fn spawn(
    label: &str,
    spec: &WorkerSpec,
    sockets: &Sockets,
    gpu: Option<BorrowedFd<'_>>,
    users: &WorkerUsers,
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
        threads: users.are_separate().then_some(MAX_THREADS),
        // The driver of a client that has the GPU itself may count guest memory as locked.
        may_lock_memory: gpu.is_none(),
        is_oom_protected: false,
        ends_with_parent: false,
        user: users.choose()?,
    };
    spawn::role(label, &args, &fds, limits)
}
