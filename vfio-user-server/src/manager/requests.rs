//! What the API asks the manager for. Everything here answers at once; what needs a worker's word is asked for by the
//! API itself (see [`super::ask`]), with the socket that is named in the answer.

use std::num::NonZeroU32;
use std::path::PathBuf;

use mdev_core::definition::{Attribute as Meaning, Attrs, Definition, Start, StoreError};
use mdev_core::ids::VgpuId;
use mdev_core::lifecycle::VgpuState as Life;
use tokio::sync::oneshot;

use super::parent::Parent;
use super::sockets::OWNER;
use super::vgpu::{Vgpu, settings};
use super::{Manager, Result};
use crate::api::model::{
    self, Attribute, CreateVgpu, ErrorCode, ErrorDetail, ModifyTarget, ModifyVgpu, VgpuState,
};
use crate::callouts::Subject;

/// What is said of a vGPU whose worker is of a release that is not understood.
const FOREIGN: &str = "It is of another version of vgpud: its VM goes on, and nothing can be asked; once that VM is shut down, stop this vGPU and start it again";

/// A vGPU as the manager knows it, and where its worker can be asked for the rest.
#[derive(Clone, Debug)]
pub struct Listed {
    /// What the manager knows.
    pub vgpu: model::Vgpu,
    /// The worker's socket, while there is a worker.
    pub control: Option<PathBuf>,
    /// It has a worker that cannot be asked, being of another release.
    pub foreign: bool,
}

/// What a request would make.
struct Planned {
    vgpu: Vgpu,
    parent: String,
    definition: Definition,
}

/// What a change would make of a definition, of a running vGPU, or of both.
#[derive(Clone, Debug)]
pub struct Change {
    /// The definition as it is to be.
    pub stored: Option<Subject>,
    /// What is to be in force.
    pub live: Option<Subject>,
}

/// Where a vGPU's screen can be asked for.
#[derive(Clone, Debug)]
pub struct Screen {
    /// The worker's socket.
    pub control: PathBuf,
    /// Pictures that may be read out in a second.
    pub refresh: NonZeroU32,
}

fn error(code: ErrorCode, message: impl std::fmt::Display) -> ErrorDetail {
    ErrorDetail::new(code, message)
}

fn store_error(error: StoreError) -> ErrorDetail {
    let code = match error {
        StoreError::Parent(_) => ErrorCode::Invalid,
        _ => ErrorCode::Internal,
    };
    ErrorDetail::new(code, error)
}

fn not_defined(id: VgpuId) -> ErrorDetail {
    error(
        ErrorCode::NotFound,
        format!("There is no vGPU {id}; `vgpuctl list --defined` names those that are defined"),
    )
}

/// Attributes as the API writes them, read.
fn attrs(list: Vec<Attribute>) -> Result<Attrs> {
    list.into_iter()
        .map(|mut attr| match (attr.pop_first(), attr.is_empty()) {
            (Some(pair), true) => Ok(pair),
            _ => Err(error(
                ErrorCode::Invalid,
                "Each of \"attrs\" is an object with one member, as in [{\"core\": \"80\"}]",
            )),
        })
        .collect()
}

fn attrs_view(attrs: &Attrs) -> Vec<Attribute> {
    attrs.iter().map(|(name, value)| [(name.to_owned(), value.to_owned())].into()).collect()
}

impl Manager {
    /// All physical GPUs.
    pub fn parents(&mut self) -> Vec<model::Parent> {
        self.look_at_screens();
        let running = |name| self.vgpus.values().filter(|vgpu| vgpu.parent == name).count();
        self.parents.iter().map(|parent| parent.view(running(parent.name()))).collect()
    }

    /// All types.
    pub fn types(&self) -> Vec<model::ParentTypes> {
        self.parents.iter().map(super::parent::Parent::types).collect()
    }

