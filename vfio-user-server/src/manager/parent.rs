//! A physical GPU: started or adopted, watched, lost, started again.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use mdev_core::gpu::{Gpu, GpuCapabilities, GpuDescription, GpuError};
use mdev_core::ids::VgpuId;
use mdev_core::partition::Partitions;
use mdev_core::profile::{self, Profile};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use vendor_backends::mediator::MediatedGpu;
use vendor_backends::seqpacket::{SeqPacket, SeqPacketListener};

use super::backoff::Backoff;
use super::folders::{self, Folders};
use super::knobs::Knobs;
use super::screens::Rotation;
use super::tick::Shares;
use super::{Manager, Result, Watched, sockets};
use crate::api::model::{self, ErrorCode, ErrorDetail, ParentState};
use crate::backend::{Backend, ParentConfig};
use crate::spawn::{self, Limits, Process, ProcessRecord};
use crate::users::Account;

/// What is said of a GPU whose process is of a release that is not understood.
const FOREIGN: &str = "the process of its GPU is of another version of vgpud; its VMs go on, and nothing new starts on it: shut them down and stop their vGPUs, and a new one takes its place";

/// How long a new process that is or owns a GPU may take until it answers. Devices take a while to be reset.
const START_PATIENCE: Duration = Duration::from_secs(4);

/// How long one that has closed its connection may take to end by itself.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Most bytes of what one says about why it does not start.
const MAX_WORDS: u64 = 4096;

/// How long one that is told to end may take.
const END_PATIENCE: Duration = Duration::from_secs(1);

/// What becomes of the vGPUs of a GPU that is gone.
const GPU_LOST: &str = "Its GPU is lost; stop it and start it again";

/// Each vGPU brings a handful of descriptors, and each piece of guest memory one.
const FILES: u64 = 65_536;

/// What a GPU's process was started with: `run.json` in its folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Run {
    process: ProcessRecord,
    vram_bytes: u64,
    /// What the GPU said of itself, for a manager that cannot ask it.
    #[serde(default)]
    description: Option<serde_json::Value>,
}

/// A GPU that was opened, and its process where it has one.
type Opened = (Option<Process>, Box<dyn Gpu>);

/// One physical GPU.
#[derive(Debug)]
pub struct Parent {
    config: ParentConfig,
    /// Its backend, while it is there.
    gpu: Option<Box<dyn Gpu>>,
    /// What it said it was, when it was last there.
    description: Option<GpuDescription>,
    process: Option<Process>,
    generation: u64,
    since: Instant,
    backoff: Backoff,
    retry_at: Option<Instant>,
    reason: Option<String>,
    /// Who has how much of its video memory.
    pub partitions: Partitions,
    /// Who used how much of its time.
    pub shares: Shares,
    /// How its time is to be divided.
    pub knobs: Knobs,
    /// Whether vGPUs take turns on its screen.
    pub rotation: Rotation,
    /// Its screen, as it was when it was last asked.
    pub screen: Option<model::PhysicalScreen>,
    /// When its counters are to be read.
    pub next_read: Option<Instant>,
    /// When they were read.
    pub last_read: Option<Instant>,
    /// The process of its GPU is of a release that is not understood.
    foreign: bool,
}

/// What became of a software GPU that an earlier manager started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adoption {
    /// It is ours now.
    Adopted,
    /// It is of a release that is not understood, and goes on for its VMs.
    Foreign,
    /// There is none.
    Nothing,
}

impl Parent {
    /// One that is to be started.
    pub fn new(config: ParentConfig, knobs: Knobs, rotation: Rotation) -> Self {
        Self {
            partitions: Partitions::new(config.backend.vram_bytes()),
            config,
            gpu: None,
            description: None,
            process: None,
            generation: 0,
            since: Instant::now(),
            backoff: Backoff::default(),
            retry_at: None,
            reason: None,
            shares: Shares::with_knobs(&knobs),
            knobs,
            rotation,
            screen: None,
            next_read: None,
            last_read: None,
            foreign: false,
        }
    }

    /// `soft0`, or a PCI address.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// True while its process goes on unmanaged, for the VMs that it has.
    pub fn is_foreign(&self) -> bool {
        self.foreign
    }

    /// True while it takes vGPUs.
    pub fn is_ready(&self) -> bool {
        self.gpu.is_some()
    }

