//! A vGPU that was started: its place on a GPU, its sockets, and its worker, which is kept alive.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mdev_core::definition::{Definition, Settings};
use mdev_core::device::{DisplayLimits, FunctionSpec};
use mdev_core::gpu::Admission;
use mdev_core::ids::VgpuId;
use mdev_core::lifecycle::{Lifecycle, VgpuState};
use mdev_core::profile::Profile;
use mdev_core::sched::Core;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use vendor_backends::seqpacket::SeqPacket;

use super::backoff::Backoff;
use super::folders::{self, Folders};
use super::{Manager, Result, Watched, ask, sockets};
use crate::api::model::{ErrorCode, ErrorDetail};
use crate::private::{VERSION, WorkerSpec};
use crate::spawn::{self, Limits, Process, ProcessRecord};
use crate::users::Account;

/// How long a worker that is told to end may take. Its VM's last request takes microseconds.
const END_PATIENCE: Duration = Duration::from_secs(1);

/// After so many deaths in a row a worker is not started again by itself.
const MOST_DEATHS: u32 = 8;

/// Guest memory comes as one descriptor per range, and firmware makes many. The rest is for the worker itself: a client
/// meets the limit of maps before the worker runs out of descriptors, without which it could accept nobody.
const FILES: u64 = mdev_core::mem::MAX_MAPS as u64 + 256;

/// What a vGPU was started with: `run.json` in its folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Its worker.
    pub process: ProcessRecord,
    /// Its parent's name.
    pub parent: String,
    /// What is in force, live changes included.
    pub definition: Definition,
}

/// A vGPU that was started and not stopped.
#[derive(Debug)]
pub struct Vgpu {
    /// Its name.
    pub id: VgpuId,
    /// The physical GPU it is on.
    pub parent: String,
    /// Its type.
    pub profile: Profile,
    /// What is in force, live changes included.
    pub definition: Definition,
    /// The definition's attributes, parsed.
    pub settings: Settings,
    /// Whom its socket belongs to.
    pub owner: Account,
    /// How it is.
    pub life: Lifecycle,
    /// Why it is not well.
    pub reason: Option<String>,
    /// Its worker.
    pub process: Option<Process>,
    /// Why its worker cannot be asked anything, where it is of a release that is not understood.
    pub foreign: Option<String>,
    /// Held open and never used: while there is a connection, the worker knows that it has a manager.
    tether: Option<SeqPacket>,
    generation: u64,
    since: Instant,
    backoff: Backoff,
    restart_at: Option<Instant>,
    kill_at: Option<Instant>,
    waiting: Vec<oneshot::Sender<()>>,
}

impl Vgpu {
    /// One that has no worker yet.
    pub fn new(
        id: VgpuId,
        parent: String,
        profile: Profile,
        definition: Definition,
        owner: Account,
    ) -> Result<Self> {
        let settings = settings(&definition)?;
        let owner = sockets::owner_of(&definition, owner)?;
        Ok(Self {
            id,
            parent,
            profile,
            definition,
            settings,
            owner,
            life: Lifecycle::defined(),
            reason: None,
            process: None,
            foreign: None,
            tether: None,
            generation: 0,
            since: Instant::now(),
            backoff: Backoff::default(),
            restart_at: None,
            kill_at: None,
            waiting: Vec::new(),
        })
    }

    /// When something is to be done about it.
    pub fn deadline(&self) -> Option<Instant> {
        self.restart_at.into_iter().chain(self.kill_at).min()
    }

    /// True while its worker is dead and about to be started again.
    pub fn is_restarting(&self) -> bool {
        self.restart_at.is_some()
    }

    /// Lets its worker know that it has a manager.
    fn tie(&mut self, folders: &Folders) {
        let socket = folders.worker_socket(self.id);
        match SeqPacket::connect_with_timeout(&socket, ask::PATIENCE) {
            Ok(tether) => self.tether = Some(tether),
            Err(error) => log::warn!("Cannot connect to the worker of vGPU {}: {error}", self.id),
        }
    }

    /// Where its worker can be asked, if it has one that can be.
    pub fn control(&self, folders: &Folders) -> Option<PathBuf> {
        let worker = self.process.as_ref().filter(|_| self.foreign.is_none());
        worker.map(|_| folders.worker_socket(self.id))
    }

