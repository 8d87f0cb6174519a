//! Requests about vGPUs and definitions. A request reads definitions from disk once,
//! and again to check a name.

use mdev_core::definition::Definition;
use mdev_core::ids::VgpuId;
use tokio::sync::oneshot;
use vgpud_api::{CreateVgpu, ErrorCode, ErrorDetail, ModifyTarget, ModifyVgpu};

use super::{
    Change, ClientReport, Listed, Saveable, Screen, Upgradable, parse_attrs, view_started,
    view_stopped,
};
use crate::manager::definitions::PlacedDefinition;
use crate::manager::parent::Parent;
use crate::manager::sockets::ChosenOwner;
use crate::manager::vgpu::lifecycle::State;
use crate::manager::vgpu::{Vgpu, settings};
use crate::manager::{Manager, Result};
use crate::vgpu_names;

/// vGPU that a request would create.
struct Plan {
    vgpu: Vgpu,
    placed: PlacedDefinition,
    /// Definition on disk before the request.
    stored: Option<PlacedDefinition>,
}

fn error(code: ErrorCode, message: impl std::fmt::Display) -> ErrorDetail {
    ErrorDetail::new(code, message)
}

fn not_defined(id: VgpuId) -> ErrorDetail {
    error(
        ErrorCode::NotFound,
        format!("There is no vGPU {id}; `vgpuctl list --defined` names those that are defined"),
    )
}

fn not_running(id: VgpuId) -> ErrorDetail {
    error(ErrorCode::Conflict, format!("vGPU {id} is not running"))
}

impl Manager {
    /// Lists all vGPUs, by parent and UUID.
    pub fn list(&mut self) -> Result<Vec<Listed>> {
        self.refresh_screens();
        let stored = self.definitions.all()?;
        let mut listed: Vec<_> =
            stored.iter().filter_map(|stored| self.view(stored.id, Some(stored))).collect();
        let transient =
            self.parents.vgpus().filter(|vgpu| !stored.iter().any(|stored| stored.id == vgpu.id));
        listed.extend(transient.filter_map(|vgpu| self.view(vgpu.id, None)));
        listed.sort_by(|a, b| (&a.vgpu.parent, a.vgpu.uuid).cmp(&(&b.vgpu.parent, b.vgpu.uuid)));
        Ok(listed)
    }

    /// Describes one vGPU.
    pub fn show(&mut self, id: VgpuId) -> Result<Listed> {
        let stored = self.definitions.find(id)?;
        self.refreshed(id, stored.as_ref())
    }

    /// Describes a vGPU whose definition has been read, with the current status of its screen.
    fn refreshed(&mut self, id: VgpuId, stored: Option<&PlacedDefinition>) -> Result<Listed> {
        self.refresh_screens();
        self.view(id, stored).ok_or_else(|| not_defined(id))
    }

    fn view(&self, id: VgpuId, stored: Option<&PlacedDefinition>) -> Option<Listed> {
        let started = self.parents.of_vgpu(id).and_then(|on| Some((on, on.vgpu(id)?)));
        match started {
            Some((on, vgpu)) => Some(view_started(&self.env.run_dir, on, vgpu, stored)),
            None => stored.map(view_stopped),
        }
    }

    /// Defines a vGPU, starts a transient vGPU, or both.
    pub fn create(&mut self, request: CreateVgpu) -> Result<Listed> {
        let (define, run) = (request.define, request.run);
        let Plan { vgpu, placed, stored } = self.plan(request)?;
        if define {
            self.definitions.save(&placed)?;
        }
        if run && let Err(error) = self.parents.get_mut(&placed.parent)?.start_vgpu(&self.env, vgpu)
        {
            if define {
                self.definitions.remove(&placed)?;
            }
            return Err(error);
        }
        let id = placed.id;
        let stored = if define { Some(placed) } else { stored };
        self.refreshed(id, stored.as_ref())
    }

    /// Returns the definition that a request would create, and the request with all choices made: a
    /// repetition creates the same.
    pub fn planned(&self, mut request: CreateVgpu) -> Result<(CreateVgpu, PlacedDefinition)> {
        request.uuid.get_or_insert_with(VgpuId::random);
        let Plan { placed, .. } = self.plan(request.clone())?;
        if request.mdev_type.is_some() {
            request.parent = Some(placed.parent.clone());
        }
        Ok((request, placed))
    }