    /// All vGPUs, in the order of parents and then of uuids.
    pub fn list(&mut self) -> Result<Vec<Listed>> {
        self.look_at_screens();
        let scan = self.store.scan().map_err(store_error)?;
        for problem in &scan.problems {
            log::warn!("{}", problem.error);
        }
        let mut listed: Vec<_> = scan
            .definitions
            .iter()
            .map(|stored| self.listed(stored.vgpu, Some((&stored.parent, &stored.definition))))
            .collect();
        let transient = self
            .vgpus
            .keys()
            .filter(|id| !scan.definitions.iter().any(|stored| stored.vgpu == **id));
        listed.extend(transient.map(|id| self.listed(*id, None)));
        listed.sort_by(|a, b| (&a.vgpu.parent, a.vgpu.uuid).cmp(&(&b.vgpu.parent, b.vgpu.uuid)));
        Ok(listed)
    }

    /// One vGPU.
    pub fn show(&mut self, id: VgpuId) -> Result<Listed> {
        self.look_at_screens();
        let stored = self.definition(id)?;
        if stored.is_none() && !self.vgpus.contains_key(&id) {
            return Err(not_defined(id));
        }
        let stored = stored.as_ref().map(|(parent, definition)| (parent.as_str(), definition));
        Ok(self.listed(id, stored))
    }

    /// A vGPU's definition and its parent, where it is defined.
    fn definition(&self, id: VgpuId) -> Result<Option<(String, Definition)>> {
        let scan = self.store.scan().map_err(store_error)?;
        let mut found = scan.definitions.into_iter().filter(|stored| stored.vgpu == id);
        Ok(found.next().map(|stored| (stored.parent, stored.definition)))
    }

    fn listed(&self, id: VgpuId, stored: Option<(&str, &Definition)>) -> Listed {
        let vgpu = self.vgpus.get(&id);
        let running = vgpu.map(|vgpu| (vgpu.parent.as_str(), &vgpu.definition));
        // A running vGPU is where it runs, whatever its definition says by now.
        let parent = running.or(stored).map(|(parent, _)| parent.to_owned());
        let shown = stored.or(running).map(|(_, definition)| definition);
        let process = vgpu.and_then(|vgpu| vgpu.process.as_ref());
        Listed {
            control: vgpu.and_then(|vgpu| vgpu.control(&self.folders)),
            foreign: vgpu.is_some_and(|vgpu| vgpu.foreign.is_some()),
            vgpu: model::Vgpu {
                uuid: id,
                parent: parent.unwrap_or_default(),
                mdev_type: shown.map(|d| d.mdev_type.clone()).unwrap_or_default(),
                start: stored.map(|(_, d)| d.start.into()).unwrap_or_default(),
                attrs: shown.map(|d| attrs_view(&d.attrs)).unwrap_or_default(),
                live_type: running.map(|(_, definition)| definition.mdev_type.clone()),
                live_attrs: running.map(|(_, definition)| attrs_view(&definition.attrs)),
                defined: stored.is_some(),
                state: vgpu.map_or(VgpuState::Stopped, state),
                reason: vgpu.and_then(|vgpu| vgpu.reason.clone()),
                socket: process
                    .map(|_| self.folders.vfio_socket(id).to_string_lossy().into_owned()),
                pid: process.map(crate::spawn::Process::pid),
                vm: None,
                focus: self.has_focus(id),
                warnings: vgpu
                    .and_then(|vgpu| vgpu.foreign.as_ref())
                    .map(|why| format!("{why}. {FOREIGN}"))
                    .into_iter()
                    .collect(),
            },
        }
    }

    /// Defines a vGPU, starts a transient one, or both.
    pub fn create(&mut self, request: CreateVgpu) -> Result<Listed> {
        let (define, run) = (request.define, request.run);
        let Planned { vgpu, parent, definition } = self.plan(request)?;
        let id = vgpu.id;
        if define {
            self.store.save(&parent, id, &definition).map_err(store_error)?;
        }
        if run && let Err(error) = self.start_vgpu(vgpu) {
            if define {
                self.store.remove(&parent, id).map_err(store_error)?;
            }
            return Err(error);
        }
        self.show(id)
    }

    /// What a request would make; the request with its choices made, so that it makes the same.
    pub fn planned(&self, mut request: CreateVgpu) -> Result<(CreateVgpu, Subject)> {
        let id = *request.uuid.get_or_insert_with(VgpuId::random);
        let Planned { parent, definition, .. } = self.plan(request.clone())?;
        if request.mdev_type.is_some() {
            request.parent = Some(parent.clone());
        }
        Ok((request, Subject { id, parent, definition }))
    }

