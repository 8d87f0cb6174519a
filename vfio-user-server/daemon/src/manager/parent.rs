//! A parent: a physical GPU with its GPU process, its scheduler and its vGPUs.
//!
//! * [`connection`]: the connection to the GPU, and calls of the GPU
//! * `process`: start, adoption, loss and end of the GPU process
//! * `adoption`: vGPUs that an earlier manager started
//! * `admission`: start of a vGPU, and release of its resources
//! * `workers`: restart and stop of workers
//! * `definitions`: checks of a definition against the parent
//! * `quotas`: limits besides time
//! * [`scheduling`], `scheduler_config`, `readings`: division of engine time, its settings, and the
//!   usage counters
//! * `screens`: the physical screen
//! * `statistics`: usage per vGPU and parent

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use mdev_core::gpu::{GpuCapabilities, GpuDescription};
use mdev_core::ids::VgpuId;
use mdev_core::partition::Partitions;
use mdev_core::profile::{self, Profile};

use super::Result;
use super::backoff::Backoff;
use super::vgpu::Vgpu;
use super::watcher::Generation;
use crate::backend::ParentConfig;
use vgpud_api::{ErrorCode, ErrorDetail, ParentState};

mod admission;
mod adoption;
mod connection;
mod definitions;
mod process;
mod quotas;
mod readings;
mod scheduler_config;
mod scheduling;
mod screens;
mod statistics;
mod workers;

pub use adoption::discard;
pub use process::{OpenResult, end_recorded};

use connection::Connection;
use process::EndingProcess;
use scheduling::Scheduling;
use screens::Screen;

/// Physical GPU, or software GPU, with the vGPUs that were started on it.
#[derive(Debug)]
pub struct Parent {
    config: ParentConfig,
    connection: Connection,
    /// Description of the GPU when it was last connected.
    description: Option<GpuDescription>,
    /// Number of the last start of the GPU process.
    generation: Generation,
    /// GPU process of a lost GPU, which was killed and has not ended yet.
    ending: Option<EndingProcess>,
    backoff: Backoff,
    vgpus: BTreeMap<VgpuId, Vgpu>,
    partitions: Partitions,
    scheduling: Scheduling,
    screen: Screen,
}

impl Parent {
    /// Creates a parent that is not started yet, with its settings from `config_dir`.
    pub fn new(config: ParentConfig, config_dir: &Path) -> Self {
        Self {
            connection: Connection::default(),
            description: None,
            generation: 0,
            ending: None,
            backoff: Backoff::default(),
            vgpus: BTreeMap::new(),
            partitions: Partitions::new(config.vram_bytes()),
            scheduling: Scheduling::load(config_dir, &config.name),
            screen: Screen::load(config_dir, &config.name),
            config,
        }
    }

    /// Returns the name: `soft0`, or a PCI address.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Returns the started vGPUs by UUID.
    pub fn vgpus(&self) -> impl Iterator<Item = &Vgpu> {
        self.vgpus.values()
    }

    /// Returns a started vGPU.
    pub fn vgpu(&self, id: VgpuId) -> Option<&Vgpu> {
        self.vgpus.get(&id)
    }

    /// Returns a started vGPU.
    pub fn vgpu_mut(&mut self, id: VgpuId) -> Option<&mut Vgpu> {
        self.vgpus.get_mut(&id)
    }

    /// Returns the GPU's capabilities when it was last connected.
    pub fn capabilities(&self) -> GpuCapabilities {
        self.description.as_ref().map_or(GpuCapabilities::empty(), |gpu| gpu.capabilities)
    }

    /// Returns whether each vGPU of the GPU has a context.
    fn has_contexts(&self) -> bool {
        self.capabilities().contains(GpuCapabilities::CONTEXTS)
    }

    /// Returns the GPU's own hang limit.
    fn hang_timeout(&self) -> Option<Duration> {
        self.description.as_ref().and_then(|gpu| gpu.hang_timeout)
    }

    /// Returns the type of that name.
    pub fn profile(&self, name: &str) -> Result<Profile> {
        let description = self.description.as_ref().ok_or_else(|| self.unavailable())?;
        profile::find(description, name)
            .map_err(|error| ErrorDetail::new(ErrorCode::NotFound, error))
    }

    /// Returns true if the type has room for one more vGPU.
    pub fn has_room(&self, profile: &Profile) -> bool {
        self.partitions.available(profile) > 0
    }

    /// Returns when the next timed operation is due: a start, a restart or kill of a worker, a
    /// reading.
    pub fn deadline(&self) -> Option<Instant> {
        let vgpus = self.vgpus.values().filter_map(|vgpu| vgpu.state().deadline());
        let own = [self.connection.retry_at(), self.scheduling.next_reading()];
        own.into_iter().flatten().chain(vgpus).min()
    }

    /// Describes the parent for the control API.
    pub fn describe(&self) -> vgpud_api::Parent {
        let description = self.description.as_ref();
        let capabilities = description.map(|gpu| gpu.capabilities);
        let names = capabilities.into_iter().flat_map(|all| {
            all.iter_names().map(|(name, _)| name.to_ascii_lowercase()).collect::<Vec<_>>()
        });
        vgpud_api::Parent {
            name: self.config.name.clone(),
            backend: self.config.backend_name().into(),
            model: description.map(|gpu| gpu.model.clone()).unwrap_or_default(),
            description: description.map(|gpu| gpu.name.clone()).unwrap_or_default(),
            state: match self.connection {
                Connection::Ready { .. } => ParentState::Ready,
                Connection::Foreign { .. } => ParentState::Foreign,
                Connection::Closed { .. } if self.backoff.deaths() == 0 => ParentState::Starting,
                Connection::Closed { .. } => ParentState::Lost,
            },
            vram_bytes: self.partitions.total(),
            vram_free_bytes: self.partitions.free(),
            capabilities: names.collect(),
            scheduler: self.scheduling.policy_name(),
            pid: self.connection.pid(),
            running: u32::try_from(self.vgpus.len()).unwrap_or(u32::MAX),
            screen: self.screen.status().cloned(),
        }
    }

    /// Lists the parent's types, with the number of vGPUs that can be started now.
    pub fn types(&self) -> vgpud_api::ParentTypes {
        let profiles = self.description.as_ref().map(profile::profiles).unwrap_or_default();
        let info = |profile: Profile| vgpud_api::TypeInfo {
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
        vgpud_api::ParentTypes {
            parent: self.config.name.clone(),
            types: profiles.into_iter().map(info).collect(),
        }
    }
}