    /// Tells its worker to end.
    pub fn terminate(&self) {
        if let Some(process) = &self.process {
            process.signal(Signal::SIGTERM);
        }
    }

    /// Nothing of it works any more, until it is stopped and started. Its worker stays, so that its VM sees a device
    /// that reports an error and not one that has vanished.
    pub fn fail(&mut self, why: &str) {
        if self.life.state() == VgpuState::Stopping {
            return;
        }
        self.restart_at = None;
        self.reason = Some(why.to_owned());
        self.step(VgpuState::Failed);
    }

    /// Writes down what a later manager needs to adopt it.
    pub fn write_run(&self, folders: &Folders) -> io::Result<()> {
        let Some(process) = &self.process else { return Ok(()) };
        let run = Run {
            process: process.record()?,
            parent: self.parent.clone(),
            definition: self.definition.clone(),
        };
        folders::write_run(&folders.vgpu(self.id), &run)
    }

    /// What its worker is started with.
    fn worker_spec(&self, admission: &Admission) -> WorkerSpec {
        let display = self
            .profile
            .head
            .map(|head| DisplayLimits { max_width: head.max_width, max_height: head.max_height });
        WorkerSpec {
            version: VERSION,
            function: FunctionSpec {
                vgpu: self.id,
                type_name: self.profile.name.clone(),
                display,
                doorbell_mapped: self.settings.doorbell_mapped,
            },
            backend: admission.backend.into(),
            client: admission.spec.clone(),
            parent: self.parent.clone(),
            core: self.settings.share.core.map(Core::get),
            owner: self.owner.uid,
            manager: Account::own().uid,
        }
    }

    /// Makes its sockets and starts its worker. Both sockets listen before the worker exists, so a VM may attach as
    /// soon as this returns.
    fn launch(
        &self,
        folders: &Folders,
        admission: &Admission,
        user: Account,
    ) -> io::Result<Process> {
        let (vfio, control) = sockets::listen(folders, self.id, self.owner)?;
        let spec = memfd(&serde_json::to_vec(&self.worker_spec(admission))?)?;
        let mut fds = vec![spec.as_fd(), vfio.as_fd(), control.as_fd()];
        fds.extend(admission.fd.as_ref().map(AsFd::as_fd));
        spawn_worker(self.id, &fds, user)
    }

    fn step(&mut self, to: VgpuState) {
        if let Err(error) = self.life.advance(to)
            && self.life.state() != to
        {
            log::error!("vGPU {}: {error}", self.id);
        }
    }
}