    /// What a request would make. Nothing is changed.
    fn plan(&self, request: CreateVgpu) -> Result<Planned> {
        if !request.define && !request.run {
            let what = "Nothing to do: set \"define\", \"run\" or both";
            return Err(error(ErrorCode::Invalid, what));
        }
        let id = request.uuid.unwrap_or_else(VgpuId::random);
        let stored = self.definition(id)?.map(|(parent, _)| parent);
        let elsewhere = |there: &str| request.parent.as_ref().is_some_and(|asked| asked != there);
        match &stored {
            Some(parent) if request.define || elsewhere(parent) => {
                let what = format!("vGPU {id} is defined already, on parent {parent}");
                return Err(error(ErrorCode::Exists, what));
            }
            _ => {}
        }
        let running = self.vgpus.get(&id);
        if request.run && running.is_some() {
            return Err(error(ErrorCode::Conflict, format!("vGPU {id} is running already")));
        }
        let (parent, definition) = match (request.mdev_type, running) {
            (None, Some(vgpu)) if request.parent.is_none() && request.attrs.is_empty() => {
                let start = request.start.into();
                (vgpu.parent.clone(), Definition { start, ..vgpu.definition.clone() })
            }
            (None, _) => {
                let what = "A type is needed: set \"mdev_type\"; `vgpuctl types` names them";
                return Err(error(ErrorCode::Invalid, what));
            }
            (Some(mdev_type), _) => {
                let attrs = attrs(request.attrs)?;
                let definition = Definition { mdev_type, start: request.start.into(), attrs };
                let parent = match request.parent.or(stored) {
                    Some(parent) => parent,
                    None => self.choose_parent(&definition)?,
                };
                (parent, definition)
            }
        };
        let vgpu = self.vgpu(id, &parent, &definition)?;
        Ok(Planned { vgpu, parent, definition })
    }

    /// A vGPU that could be started from a definition; what is wrong with the definition otherwise.
    pub(super) fn vgpu(&self, id: VgpuId, parent: &str, definition: &Definition) -> Result<Vgpu> {
        let on = &self.parents[self.parent_index(parent)?];
        let profile = on.profile(&definition.mdev_type)?;
        let vgpu = Vgpu::new(id, parent.to_owned(), profile, definition.clone(), self.owner)?;
        on.check_attrs(&definition.attrs)?;
        Ok(vgpu)
    }

    /// The first parent that offers a definition's type, preferably one that has room for it.
    fn choose_parent(&self, definition: &Definition) -> Result<String> {
        let share = settings(definition)?.share;
        let offers = |parent: &Parent| parent.profile(&definition.mdev_type).ok();
        let offering: Vec<_> =
            self.parents.iter().filter_map(|on| offers(on).map(|profile| (on, profile))).collect();
        let fits = offering.iter().find(|(parent, profile)| {
            parent.partitions.available(profile) > 0
                && parent.shares.check(share).is_ok()
                && parent.check_attrs(&definition.attrs).is_ok()
        });
        let chosen = fits.or(offering.first()).map(|(parent, _)| *parent);
        // Where none offers it, the first one will say why.
        let chosen = chosen.or(self.parents.first());
        Ok(chosen.map(Parent::name).unwrap_or_default().to_owned())
    }

    /// Starts a vGPU that is defined.
    pub fn start(&mut self, id: VgpuId, owner: Option<&str>) -> Result<Listed> {
        let Subject { parent, definition, .. } = self.to_start(id, owner)?;
        let vgpu = self.vgpu(id, &parent, &definition)?;
        self.start_vgpu(vgpu)?;
        self.show(id)
    }

    /// What a start would start.
    pub fn to_start(&self, id: VgpuId, owner: Option<&str>) -> Result<Subject> {
        if let Some(vgpu) = self.vgpus.get(&id) {
            let what = match vgpu.life.state() {
                Life::Failed if !vgpu.is_restarting() => {
                    format!("vGPU {id} has failed; stop it first, then start it")
                }
                _ => format!("vGPU {id} is running already"),
            };
            return Err(error(ErrorCode::Conflict, what));
        }
        let (parent, mut definition) = self.definition(id)?.ok_or_else(|| not_defined(id))?;
        if let Some(owner) = owner {
            definition.attrs.set(OWNER, owner);
        }
        self.vgpu(id, &parent, &definition)?;
        Ok(Subject { id, parent, definition })
    }