    /// When it is to be started again.
    pub fn deadline(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Its backend, or why there is none.
    pub fn gpu(&mut self) -> Result<&mut dyn Gpu> {
        let Self { gpu, config, reason, foreign, .. } = self;
        match gpu {
            Some(gpu) => Ok(gpu.as_mut()),
            None if *foreign => Err(ErrorDetail::new(
                ErrorCode::Unavailable,
                format!("Parent {}: {FOREIGN}", config.name),
            )),
            None => Err(gone(&config.name, reason.as_deref())),
        }
    }

    /// What its GPU can do, as it said when it was last there.
    pub fn capabilities(&self) -> GpuCapabilities {
        self.description.as_ref().map_or(GpuCapabilities::empty(), |gpu| gpu.capabilities)
    }

    /// Engine time after which something on it has hung, where nobody said otherwise.
    pub fn hang_timeout(&self) -> Option<Duration> {
        self.description.as_ref().and_then(|gpu| gpu.hang_timeout)
    }

    /// Whether it has a physical screen.
    pub fn has_screen(&self) -> bool {
        self.capabilities().contains(GpuCapabilities::SCANOUT)
    }

    /// The type of that name.
    pub fn profile(&self, name: &str) -> Result<Profile> {
        let description = self
            .description
            .as_ref()
            .ok_or_else(|| gone(&self.config.name, self.reason.as_deref()))?;
        profile::find(description, name)
            .map_err(|error| ErrorDetail::new(ErrorCode::NotFound, error))
    }

    /// Everything it can be asked about, for the API.
    pub fn view(&self, running: usize) -> model::Parent {
        let description = self.description.as_ref();
        let capabilities = description.map(|gpu| gpu.capabilities);
        let names = capabilities.into_iter().flat_map(|all| {
            all.iter_names().map(|(name, _)| name.to_ascii_lowercase()).collect::<Vec<_>>()
        });
        model::Parent {
            name: self.config.name.clone(),
            backend: self.config.backend.name().into(),
            model: description.map(|gpu| gpu.model.clone()).unwrap_or_default(),
            description: description.map(|gpu| gpu.name.clone()).unwrap_or_default(),
            state: match (&self.gpu, self.backoff.deaths()) {
                (Some(_), _) => ParentState::Ready,
                (None, _) if self.foreign => ParentState::Foreign,
                (None, 0) => ParentState::Starting,
                (None, _) => ParentState::Lost,
            },
            vram_bytes: self.partitions.total(),
            vram_free_bytes: self.partitions.free(),
            capabilities: names.collect(),
            scheduler: self.shares.policy_name(),
            pid: self.process.as_ref().map(Process::pid),
            running: running as u32,
            screen: self.screen.clone(),
        }
    }

    /// Its types as they are now, for the API.
    pub fn types(&self) -> model::ParentTypes {
        let profiles = self.description.as_ref().map(profile::profiles).unwrap_or_default();
        let info = |profile: Profile| model::TypeInfo {
            description: profile.description(),
            device_api: "vfio-user".into(),
            available_instances: if self.is_ready() {
                self.partitions.available(&profile)
            } else {
                0
            },
            max_instances: profile.max_instances,
            vram_bytes: profile.vram_bytes,
            heads: u32::from(profile.head.is_some()),
            name: profile.name,
        };
        model::ParentTypes {
            parent: self.config.name.clone(),
            types: profiles.into_iter().map(info).collect(),
        }
    }

    /// Opens it, or starts the process that is it, or owns it.
    fn launch(&self, folders: &Folders, user: Account) -> std::result::Result<Opened, GpuError> {
        if let Some(opened) = self.config.backend.open() {
            return Ok((None, opened?));
        }
        let vram_bytes = self.config.backend.vram_bytes();
        let name = &self.config.name;
        sockets::closed(&folders.parent(name))?;
        let admin = SeqPacketListener::bind(&folders.admin_socket(name))?;
        let words = memfd_create("words", MFdFlags::MFD_CLOEXEC).map_err(io::Error::from)?;
        let words = File::from(words);
        let (mut args, starts_as) = self.config.backend.role(user);
        args.extend(["--name".to_owned(), name.clone()]);
        args.extend(["--admin-fd".to_owned(), spawn::FIRST_FD.to_string()]);
        let limits = Limits { files: FILES, user: starts_as };
        let mut fds = vec![admin.as_fd()];
        if matches!(self.config.backend, Backend::Vfio { .. }) {
            fds.push(words.as_fd());
        }
        let process = spawn::role(name, &args, &fds, limits)?;
        drop(admin);
        match connect(folders, name) {
            Ok(gpu) => {
                let description = serde_json::to_value(gpu.describe()).ok();
                let run = Run { process: process.record()?, vram_bytes, description };
                folders::write_run(&folders.parent(name), &run)?;
                Ok((Some(process), Box::new(gpu)))
            }
            Err(error) => {
                // How it ended says more than that it does not answer, and its own words say more than that.
                let told = process.end(LAST_WORDS).unwrap_or_default();
                if let Some(words) = last_words(words) {
                    return Err(GpuError::Lost(words));
                }
                let why = match error {
                    GpuError::Lost(why) => why,
                    other => other.to_string(),
                };
                Err(GpuError::Lost(format!("{why} ({told})")))
            }
        }
    }

    /// Takes over the software GPU that an earlier manager started, if there is one that answers. Whatever else is in
    /// its folder is removed.
    pub fn adopt(&mut self, folders: &Folders) -> Adoption {
        // A GPU of silicon is there whoever manages it.
        match self.config.backend.open() {
            Some(Ok(gpu)) => {
                self.took_up(None, gpu);
                return Adoption::Adopted;
            }
            Some(Err(_)) => return Adoption::Nothing,
            None => {}
        }
        let folder = folders.parent(&self.config.name);
        let Some(run) = folders::read_run::<Run>(&folder) else {
            return Adoption::Nothing;
        };
        let Some(process) = Process::find(run.process) else {
            folders::remove(&folder);
            return Adoption::Nothing;
        };
        let vram_bytes = self.config.backend.vram_bytes();
        match connect(folders, &self.config.name) {
            Ok(gpu) => {
                if run.vram_bytes != vram_bytes {
                    log::warn!(
                        "Parent {} keeps its {} MiB of video memory until it is started again",
                        self.config.name,
                        run.vram_bytes >> 20
                    );
                }
                self.took_up(Some(process), Box::new(gpu));
                Adoption::Adopted
            }
            // VMs work on it: it is left to them until it ends.
            Err(GpuError::Unsupported(what)) => {
                let name = &self.config.name;
                log::warn!("The GPU of {name} goes on, unmanaged: its process has {what}");
                self.process = Some(process);
                self.partitions = Partitions::new(run.vram_bytes);
                self.since = Instant::now();
                self.foreign = true;
                let description = run.description.and_then(|of| serde_json::from_value(of).ok());
                self.description = description;
                self.reason = Some(FOREIGN.into());
                Adoption::Foreign
            }
            Err(error) => {
                log::warn!("Replacing the software GPU of {}: {error}", self.config.name);
                process.end(Duration::ZERO);
                folders::remove(&folder);
                Adoption::Nothing
            }
        }
    }

    fn took_up(&mut self, process: Option<Process>, mut gpu: Box<dyn Gpu>) {
        self.rotation.tell(&mut *gpu);
        let description = gpu.describe().clone();
        self.partitions = Partitions::new(description.vram_bytes);
        self.shares = Shares::of(&description, &self.knobs);
        self.description = Some(description);
        self.gpu = Some(gpu);
        self.process = process;
        self.since = Instant::now();
        self.retry_at = None;
        self.reason = None;
    }

    /// Ends it in an orderly way.
    pub fn stop(&mut self, folders: &Folders) {
        self.gpu = None;
        if let Some(process) = self.process.take() {
            process.signal(Signal::SIGTERM);
            process.end(END_PATIENCE);
        }
        folders::remove(&folders.parent(&self.config.name));
    }
}

/// What a process wrote before it ended.
fn last_words(file: File) -> Option<String> {
    let mut file = file;
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(MAX_WORDS).read_to_string(&mut text).ok()?;
    Some(text).filter(|text| !text.is_empty())
}

fn connect(folders: &Folders, name: &str) -> std::result::Result<MediatedGpu, GpuError> {
    let path = folders.admin_socket(name);
    let socket = SeqPacket::connect_with_timeout(&path, START_PATIENCE).map_err(|error| {
        io::Error::new(error.kind(), format!("Cannot connect to {}: {error}", path.display()))
    })?;
    MediatedGpu::open(socket)
}

/// Ends the software GPU that is written down in a folder, if it is still there, and removes the folder.
pub fn end_recorded(folder: &Path) {
    if let Some(process) =
        folders::read_run::<Run>(folder).and_then(|run| Process::find(run.process))
    {
        process.signal(Signal::SIGTERM);
        process.end(END_PATIENCE);
    }
    folders::remove(folder);
}

/// Why a parent cannot be asked.
fn gone(name: &str, reason: Option<&str>) -> ErrorDetail {
    let reason = reason.unwrap_or("starting");
    let what =
        format!("Parent {name} is not there: {reason}; it is being started again, try in a moment");
    ErrorDetail::new(ErrorCode::Unavailable, what)
}

/// What a GPU's error means to whoever asked.
pub fn refusal(error: &GpuError) -> ErrorDetail {
    let code = match error {
        GpuError::Lost(_) | GpuError::Io(_) => ErrorCode::Unavailable,
        GpuError::Limit(_) | GpuError::Pieces { .. } => ErrorCode::NoRoom,
        GpuError::NotFound(_) => ErrorCode::NotFound,
        _ => ErrorCode::Internal,
    };
    ErrorDetail::new(code, error)
}

impl Manager {
    /// Starts a parent that is not there. On failure it is tried again later.
    pub(super) fn start_parent(&mut self, index: usize) {
        let parent = &mut self.parents[index];
        parent.retry_at = None;
        let generation = self.watcher.generation();
        parent.generation = generation;
        match parent.launch(&self.folders, self.worker_user) {
            Ok((process, gpu)) => {
                if let Some(process) = &process {
                    log::info!("Parent {} runs in process {}", parent.name(), process.pid());
                    self.watcher.watch(process, Watched::Gpu(parent.name().into(), generation));
                } else {
                    log::info!("Parent {} is a {}", parent.name(), gpu.describe().name);
                }
                parent.took_up(process, gpu);
            }
            Err(error) => {
                let pause =
                    parent.backoff.after_death(Duration::ZERO).max(Duration::from_millis(50));
                let why = match error {
                    GpuError::Lost(why) => why,
                    other => other.to_string(),
                };
                log::error!("Cannot start parent {}: {why}", parent.name());
                parent.reason = Some(why);
                parent.retry_at = Some(Instant::now() + pause);
            }
        }
    }