fn spawn_worker(vgpu: VgpuId, fds: &[BorrowedFd<'_>], user: Account) -> io::Result<Process> {
    let mut args = vec!["worker".to_owned()];
    for (number, name) in (spawn::FIRST_FD..)
        .zip(["--spec-fd", "--listen-fd", "--control-fd", "--gpu-fd"])
        .take(fds.len())
    {
        args.extend([name.to_owned(), number.to_string()]);
    }
    spawn::role(&vgpu.to_string(), &args, fds, Limits { files: FILES, user })
}

fn memfd(bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create("worker-spec", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file.into())
}

/// A definition's attributes, parsed.
pub fn settings(definition: &Definition) -> Result<Settings> {
    definition.attrs.settings().map_err(|error| ErrorDetail::new(ErrorCode::Invalid, error))
}

impl Manager {
    /// Starts a vGPU that is not running.
    pub(super) fn start_vgpu(&mut self, mut vgpu: Vgpu) -> Result<()> {
        let index = self.parent_index(&vgpu.parent)?;
        self.parents[index].gpu()?;
        let bytes = vgpu.profile.vram_bytes;
        self.parents[index]
            .partitions
            .admit(vgpu.id, bytes)
            .map_err(|error| ErrorDetail::new(ErrorCode::NoRoom, error))?;
        let id = vgpu.id;
        if let Err(error) =
            self.schedule(index, id, vgpu.settings.share, vgpu.profile.max_instances)
        {
            self.parents[index].partitions.release(id);
            return Err(error);
        }
        vgpu.step(VgpuState::Starting);
        self.vgpus.insert(id, vgpu);
        self.launch_worker(id).inspect_err(|_| self.forget_vgpu(id))
    }

    /// Gives a vGPU that holds a partition its place on the GPU, and a worker.
    fn launch_worker(&mut self, id: VgpuId) -> Result<()> {
        let Some(vgpu) = self.vgpus.get(&id) else { return Ok(()) };
        let index = self.parent_index(&vgpu.parent)?;
        let spec = self.parents[index].client_spec(vgpu);
        let quotas = vgpu.settings.quotas;
        let admission = self.with_gpu(index, |gpu| gpu.admit(&spec))?;
        // Before there is a guest that could use more.
        self.set_quotas(index, id, &quotas)?;
        let generation = self.watcher.generation();
        let Some(vgpu) = self.vgpus.get_mut(&id) else { return Ok(()) };
        let internal = |error| {
            ErrorDetail::new(
                ErrorCode::Internal,
                format!("Cannot start a worker in {}: {error}", self.folders.vgpu(id).display()),
            )
        };
        let process = vgpu.launch(&self.folders, &admission, self.worker_user).map_err(internal)?;
        self.watcher.watch(&process, Watched::Worker(id, generation));
        log::info!("vGPU {id} ({}) runs in process {}", vgpu.profile.name, process.pid());
        vgpu.process = Some(process);
        vgpu.foreign = None;
        vgpu.generation = generation;
        vgpu.since = Instant::now();
        vgpu.reason = None;
        vgpu.tie(&self.folders);
        vgpu.step(VgpuState::Active);
        vgpu.write_run(&self.folders).map_err(internal)?;
        // The GPU knows nothing of slices that were set before it admitted the vGPU.
        let (share, instances) = (vgpu.settings.share, vgpu.profile.max_instances);
        self.unschedule(index, id);
        self.schedule(index, id, share, instances)?;
        Ok(())
    }

    /// Takes in a worker that an earlier manager started.
    pub(super) fn adopt_vgpu(&mut self, mut vgpu: Vgpu, process: Process, vm_attached: bool) {
        let generation = self.watcher.generation();
        self.watcher.watch(&process, Watched::Worker(vgpu.id, generation));
        vgpu.process = Some(process);
        vgpu.generation = generation;
        vgpu.life = Lifecycle::adopted(vm_attached);
        vgpu.tie(&self.folders);
        if let Ok(index) = self.parent_index(&vgpu.parent) {
            let bytes = vgpu.profile.vram_bytes;
            if let Err(error) = self.parents[index].partitions.admit(vgpu.id, bytes) {
                log::error!("vGPU {}: {error}", vgpu.id);
            }
        }
        // A GPU that cannot be asked keeps what it was told before.
        let index = self.parent_index(&vgpu.parent).ok();
        if let Some(index) = index.filter(|index| self.parents[*index].is_ready()) {
            self.readmit(index, &vgpu);
            let (share, instances) = (vgpu.settings.share, vgpu.profile.max_instances);
            let scheduled = self.schedule(index, vgpu.id, share, instances);
            // What is not given has this manager's defaults, not the earlier one's.
            let limited = self.set_quotas(index, vgpu.id, &vgpu.settings.quotas);
            for error in [scheduled, limited].into_iter().filter_map(Result::err) {
                log::error!("vGPU {}: {error}", vgpu.id);
            }
        }
        self.vgpus.insert(vgpu.id, vgpu);
    }

    /// Gives the worker of an adopted vGPU a new connection to its GPU, where the GPU is led through it.
    fn readmit(&mut self, index: usize, vgpu: &Vgpu) {
        let spec = vgpu.profile.client_spec(vgpu.id);
        let connection = self.with_gpu(index, |gpu| gpu.readmit(&spec));
        let attached = connection.and_then(|connection| match connection {
            Some(fd) => ask::attach(&self.folders.worker_socket(vgpu.id), fd.as_fd())
                .map_err(|error| ErrorDetail::new(ErrorCode::Unavailable, error)),
            None => Ok(()),
        });
        if let Err(error) = attached {
            log::error!("vGPU {} cannot be scheduled: {error}", vgpu.id);
        }
    }

    pub(super) fn worker_exited(&mut self, id: VgpuId, generation: u64) {
        let Some(vgpu) = self.vgpus.get_mut(&id).filter(|v| v.generation == generation) else {
            return;
        };
        let status = vgpu.process.take().and_then(|mut process| process.reap());
        let status = status.unwrap_or_else(|| "exit status unknown".into());
        match vgpu.life.state() {
            VgpuState::Stopping => self.forget_vgpu(id),
            // Its GPU was lost before; there is nothing to restart it on but what a stop and a start would choose.
            VgpuState::Failed => log::info!("The worker of failed vGPU {id} ended: {status}"),
            _ => {
                let pause = vgpu.backoff.after_death(vgpu.since.elapsed());
                let deaths = vgpu.backoff.deaths();
                vgpu.fail(&format!("Its worker died ({status})"));
                if deaths <= MOST_DEATHS {
                    log::error!("The worker of vGPU {id} died ({status}); starting it again");
                    vgpu.restart_at = Some(Instant::now() + pause);
                } else {
                    self.give_up(
                        id,
                        &format!("Its worker died {deaths} times in a row ({status})"),
                    );
                }
                self.evict_vgpu(id);
            }
        }
    }

    /// Leaves a vGPU failed. Its partition is free for others.
    fn give_up(&mut self, id: VgpuId, why: &str) {
        let Some(vgpu) = self.vgpus.get_mut(&id) else { return };
        log::error!("vGPU {id} has failed: {why}");
        vgpu.fail(&format!("{why}; see the log of vgpud, then stop it and start it again"));
        self.free_place(id);
    }

    /// Takes a vGPU's place on its GPU back: everything there, its partition and its share.
    fn free_place(&mut self, id: VgpuId) {
        self.evict_vgpu(id);
        let index = self.vgpus.get(&id).and_then(|vgpu| self.parent_index(&vgpu.parent).ok());
        if let Some(index) = index {
            self.parents[index].partitions.release(id);
            self.unschedule(index, id);
        }
    }

    /// Nothing is kept for a vGPU that is stopped: whoever starts it may have another VM in mind.
    fn forget_place(&mut self, id: VgpuId) {
        let index = self.vgpus.get(&id).and_then(|vgpu| self.parent_index(&vgpu.parent).ok());
        if let Some(index) = index.filter(|index| self.parents[*index].is_ready())
            && let Err(error) = self.with_gpu(index, |gpu| gpu.forget(id))
        {
            log::warn!("vGPU {id} may keep its memory: {error}");
        }
    }

    fn evict_vgpu(&mut self, id: VgpuId) {
        let index = self.vgpus.get(&id).and_then(|vgpu| self.parent_index(&vgpu.parent).ok());
        if let Some(index) = index {
            self.evict(index, id);
        }
    }

    /// Does what a vGPU's deadline was set for.
    pub(super) fn vgpu_due(&mut self, id: VgpuId) {
        let Some(vgpu) = self.vgpus.get_mut(&id) else { return };
        if vgpu.kill_at.take_if(|at| *at <= Instant::now()).is_some()
            && let Some(process) = &vgpu.process
        {
            log::warn!("The worker of vGPU {id} does not end; killing it");
            process.signal(Signal::SIGKILL);
        }
        if vgpu.restart_at.take().is_some() {
            vgpu.step(VgpuState::Starting);
            if let Err(error) = self.launch_worker(id) {
                self.give_up(id, &error.message);
            }
        }
    }

    /// Begins to stop a vGPU; what is returned resolves when nothing of it is left.
    pub(super) fn stop_vgpu(&mut self, id: VgpuId) -> Result<oneshot::Receiver<()>> {
        let (done, wait) = oneshot::channel();
        let Some(vgpu) = self.vgpus.get_mut(&id) else {
            return Err(ErrorDetail::new(ErrorCode::Conflict, format!("vGPU {id} is not running")));
        };
        vgpu.waiting.push(done);
        vgpu.restart_at = None;
        if vgpu.process.is_none() {
            self.forget_vgpu(id);
        } else if vgpu.life.state() != VgpuState::Stopping {
            vgpu.step(VgpuState::Stopping);
            vgpu.terminate();
            vgpu.kill_at = Some(Instant::now() + END_PATIENCE);
        }
        Ok(wait)
    }

    /// Removes every trace of a vGPU that has no worker any more.
    fn forget_vgpu(&mut self, id: VgpuId) {
        self.free_place(id);
        self.forget_place(id);
        let Some(vgpu) = self.vgpus.remove(&id) else { return };
        if let Some(process) = vgpu.process {
            process.end(Duration::ZERO);
        }
        folders::remove(&self.folders.vgpu(id));
        log::info!("vGPU {id} is stopped");
        self.replace_foreign(&vgpu.parent);
        for waiting in vgpu.waiting {
            // Whoever asked may have gone.
            let _ = waiting.send(());
        }
    }
}
