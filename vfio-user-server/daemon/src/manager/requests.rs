//! Requests of the control API. Each returns without waiting for a worker. Where the API needs a
//! worker's status, it queries the worker itself (see [`crate::worker_client`]) at the socket that
//! the result names.
//!
//! * `vgpus`: requests about vGPUs and definitions
//! * `names`: names of vGPUs, which are unique
//! * `parents`: requests about parents, their schedulers and screens, and statistics

use std::num::NonZeroU32;
use std::path::PathBuf;

use mdev_core::definition::Attrs;
use mdev_core::ids::VgpuId;
use vgpud_api::{AttachedClient, Attribute, ErrorCode, ErrorDetail, VgpuStats};

use super::Result;
use super::definitions::PlacedDefinition;
use super::parent::Parent;
use super::run_dir::RunDir;
use super::vgpu::Vgpu;

mod names;
mod parents;
mod vgpus;

/// Warning about a worker of an unsupported version.
const FOREIGN: &str = "It is of another version of vgpud: its VM continues, but its worker cannot be queried; shut that VM down, then stop this vGPU and start it again";

/// vGPU as the manager knows it, and the socket at which its worker reports the rest.
#[derive(Clone, Debug)]
pub struct Listed {
    /// vGPU as the manager knows it.
    pub vgpu: vgpud_api::Vgpu,
    /// Control socket of the worker, if the worker can be queried.
    pub control: Option<PathBuf>,
    /// True if the worker is of an unsupported version.
    pub foreign: bool,
}

/// Statistics of a vGPU as the manager knows them, and the socket at which its worker reports the
/// rest.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Statistics as the manager knows them.
    pub stats: VgpuStats,
    /// Control socket of the worker, if the worker can be queried.
    pub control: Option<PathBuf>,
    /// User that owns the vGPU.
    pub owner: u32,
}

/// Result of a change to a definition, a running vGPU, or both.
#[derive(Clone, Debug)]
pub struct Change {
    /// New definition on disk.
    pub stored: Option<PlacedDefinition>,
    /// New definition in force.
    pub live: Option<PlacedDefinition>,
}

/// Client of a vGPU, as its worker reported it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientReport {
    /// vGPU of the worker.
    pub vgpu: VgpuId,
    /// Process ID of the worker.
    pub worker: u32,
    /// Attached client.
    pub client: Option<AttachedClient>,
}

/// What a save or restore of a running vGPU needs.
#[derive(Clone, Debug)]
pub struct Saveable {
    /// Control socket of the worker.
    pub control: PathBuf,
    /// Type.
    pub mdev_type: String,
    /// Length of the video memory in bytes.
    pub vram_bytes: u64,
    /// Whether video memory is copied through staging memory: the GPU decides, not the worker.
    pub staged: bool,
}

/// What an upgrade of a running vGPU's worker needs.
#[derive(Clone, Debug)]
pub struct Upgradable {
    /// Control socket of the worker.
    pub control: PathBuf,
    /// Socket of the anchor, which takes programs. Not every worker has an anchor.
    pub upgrade: PathBuf,
}

/// Screen of a vGPU.
#[derive(Clone, Debug)]
pub struct Screen {
    /// Control socket of the worker.
    pub control: PathBuf,
    /// Limit of readouts per second.
    pub refresh: NonZeroU32,
}

/// Parses attributes in the API's form.
fn parse_attrs(list: Vec<Attribute>) -> Result<Attrs> {
    list.into_iter()
        .map(|mut attr| match (attr.pop_first(), attr.is_empty()) {
            (Some(pair), true) => Ok(pair),
            _ => Err(ErrorDetail::new(
                ErrorCode::Invalid,
                "Each of \"attrs\" is an object with one member, as in [{\"core\": \"80\"}]",
            )),
        })
        .collect()
}

/// Returns attributes in the API's form.
fn attrs_view(attrs: &Attrs) -> Vec<Attribute> {
    attrs.iter().map(|(name, value)| [(name.to_owned(), value.to_owned())].into()).collect()
}

/// Describes a started vGPU, with its definition if it has one.
fn view_started(
    run_dir: &RunDir,
    parent: &Parent,
    vgpu: &Vgpu,
    stored: Option<&PlacedDefinition>,
) -> Listed {
    let running = &vgpu.definition;
    let shown = stored.map_or(running, |stored| &stored.definition);
    let pid = vgpu.pid();
    let socket = || run_dir.vfio_socket(vgpu.id).to_string_lossy().into_owned();
    Listed {
        control: vgpu.control(run_dir),
        foreign: vgpu.foreign().is_some(),
        vgpu: vgpud_api::Vgpu {
            uuid: vgpu.id,
            name: shown.attrs.name().map(String::from),
            // The definition may have been made for another parent meanwhile.
            parent: vgpu.parent.clone(),
            mdev_type: shown.mdev_type.clone(),
            start: stored.map(|stored| stored.definition.start.into()).unwrap_or_default(),
            attrs: attrs_view(&shown.attrs),
            live_type: Some(running.mdev_type.clone()),
            live_attrs: Some(attrs_view(&running.attrs)),
            defined: stored.is_some(),
            state: vgpu.state().reported(),
            reason: vgpu.state().reason().map(str::to_owned),
            socket: pid.map(|_| socket()),
            pid,
            context_pid: vgpu.context.as_ref().map(|context| context.process.pid()),
            vm: None,
            vm_name: None,
            focus: parent.has_focus(vgpu.id),
            warnings: vgpu.foreign().map(|why| format!("{why}. {FOREIGN}")).into_iter().collect(),
        },
    }
}

/// Describes a vGPU that is defined and not started.
fn view_stopped(stored: &PlacedDefinition) -> Listed {
    let PlacedDefinition { id, parent, definition } = stored;
    Listed {
        control: None,
        foreign: false,
        vgpu: vgpud_api::Vgpu {
            uuid: *id,
            name: definition.attrs.name().map(String::from),
            parent: parent.clone(),
            mdev_type: definition.mdev_type.clone(),
            start: definition.start.into(),
            attrs: attrs_view(&definition.attrs),
            live_type: None,
            live_attrs: None,
            defined: true,
            state: vgpud_api::VgpuState::Stopped,
            reason: None,
            socket: None,
            pid: None,
            context_pid: None,
            vm: None,
            vm_name: None,
            focus: None,
            warnings: Vec::new(),
        },
    }
}