    /// Watches a parent that was adopted.
    pub(super) fn watch_parent(&mut self, index: usize) {
        let generation = self.watcher.generation();
        let parent = &mut self.parents[index];
        parent.generation = generation;
        if let Some(process) = &parent.process {
            self.watcher.watch(process, Watched::Gpu(parent.name().into(), generation));
        }
    }

    pub(super) fn gpu_exited(&mut self, name: &str, generation: u64) {
        let found = self.parents.iter().position(|parent| parent.name() == name);
        if let Some(index) = found.filter(|index| self.parents[*index].generation == generation) {
            self.lose_parent(index, "its process has ended");
        }
    }

    /// Ends the process of a GPU that is of a release that is not understood, once the last vGPU on it is gone. A new one is
    /// started when it has ended.
    pub(super) fn replace_foreign(&mut self, name: &str) {
        let used = self.vgpus.values().any(|vgpu| vgpu.parent == name);
        let found = self.parents.iter().find(|parent| parent.name() == name && parent.foreign);
        if let Some(process) = found.filter(|_| !used).and_then(|parent| parent.process.as_ref()) {
            log::info!(
                "The process of {name} is of another version and has no vGPU left; replacing it"
            );
            process.signal(Signal::SIGTERM);
        }
    }

    /// A GPU fell off the bus: its vGPUs have failed, and it is started again.
    pub(super) fn lose_parent(&mut self, index: usize, why: &str) {
        let parent = &mut self.parents[index];
        parent.gpu = None;
        parent.foreign = false;
        let ended = parent.process.take().and_then(|process| process.end(Duration::ZERO));
        let why = ended.map_or_else(|| why.to_owned(), |status| format!("{why} ({status})"));
        log::error!("Parent {} is lost: {why}", parent.name());
        parent.generation = 0;
        parent.partitions = Partitions::new(parent.partitions.total());
        parent.shares = Shares::with_knobs(&parent.knobs);
        parent.next_read = None;
        parent.screen = None;
        let pause = parent.backoff.after_death(parent.since.elapsed());
        parent.retry_at = Some(Instant::now() + pause);
        parent.reason = Some(why);
        let name = parent.name().to_owned();
        for vgpu in self.vgpus.values_mut().filter(|vgpu| vgpu.parent == name) {
            vgpu.fail(GPU_LOST);
        }
    }