    /// Checks a request to create a vGPU. Nothing is changed.
    fn plan(&self, request: CreateVgpu) -> Result<Plan> {
        if !request.define && !request.run {
            let what = "Nothing to do: set \"define\", \"run\" or both";
            return Err(error(ErrorCode::Invalid, what));
        }
        let id = request.uuid.unwrap_or_else(VgpuId::random);
        let stored = self.definitions.find(id)?;
        if let Some(PlacedDefinition { parent, .. }) = &stored {
            let elsewhere = request.parent.as_ref().is_some_and(|requested| requested != parent);
            if request.define || elsewhere {
                let what = format!("vGPU {id} is defined already, on parent {parent}");
                return Err(error(ErrorCode::Exists, what));
            }
        }
        let running = self.parents.vgpu(id);
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
                let mut attrs = parse_attrs(request.attrs)?;
                if let Some(stored) = &stored {
                    Self::keep_name(stored, &mut attrs)?;
                }
                let definition = Definition { mdev_type, start: request.start.into(), attrs };
                let stored = stored.as_ref().map(|stored| stored.parent.clone());
                let parent = match request.parent.or(stored) {
                    Some(parent) => parent,
                    None => self.choose_parent(&definition)?,
                };
                (parent, definition)
            }
        };
        let placed = PlacedDefinition { id, parent, definition };
        let vgpu = self.build(&placed)?;
        self.check_name(id, &placed.definition.attrs)?;
        Ok(Plan { vgpu, placed, stored })
    }

    /// Builds the vGPU of a definition, and refuses a definition that cannot be started.
    fn build(&self, placed: &PlacedDefinition) -> Result<Vgpu> {
        let PlacedDefinition { id, parent, definition } = placed;
        self.parents.get(parent)?.build(*id, definition, self.env.owner)
    }

    /// Chooses the first parent that has room for a definition, or else the first one that offers
    /// its type.
    fn choose_parent(&self, definition: &Definition) -> Result<String> {
        let share = settings(definition)?.share;
        let offers = |parent: &Parent| parent.profile(&definition.mdev_type).ok();
        let offering: Vec<_> =
            self.parents.iter().filter_map(|on| offers(on).map(|profile| (on, profile))).collect();
        let fits = offering.iter().find(|(parent, profile)| {
            parent.has_room(profile)
                && parent.check_share(share).is_ok()
                && parent.check_attrs(&definition.attrs).is_ok()
        });
        let chosen = fits.or(offering.first()).map(|(parent, _)| *parent);
        // If no parent offers the type, the first one's refusal explains it.
        let chosen = chosen.or(self.parents.iter().next());
        Ok(chosen.map(Parent::name).unwrap_or_default().to_owned())
    }

    /// Starts a vGPU that is defined.
    pub fn start(&mut self, id: VgpuId, owner: &ChosenOwner) -> Result<Listed> {
        let Plan { vgpu, placed, stored } = self.plan_start(id, owner)?;
        self.parents.get_mut(&placed.parent)?.start_vgpu(&self.env, vgpu)?;
        self.refreshed(id, stored.as_ref())
    }

    /// Returns the definition that [`Manager::start`] would start.
    pub fn to_start(&self, id: VgpuId, owner: &ChosenOwner) -> Result<PlacedDefinition> {
        Ok(self.plan_start(id, owner)?.placed)
    }

    fn plan_start(&self, id: VgpuId, owner: &ChosenOwner) -> Result<Plan> {
        if let Some(vgpu) = self.parents.vgpu(id) {
            let what = match vgpu.state() {
                State::Stuck { reason, .. } => {
                    format!("vGPU {id} cannot be started yet: {reason}")
                }
                State::Failed { .. } => {
                    format!("vGPU {id} has failed; stop it first, then start it")
                }
                _ => format!("vGPU {id} is running already"),
            };
            return Err(error(ErrorCode::Conflict, what));
        }
        let stored = self.definitions.find(id)?.ok_or_else(|| not_defined(id))?;
        let mut placed = stored.clone();
        owner.apply(&mut placed.definition.attrs);
        Ok(Plan { vgpu: self.build(&placed)?, placed, stored: Some(stored) })
    }

    /// Begins to stop a vGPU. The receiver resolves when the vGPU is removed, or with the reason
    /// why it cannot be.
    pub fn stop(&mut self, id: VgpuId) -> Result<oneshot::Receiver<Result<()>>> {
        self.to_stop(id)?;
        let (done, stopped) = oneshot::channel();
        let parent = self.parents.of_vgpu_mut(id).ok_or_else(|| not_running(id))?;
        parent.stop_vgpu(&self.env, id, done);
        Ok(stopped)
    }

    /// Returns the definition in force of the vGPU that [`Manager::stop`] would stop.
    pub fn to_stop(&self, id: VgpuId) -> Result<PlacedDefinition> {
        match self.parents.vgpu(id) {
            Some(vgpu) => {
                let (parent, definition) = (vgpu.parent.clone(), vgpu.definition.clone());
                Ok(PlacedDefinition { id, parent, definition })
            }
            None if self.definitions.find(id)?.is_none() => Err(not_defined(id)),
            None => Err(not_running(id)),
        }
    }

    /// Removes a definition. A running vGPU continues until it is stopped.
    pub fn undefine(&mut self, id: VgpuId) -> Result<()> {
        let stored = self.to_undefine(id)?;
        self.definitions.remove(&stored)?;
        // A vGPU that continues keeps its name.
        if let Some(vgpu) = self.parents.vgpu(id) {
            vgpu_names::set(id, vgpu.name());
        }
        Ok(())
    }

    /// Returns the definition that [`Manager::undefine`] would remove.
    pub fn to_undefine(&self, id: VgpuId) -> Result<PlacedDefinition> {
        match self.definitions.find(id)? {
            Some(stored) => Ok(stored),
            None if self.parents.vgpu(id).is_some() => {
                let what = format!("vGPU {id} is running and not defined; stop it to remove it");
                Err(error(ErrorCode::Conflict, what))
            }
            None => Err(not_defined(id)),
        }
    }

    /// Changes a definition, a running vGPU, or both.
    pub fn modify(&mut self, id: VgpuId, request: ModifyVgpu) -> Result<Listed> {
        let before = self.definitions.find(id)?;
        // Both changes are checked before one is made.
        let Change { stored, live } = self.plan_change(id, before.as_ref(), request)?;
        if let Some(live) = live {
            let parent = self.parents.of_vgpu_mut(id).ok_or_else(|| not_running(id))?;
            parent.change_live(&self.env.run_dir, id, live.definition)?;
        }
        if let Some(stored) = &stored {
            self.definitions.save(stored)?;
            self.rename_started(id, stored.definition.attrs.name().as_ref());
        }
        self.refreshed(id, stored.or(before).as_ref())
    }

    /// Returns the definitions that [`Manager::modify`] would make.
    pub fn to_modify(&self, id: VgpuId, request: ModifyVgpu) -> Result<Change> {
        let stored = self.definitions.find(id)?;
        self.plan_change(id, stored.as_ref(), request)
    }

    fn plan_change(
        &self,
        id: VgpuId,
        stored: Option<&PlacedDefinition>,
        request: ModifyVgpu,
    ) -> Result<Change> {
        if stored.is_none() && self.parents.vgpu(id).is_none() {
            return Err(not_defined(id));
        }
        if request.live_attrs.is_some() && request.target != ModifyTarget::Both {
            let what = "\"live_attrs\" is for target \"both\"; set \"attrs\" for one of them";
            return Err(error(ErrorCode::Invalid, what));
        }
        let ModifyVgpu { target, mdev_type, start, attrs, live_attrs, .. } = request;
        let attrs = attrs.map(parse_attrs).transpose()?;
        let is_live = target != ModifyTarget::Defined;
        let before = stored;
        let stored = match (stored, target) {
            (_, ModifyTarget::Live) => None,
            (None, _) => {
                let what = format!("vGPU {id} is not defined; change it with target \"live\"");
                return Err(error(ErrorCode::Conflict, what));
            }
            (Some(stored), _) => {
                let mut new = stored.clone();
                let definition = &mut new.definition;
                if let Some(mdev_type) = mdev_type.clone().filter(|_| !is_live) {
                    definition.mdev_type = mdev_type;
                }
                definition.start = start.map_or(definition.start, Into::into);
                definition.attrs = attrs.clone().unwrap_or_else(|| definition.attrs.clone());
                self.build(&new)?;
                self.check_name(id, &new.definition.attrs)?;
                Some(new)
            }
        };
        if !is_live {
            return Ok(Change { stored, live: None });
        }
        if mdev_type.is_some() || (target == ModifyTarget::Live && start.is_some()) {
            let what = "Only attributes of a running vGPU can change, not its type or start policy";
            return Err(error(ErrorCode::Invalid, what));
        }
        let parent = self.parents.of_vgpu(id).ok_or_else(|| not_running(id))?;
        let vgpu = parent.vgpu(id).ok_or_else(|| not_running(id))?;
        let attrs = live_attrs.map(parse_attrs).transpose()?.or(attrs);
        let mut definition = vgpu.definition.clone();
        definition.attrs = attrs.unwrap_or(definition.attrs);
        match (&stored, before) {
            (Some(new), _) => definition.attrs.set_name(new.definition.attrs.name().as_ref()),
            (None, Some(before)) => Self::keep_name(before, &mut definition.attrs)?,
            (None, None) => self.check_name(id, &definition.attrs)?,
        }
        parent.check_live_change(vgpu, &definition)?;
        let live = PlacedDefinition { id, parent: vgpu.parent.clone(), definition };
        Ok(Change { stored, live: Some(live) })
    }

    /// Returns a vGPU whose worker runs.
    fn with_worker(&self, id: VgpuId) -> Result<&Vgpu> {
        if let Some(vgpu) = self.parents.vgpu(id).filter(|vgpu| vgpu.state().worker().is_some()) {
            return Ok(vgpu);
        }
        Err(match self.definitions.find(id)? {
            Some(_) => {
                let what = format!("vGPU {id} is not running; `vgpuctl start -u {id}` starts it");
                error(ErrorCode::Conflict, what)
            }
            None => not_defined(id),
        })
    }

    /// Returns what a save or restore of a running vGPU needs.
    pub fn saveable(&self, id: VgpuId) -> Result<Saveable> {
        let vgpu = self.with_worker(id)?;
        let parent = self.parents.of_vgpu(id);
        Ok(Saveable {
            control: self.env.run_dir.worker_socket(id),
            mdev_type: vgpu.definition.mdev_type.clone(),
            vram_bytes: vgpu.profile.vram_bytes,
            staged: parent.is_some_and(|parent| parent.capabilities().stages_memory()),
        })
    }

    /// Returns what an upgrade of a running vGPU's worker needs.
    pub fn upgradable(&self, id: VgpuId) -> Result<Upgradable> {
        self.with_worker(id)?;
        Ok(Upgradable {
            control: self.env.run_dir.worker_socket(id),
            upgrade: self.env.run_dir.upgrade_socket(id),
        })
    }

    /// Returns the screen of a running vGPU.
    pub fn screen(&self, id: VgpuId) -> Result<Screen> {
        let vgpu = self.with_worker(id)?;
        if vgpu.profile.head.is_none() {
            let what = format!("vGPU {id} has no display head; types that end in Q have one");
            return Err(error(ErrorCode::Conflict, what));
        }
        let control = self.env.run_dir.worker_socket(id);
        Ok(Screen { control, refresh: vgpu.settings.quotas.refresh })
    }

    /// Records the clients that workers reported.
    pub(in crate::manager) fn clients_reported(&mut self, reports: &[ClientReport]) {
        for report in reports {
            let parent = self.parents.of_vgpu_mut(report.vgpu);
            if let Some(vgpu) = parent.and_then(|parent| parent.vgpu_mut(report.vgpu)) {
                vgpu.client_reported(report);
            }
        }
    }

    /// Lists the vGPUs with start policy `auto` that do not run, by parent and UUID.
    pub fn auto_start(&self) -> Vec<VgpuId> {
        let mut auto = self.definitions.auto_start();
        auto.retain(|id| self.parents.vgpu(*id).is_none());
        auto
    }

    /// Starts the vGPUs with start policy `auto`.
    pub fn start_all_auto(&mut self) {
        for id in self.auto_start() {
            if let Err(error) = self.start(id, &ChosenOwner::default()) {
                log::error!("vGPU {id} is not started: {error}");
            }
        }
    }
}