    /// Begins to stop a vGPU; what is returned resolves when nothing of it is left.
    pub fn stop(&mut self, id: VgpuId) -> Result<oneshot::Receiver<()>> {
        self.to_stop(id)?;
        self.stop_vgpu(id)
    }

    /// What a stop would stop.
    pub fn to_stop(&self, id: VgpuId) -> Result<Subject> {
        match self.vgpus.get(&id) {
            Some(vgpu) => {
                let (parent, definition) = (vgpu.parent.clone(), vgpu.definition.clone());
                Ok(Subject { id, parent, definition })
            }
            None if self.definition(id)?.is_none() => Err(not_defined(id)),
            None => Err(error(ErrorCode::Conflict, format!("vGPU {id} is not running"))),
        }
    }

    /// Removes a definition. A vGPU that is running goes on, and is gone when it is stopped.
    pub fn undefine(&mut self, id: VgpuId) -> Result<()> {
        let Subject { parent, .. } = self.to_undefine(id)?;
        self.store.remove(&parent, id).map_err(store_error)?;
        Ok(())
    }

    /// What would be removed.
    pub fn to_undefine(&self, id: VgpuId) -> Result<Subject> {
        match self.definition(id)? {
            Some((parent, definition)) => Ok(Subject { id, parent, definition }),
            None if self.vgpus.contains_key(&id) => {
                let what = format!("vGPU {id} is running and not defined; stop it to be rid of it");
                Err(error(ErrorCode::Conflict, what))
            }
            None => Err(not_defined(id)),
        }
    }

    /// Changes a definition, a running vGPU, or both.
    pub fn modify(&mut self, id: VgpuId, request: ModifyVgpu) -> Result<Listed> {
        // Both are checked before either is changed.
        let Change { stored, live } = self.to_modify(id, request)?;
        if let Some(live) = live {
            self.change_live(id, live.definition)?;
        }
        if let Some(Subject { parent, definition, .. }) = stored {
            self.store.save(&parent, id, &definition).map_err(store_error)?;
        }
        self.show(id)
    }

    /// What a change would make. Nothing is changed.
    pub fn to_modify(&self, id: VgpuId, request: ModifyVgpu) -> Result<Change> {
        let live = request.target != ModifyTarget::Defined;
        let stored = self.definition(id)?;
        if stored.is_none() && !self.vgpus.contains_key(&id) {
            return Err(not_defined(id));
        }
        if request.live_attrs.is_some() && request.target != ModifyTarget::Both {
            let what = "\"live_attrs\" is for target \"both\"; set \"attrs\" for one of them";
            return Err(error(ErrorCode::Invalid, what));
        }
        let new = request.attrs.map(attrs).transpose()?;
        let stored = match (stored, request.target) {
            (_, ModifyTarget::Live) => None,
            (None, _) => {
                let what = format!("vGPU {id} is not defined; change it with target \"live\"");
                return Err(error(ErrorCode::Conflict, what));
            }
            (Some((parent, mut definition)), _) => {
                if let Some(mdev_type) = request.mdev_type.clone().filter(|_| !live) {
                    definition.mdev_type = mdev_type;
                }
                definition.start = request.start.map_or(definition.start, Into::into);
                definition.attrs = new.clone().unwrap_or(definition.attrs);
                self.vgpu(id, &parent, &definition)?;
                Some(Subject { id, parent, definition })
            }
        };
        if !live {
            return Ok(Change { stored, live: None });
        }
        let fixed = request.mdev_type.is_some()
            || (request.target == ModifyTarget::Live && request.start.is_some());
        if fixed {
            let what = "Only attributes of a running vGPU can change, not its type or start policy";
            return Err(error(ErrorCode::Invalid, what));
        }
        let Some(vgpu) = self.vgpus.get(&id) else {
            return Err(error(ErrorCode::Conflict, format!("vGPU {id} is not running")));
        };
        let new = request.live_attrs.map(attrs).transpose()?.or(new);
        let definition = Definition {
            attrs: new.unwrap_or_else(|| vgpu.definition.attrs.clone()),
            ..vgpu.definition.clone()
        };
        check_live(vgpu, &definition.attrs)?;
        let settings = settings(&definition)?;
        let parent = &self.parents[self.parent_index(&vgpu.parent)?];
        parent.check_attrs(&definition.attrs)?;
        parent.check_change(&vgpu.settings.quotas, &settings.quotas)?;
        let live = Subject { id, parent: vgpu.parent.clone(), definition };
        Ok(Change { stored, live: Some(live) })
    }