    /// Marks a vGPU whose worker says that its GPU is gone.
    pub(super) fn fail_for_lost_gpu(&mut self, id: VgpuId) {
        if let Some(vgpu) = self.vgpus.get_mut(&id) {
            vgpu.fail(GPU_LOST);
        }
    }

    /// Does something with a parent's GPU. An error that means that the GPU is gone is acted upon.
    pub(super) fn with_gpu<T>(
        &mut self,
        index: usize,
        body: impl FnOnce(&mut dyn Gpu) -> std::result::Result<T, GpuError>,
    ) -> Result<T> {
        let result = body(self.parents[index].gpu()?);
        result.map_err(|error| {
            if let GpuError::Lost(why) = &error {
                self.lose_parent(index, why);
            }
            refusal(&error)
        })
    }

    /// Takes everything that is on a parent's GPU back from a vGPU.
    pub(super) fn evict(&mut self, index: usize, vgpu: VgpuId) {
        if self.parents[index].is_ready() {
            match self.with_gpu(index, |gpu| match gpu.evict(vgpu) {
                // Its connection closed, and the GPU has noticed that first.
                Err(GpuError::NotFound(_)) => Ok(()),
                other => other,
            }) {
                Ok(()) => {}
                Err(error) => log::warn!("Cannot evict vGPU {vgpu}: {error}"),
            }
        }
    }
}
