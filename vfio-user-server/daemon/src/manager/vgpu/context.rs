//! Context of a vGPU: the process with its memory and its engine, on a GPU that has contexts.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ipc::mem::file_of;
use ipc::seqpacket::SeqPacket;
use mdev_core::gpu::ClientSpec;
use mdev_core::ids::VgpuId;

use crate::backend::ParentConfig;
use crate::child_logs;
use crate::manager::cgroups::{Limits, Member};
use crate::manager::environment::Environment;
use crate::manager::run_dir::RunDir;
use crate::manager::sockets;
use crate::manager::vgpu::worker;
use crate::manager::watcher::{Generation, Watched};
use crate::spawn::{self, Process};
use crate::worker_client;
use vgpud_host::users::Account;

/// Context process of a vGPU.
#[derive(Debug)]
pub struct Context {
    /// The process.
    pub process: Process,
    /// Number of this start.
    pub generation: Generation,
}

/// A new context.
#[derive(Debug)]
pub struct Started {
    /// The context.
    pub context: Context,
    /// Connection of the vGPU's worker.
    pub worker: OwnedFd,
    /// User of the context, and of the worker: both belong to one tenant.
    pub user: Account,
}

impl Context {
    /// Starts a context.
    ///
    /// # Errors
    ///
    /// Fails if the host has no resources for it.
    pub fn start(
        env: &Environment,
        parent: &ParentConfig,
        spec: &ClientSpec,
    ) -> io::Result<Started> {
        let id = spec.vgpu;
        sockets::create_private_dir(&env.run_dir.vgpu(id))?;
        let arbiters = sockets::listen_privately(env.run_dir.context_socket(id))?;
        let (ours, context) = SeqPacket::pair()?;
        let spec_file = file_of(c"context-spec", &serde_json::to_vec(spec)?)?;
        let all = [
            ("--spec-fd", Some(spec_file.as_fd())),
            ("--worker-fd", Some(context.as_fd())),
            ("--arbiters-fd", Some(arbiters.as_fd())),
        ];
        let (fds, mut args) = spawn::arguments("gpu-context", all);
        args.extend(["--parent".into(), parent.source.argument()]);
        let user = env.worker_users.choose()?;
        let limits = spawn::Limits {
            // It maps the same ranges of guest memory as its worker.
            files: worker::MAX_FILES,
            threads: None,
            may_lock_memory: false,
            is_oom_protected: false,
            ends_with_parent: false,
            user,
        };
        let log = child_logs::create(&env.run_dir.context_log(id), log_name(id))?;
        let process = spawn::role(&format!("context {id}"), &args, &fds, Some(log), limits)?;
        log::info!("The context of vGPU {id} runs in process {}", process.pid());
        Ok(Started { context: Self::watched(env, id, process), worker: ours.into(), user })
    }

    /// Watches a context that has been started or adopted.
    pub fn watched(env: &Environment, id: VgpuId, process: Process) -> Self {
        let generation = env.watcher.generation();
        env.watcher.watch(&process, Watched::Context(id, generation));
        env.cgroups.place(Member::Context(id), process.pid(), Limits::CONTEXT);
        Self { process, generation }
    }
}

/// Returns the name of a vGPU's context in the log.
pub fn log_name(id: VgpuId) -> String {
    format!("context of vGPU {id}")
}

/// Connects to a vGPU's context, for its GPU process.
///
/// # Errors
///
/// Fails if the context has ended.
pub fn connect(run_dir: &RunDir, id: VgpuId) -> io::Result<SeqPacket> {
    SeqPacket::connect_without_fds(&run_dir.context_socket(id), worker_client::TIMEOUT)
}