    /// Puts what was checked in force.
    fn change_live(&mut self, id: VgpuId, definition: Definition) -> Result<()> {
        let Some(vgpu) = self.vgpus.get(&id) else { return Ok(()) };
        let settings = settings(&definition)?;
        let index = self.parent_index(&vgpu.parent)?;
        self.reschedule(index, id, settings.share)?;
        self.set_quotas(index, id, &settings.quotas)?;
        if let Some(vgpu) = self.vgpus.get_mut(&id) {
            vgpu.definition = definition;
            vgpu.settings = settings;
            if let Err(error) = vgpu.write_run(&self.folders) {
                log::warn!("A later manager will not know vGPU {id}'s change: {error}");
            }
        }
        Ok(())
    }

    /// The screen of a running vGPU.
    pub fn screen(&self, id: VgpuId) -> Result<Screen> {
        let running = self.vgpus.get(&id).filter(|vgpu| vgpu.process.is_some());
        let Some(vgpu) = running else {
            return Err(match self.definition(id)? {
                Some(_) => {
                    let what =
                        format!("vGPU {id} is not running; `vgpuctl start -u {id}` starts it");
                    error(ErrorCode::Conflict, what)
                }
                None => not_defined(id),
            });
        };
        if vgpu.profile.head.is_none() {
            let what = format!("vGPU {id} has no display head; types that end in Q have one");
            return Err(error(ErrorCode::Conflict, what));
        }
        let control = self.folders.worker_socket(id);
        Ok(Screen { control, refresh: vgpu.settings.quotas.refresh })
    }

    /// What is defined with start policy `auto` and does not run, in the order in which it is started: of the names of
    /// parents, and then of uuids.
    pub(super) fn to_start_by_itself(&self) -> Vec<VgpuId> {
        let scan = match self.store.scan() {
            Ok(scan) => scan,
            Err(error) => {
                log::error!("No vGPU is started: {error}");
                return Vec::new();
            }
        };
        for problem in &scan.problems {
            log::warn!("{}", problem.error);
        }
        let auto = scan.definitions.into_iter().filter(|stored| {
            stored.definition.start == Start::Auto && !self.vgpus.contains_key(&stored.vgpu)
        });
        auto.map(|stored| stored.vgpu).collect()
    }

    /// Starts what is to start by itself.
    pub(super) fn start_defined(&mut self) {
        for id in self.to_start_by_itself() {
            if let Err(error) = self.start(id, None) {
                log::error!("vGPU {id} is not started: {error}");
            }
        }
    }
}

/// Refuses a change of what cannot change while a vGPU runs.
fn check_live(vgpu: &Vgpu, attrs: &Attrs) -> Result<()> {
    for (name, value) in attrs.iter().chain(vgpu.definition.attrs.iter()) {
        let live = Meaning::named(name).is_ok_and(|meaning| meaning.live);
        let same = attrs.get(name) == vgpu.definition.attrs.get(name);
        if !same && !live && Meaning::named(name).is_ok() {
            let what = format!(
                "Attribute {name:?} cannot change while the vGPU runs ({value:?} now or asked); stop it first"
            );
            return Err(error(ErrorCode::Conflict, what));
        }
    }
    Ok(())
}

pub(super) fn state(vgpu: &Vgpu) -> VgpuState {
    match vgpu.life.state() {
        Life::Failed if vgpu.is_restarting() => VgpuState::Restarting,
        Life::Failed => VgpuState::Failed,
        Life::Defined => VgpuState::Stopped,
        Life::Starting | Life::Active | Life::InUse | Life::Stopping => VgpuState::Running,
    }
}
