//! Physical screen of a parent: which vGPU has the focus, and whether the screen rotates among the
//! vGPUs.
//!
//! The GPU knows the focus and outlives managers. The rotation is a setting of the operator, kept
//! in `<config-dir>/<parent>/.screen.json` and restored on a GPU that is started.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mdev_core::durable;
use mdev_core::gpu::{Gpu, GpuCapabilities, GpuError, PhysicalScreen, ScreenStatus};
use mdev_core::ids::VgpuId;
use mdev_core::untrusted::read_whole;
use serde::{Deserialize, Serialize};

use super::Parent;
use super::scheduling::micros;
use crate::manager::Result;
use vgpud_api::{ErrorCode, ErrorDetail, Focused};

/// Limit of the settings file, in bytes.
const MAX_BYTES: usize = 4096;
/// Longest interval of a rotation, in seconds.
const MAX_INTERVAL: u64 = 24 * 3600;

/// Contents of the settings file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    rotate_seconds: Option<u64>,
}

/// Physical screen: the rotation that the operator set, and the status when the GPU was last asked.
#[derive(Clone, Debug)]
pub struct Screen {
    file: PathBuf,
    settings: Settings,
    status: Option<vgpud_api::PhysicalScreen>,
}

impl Screen {
    /// Reads a parent's settings. A file that cannot be read is logged, and counts as no rotation.
    pub fn load(config_dir: &Path, parent: &str) -> Self {
        let file = config_dir.join(parent).join(".screen.json");
        let settings = match read(&file) {
            Ok(settings) => settings,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Settings::default(),
            Err(error) => {
                log::error!("{}: {error}; the screen does not rotate", file.display());
                Settings::default()
            }
        };
        Self { file, settings, status: None }
    }

    /// Returns the status when the GPU was last asked.
    pub fn status(&self) -> Option<&vgpud_api::PhysicalScreen> {
        self.status.as_ref()
    }

    /// Discards the status.
    pub fn clear_status(&mut self) {
        self.status = None;
    }

    /// Returns the interval of the rotation.
    fn interval(&self) -> Option<Duration> {
        self.settings.rotate_seconds.map(Duration::from_secs)
    }

    /// Changes the rotation. The change is on disk when this returns.
    fn set_rotation(&mut self, rotate_seconds: Option<u64>) -> Result<()> {
        let settings = Settings { rotate_seconds };
        if settings == self.settings {
            return Ok(());
        }
        write(&self.file, settings).map_err(|error| {
            let what = format!("Cannot write {}: {error}", self.file.display());
            ErrorDetail::new(ErrorCode::Internal, what)
        })?;
        self.settings = settings;
        Ok(())
    }

    /// Sets the rotation on a GPU that has been opened.
    pub fn restore_rotation(&self, gpu: &mut dyn Gpu) {
        if let (Some(screen), Some(interval)) = (gpu.physical_screen(), self.interval())
            && let Err(error) = screen.rotate(Some(interval))
        {
            log::error!("{}: The screen does not rotate: {error}", gpu.describe().parent);
        }
    }
}

fn read(file: &Path) -> io::Result<Settings> {
    let settings: Settings = serde_json::from_slice(&read_whole(file, MAX_BYTES)?)?;
    match settings.rotate_seconds {
        None | Some(1..=MAX_INTERVAL) => Ok(settings),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "rotate_seconds out of range")),
    }
}

fn write(path: &Path, settings: Settings) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(&settings)?;
    text.push(b'\n');
    durable::run(&durable::replace(path, &path.with_extension("json.tmp"), text))
}

/// Returns the physical screen of a GPU.
fn screen_of(gpu: &mut dyn Gpu) -> std::result::Result<&mut dyn PhysicalScreen, GpuError> {
    gpu.physical_screen().ok_or(GpuError::Unsupported("a physical screen"))
}

impl Parent {
    fn has_screen(&self) -> bool {
        self.capabilities().contains(GpuCapabilities::SCANOUT)
    }

    fn screen_view(&self, status: ScreenStatus) -> vgpud_api::PhysicalScreen {
        vgpud_api::PhysicalScreen {
            parent: self.name().to_owned(),
            focus: status.focus,
            rotate_seconds: status.rotation.map(|interval| interval.as_secs()),
        }
    }

    /// Asks the GPU for the status of its screen.
    pub fn refresh_screen(&mut self) {
        if !self.has_screen() || !self.is_ready() {
            self.screen.status = None;
            return;
        }
        self.screen.status = match self.call_gpu(|gpu| screen_of(gpu)?.status()) {
            Ok(status) => Some(self.screen_view(status)),
            Err(error) => {
                log::warn!("Cannot read the screen of {}: {error}", self.name());
                None
            }
        };
    }

    /// Returns whether a vGPU has the focus of the physical screen, if there is one.
    pub fn has_focus(&self, vgpu: VgpuId) -> Option<bool> {
        self.screen.status().map(|screen| screen.focus == Some(vgpu))
    }

    /// Shows a vGPU on the physical screen and ends the rotation.
    pub fn focus(&mut self, vgpu: VgpuId) -> Result<Focused> {
        let parent = self.name().to_owned();
        if !self.has_screen() {
            let what = format!(
                "vGPU {vgpu} is on parent {parent}, which has no physical screen; `vgpuctl view {vgpu}` \
                 shows it here"
            );
            return Err(ErrorDetail::new(ErrorCode::Conflict, what));
        }
        let took = self.call_gpu(|gpu| screen_of(gpu)?.focus(vgpu))?;
        self.screen.set_rotation(None)?;
        Ok(Focused { parent, focus: vgpu, switch_us: micros(took) })
    }

    /// Rotates the physical screen among the vGPUs, or ends the rotation.
    pub fn rotate(&mut self, seconds: Option<u64>) -> Result<vgpud_api::PhysicalScreen> {
        if seconds.is_some_and(|seconds| !(1..=MAX_INTERVAL).contains(&seconds)) {
            let what = format!("Each vGPU is shown for 1 to {MAX_INTERVAL} seconds");
            return Err(ErrorDetail::new(ErrorCode::Invalid, what));
        }
        if !self.has_screen() {
            let what = format!(
                "Parent {} has no physical screen, so its vGPUs cannot take turns on it",
                self.name()
            );
            return Err(ErrorDetail::new(ErrorCode::Conflict, what));
        }
        self.call_gpu(|gpu| screen_of(gpu)?.rotate(seconds.map(Duration::from_secs)))?;
        self.screen.set_rotation(seconds)?;
        let status = self.call_gpu(|gpu| screen_of(gpu)?.status())?;
        Ok(self.screen_view(status))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn rotation_is_restored_and_a_bad_file_means_none() {
        let dir = tempfile::tempdir().unwrap();
        let load = || Screen::load(dir.path(), "0000:3b:00.0");
        assert_eq!(load().interval(), None);
        load().set_rotation(Some(10)).unwrap();
        assert_eq!(load().interval(), Some(Duration::from_secs(10)));
        load().set_rotation(None).unwrap();
        assert_eq!(load().interval(), None);
        let file = dir.path().join("0000:3b:00.0/.screen.json");
        fs::write(&file, "{\"rotate_seconds\":0}").unwrap();
        assert_eq!(read(&file).unwrap_err().to_string(), "rotate_seconds out of range");
        for text in ["{", "{\"rotate_seconds\":0}", "{\"speed\":1}"] {
            fs::write(&file, text).unwrap();
            assert_eq!(load().interval(), None, "{text}");
        }
    }
}
