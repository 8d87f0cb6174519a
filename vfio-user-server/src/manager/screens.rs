//! Physical screens: who is on them, and whether vGPUs take turns.
//!
//! Who is on a screen is known by the GPU, which outlives managers. That they take turns is what an operator chose for
//! good, so it is kept in `<config-dir>/<parent>/.screen.json`, and told to a GPU that is started.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mdev_core::durable;
use mdev_core::gpu::{self, Gpu, GpuCapabilities};
use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};

use super::parent::Parent;
use super::scheduler::micros;
use super::{Manager, Result};
use crate::api::model::{ErrorCode, ErrorDetail, Focused, PhysicalScreen};

/// Longest file that is read.
const MAX_BYTES: u64 = 4096;
/// Longest time that each may be shown.
const LONGEST: u64 = 24 * 3600;

/// What the file holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Set {
    rotate_seconds: Option<u64>,
}

/// Whether a parent's vGPUs take turns on its screen.
#[derive(Clone, Debug)]
pub struct Rotation {
    file: PathBuf,
    set: Set,
}

impl Rotation {
    /// That of a parent, as it was left. What cannot be read is as if nothing had been set.
    pub fn load(config_dir: &Path, parent: &str) -> Self {
        let file = config_dir.join(parent).join(".screen.json");
        let set = match read(&file) {
            Ok(set) => set,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Set::default(),
            Err(error) => {
                log::error!("{}: {error}; vGPUs do not take turns on the screen", file.display());
                Set::default()
            }
        };
        Self { file, set }
    }

    /// How long each is shown.
    fn every(&self) -> Option<Duration> {
        self.set.rotate_seconds.map(Duration::from_secs)
    }

    /// Changes it. It is on disk when this returns; before that, the old one is.
    fn change(&mut self, rotate_seconds: Option<u64>) -> Result<()> {
        let set = Set { rotate_seconds };
        if set == self.set {
            return Ok(());
        }
        write(&self.file, set).map_err(|error| {
            let what = format!("Cannot write {}: {error}", self.file.display());
            ErrorDetail::new(ErrorCode::Internal, what)
        })?;
        self.set = set;
        Ok(())
    }

    /// Tells it to a GPU that is there anew.
    pub fn tell(&self, gpu: &mut dyn Gpu) {
        let has_screen = gpu.describe().capabilities.contains(GpuCapabilities::SCANOUT);
        if let (true, Some(every)) = (has_screen, self.every())
            && let Err(error) = gpu.rotate(Some(every))
        {
            log::error!("{}: vGPUs do not take turns: {error}", gpu.describe().parent);
        }
    }
}

fn read(file: &Path) -> io::Result<Set> {
    if fs::metadata(file)?.len() > MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "Too long"));
    }
    let set: Set = serde_json::from_slice(&fs::read(file)?)?;
    match set.rotate_seconds {
        None | Some(1..=LONGEST) => Ok(set),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "No such time")),
    }
}

fn write(path: &Path, set: Set) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(&set)?;
    text.push(b'\n');
    durable::run(&durable::replace(path, &path.with_extension("json.tmp"), text))
}

/// A screen as the API tells it.
fn view(parent: &Parent, screen: gpu::PhysicalScreen) -> PhysicalScreen {
    PhysicalScreen {
        parent: parent.name().to_owned(),
        focus: screen.focus,
        rotate_seconds: screen.rotation.map(|every| every.as_secs()),
    }
}

impl Manager {
    /// Asks each GPU that has a screen who is on it.
    pub(super) fn look_at_screens(&mut self) {
        for index in 0..self.parents.len() {
            let parent = &self.parents[index];
            if !parent.has_screen() || !parent.is_ready() {
                self.parents[index].screen = None;
                continue;
            }
            let screen = self.with_gpu(index, |gpu| gpu.screen());
            let parent = &mut self.parents[index];
            parent.screen = match screen {
                Ok(screen) => Some(view(parent, screen)),
                Err(error) => {
                    log::warn!("Who is on the screen of {} is not known: {error}", parent.name());
                    None
                }
            };
        }
    }

    /// Whether a running vGPU is the one on its parent's screen, where there is a screen.
    pub(super) fn has_focus(&self, id: VgpuId) -> Option<bool> {
        let vgpu = self.vgpus.get(&id)?;
        let parent = self.parents.iter().find(|parent| parent.name() == vgpu.parent)?;
        parent.screen.as_ref().map(|screen| screen.focus == Some(id))
    }

    /// Puts a vGPU on its parent's screen, where it stays.
    pub fn focus(&mut self, id: VgpuId) -> Result<Focused> {
        // What has no picture cannot be shown.
        self.screen(id)?;
        let Some(parent) = self.vgpus.get(&id).map(|vgpu| vgpu.parent.clone()) else {
            return Err(ErrorDetail::new(ErrorCode::Conflict, format!("vGPU {id} is not running")));
        };
        let index = self.parent_index(&parent)?;
        if !self.parents[index].has_screen() {
            let what = format!(
                "vGPU {id} is on parent {parent}, which has no physical screen; `vgpuctl view {id}` \
                 shows it here"
            );
            return Err(ErrorDetail::new(ErrorCode::Conflict, what));
        }
        let took = self.with_gpu(index, |gpu| gpu.focus(id))?;
        self.parents[index].rotation.change(None)?;
        Ok(Focused { parent, focus: id, switch_us: micros(took) })
    }

    /// Shows a parent's vGPUs on its screen in turn, or ends that.
    pub fn rotate(&mut self, parent: &str, seconds: Option<u64>) -> Result<PhysicalScreen> {
        let index = self.parent_index(parent)?;
        if seconds.is_some_and(|seconds| !(1..=LONGEST).contains(&seconds)) {
            let what = format!("Each vGPU is shown for 1 to {LONGEST} seconds");
            return Err(ErrorDetail::new(ErrorCode::Invalid, what));
        }
        if !self.parents[index].has_screen() {
            let what = format!(
                "Parent {parent} has no physical screen, so its vGPUs cannot take turns on it"
            );
            return Err(ErrorDetail::new(ErrorCode::Conflict, what));
        }
        self.with_gpu(index, |gpu| gpu.rotate(seconds.map(Duration::from_secs)))?;
        self.parents[index].rotation.change(seconds)?;
        let screen = self.with_gpu(index, |gpu| gpu.screen())?;
        Ok(view(&self.parents[index], screen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let load = || Rotation::load(dir.path(), "0000:3b:00.0");
        assert_eq!(load().every(), None);
        load().change(Some(10)).unwrap();
        assert_eq!(load().every(), Some(Duration::from_secs(10)));
        load().change(None).unwrap();
        assert_eq!(load().every(), None);
        let file = dir.path().join("0000:3b:00.0/.screen.json");
        fs::write(&file, "{\"rotate_seconds\":0}").unwrap();
        assert_eq!(read(&file).unwrap_err().to_string(), "No such time");
        for text in ["{", "{\"rotate_seconds\":0}", "{\"speed\":1}"] {
            fs::write(&file, text).unwrap();
            assert_eq!(load().every(), None, "{text}");
        }
    }
}
