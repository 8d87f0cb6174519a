//! The trait that every backend implements, and the list of backends.
//!
//! A backend registers itself by one line in [`BACKENDS`], and a front end for CUDA programs in
//! [`FRONT_END`]. The daemon's `--parent`, its GPU processes and its workers work from these.

use std::error::Error;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use mdev_core::gpu::{Client, Gpu, GpuError};
use programs::FrontEnd;
use programs::front_end::FrontEndSpec;

use crate::mediator::{self, Hardware, MediatedClient};
#[cfg(feature = "nvidia")]
use crate::nvidia;
use crate::soft;
#[cfg(feature = "vfio")]
use crate::vfio;

/// All backends of this build.
pub static BACKENDS: Registry = Registry::new(&[
    &soft::SoftBackend,
    #[cfg(feature = "nvidia")]
    &nvidia::NvidiaBackend,
    #[cfg(feature = "vfio")]
    &vfio::VfioBackend,
]);

/// Creates a front end for CUDA programs on a vGPU.
///
/// # Errors
///
/// Fails if the version of the GPU's driver is not supported, in one line.
pub type NewFrontEnd = fn(&FrontEndSpec) -> Result<Box<dyn FrontEnd>, BoxError>;

/// Front end of this build, for GPUs whose engines execute what NVIDIA's libraries submit.
#[cfg(feature = "nvidia")]
pub const FRONT_END: Option<NewFrontEnd> = Some(nvidia::frontend::create);
/// Front end of this build: none.
#[cfg(not(feature = "nvidia"))]
pub const FRONT_END: Option<NewFrontEnd> = None;

/// Error of opening hardware or listing GPUs.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// One kind of GPU.
pub trait Backend: fmt::Debug + Sync {
    /// Returns the prefix of the backend's parents in `--parent`: `soft`.
    fn name(&self) -> &'static str;

    /// Returns an example of a `--parent` argument: `soft:soft0,vram=8G`.
    fn example(&self) -> &'static str;

    /// Parses a `--parent` argument: `place` follows the colon, `options` follow the commas.
    ///
    /// # Errors
    ///
    /// Returns one line: what is wrong, and what to write.
    fn parse(&self, place: Option<&str>, options: &[&str]) -> Result<Arc<dyn Parent>, String>;

    /// Returns the name under which admissions to the backend's GPUs are opened by
    /// [`Self::open_client`].
    fn admission(&self) -> &'static str {
        mediator::BACKEND
    }

    /// Opens a worker's client on the connection that came with an admission.
    ///
    /// # Errors
    ///
    /// Fails if the GPU does not answer as expected.
    fn open_client(&self, connection: OwnedFd) -> Result<Box<dyn Client>, GpuError> {
        Ok(Box::new(MediatedClient::open(connection)?))
    }

    /// Adopts the client of a worker that has ended, from its
    /// [`Adoption::position`](mdev_core::gpu::Adoption::position). `kept` returns what it
    /// kept by [`take_descriptors`](mdev_core::gpu::Adoption::take_descriptors).
    ///
    /// # Errors
    ///
    /// Fails if the backend cannot do this, or the GPU does not answer as expected.
    fn adopt_client(
        &self,
        connection: OwnedFd,
        position: u64,
        kept: &mut dyn FnMut(u64) -> Option<OwnedFd>,
    ) -> Result<Box<dyn Client>, GpuError> {
        let _ = kept;
        Ok(Box::new(MediatedClient::adopt(connection, position)?))
    }

    /// Returns the files that a worker opens at its start, beyond its own program's.
    fn worker_files(&self) -> WorkerFiles {
        WorkerFiles::default()
    }
}

/// A physical GPU that an operator has named with `--parent`.
pub trait Parent: fmt::Debug + Send + Sync {
    /// Returns the parent's name, which is also the name of its directory.
    fn name(&self) -> &str;

    /// Returns the backend.
    fn backend(&self) -> &'static dyn Backend;

    /// Returns the `--parent` argument from which [`Backend::parse`] makes an equal parent.
    fn argument(&self) -> String;

    /// Returns the parents that an argument for all GPUs of a driver stands for; `None` for a
    /// single GPU.
    ///
    /// # Errors
    ///
    /// Fails if the driver cannot list its GPUs or has none.
    fn expand(&self) -> Result<Option<Vec<Arc<dyn Parent>>>, BoxError> {
        Ok(None)
    }

    /// Returns how the GPU is opened.
    fn opener(&self) -> Opener<'_>;
}

/// How a parent's GPU is opened.
#[derive(Debug)]
pub enum Opener<'a> {
    /// The manager opens the GPU itself.
    Manager(&'a dyn OpenGpu),
    /// A GPU process owns the hardware.
    Process(&'a dyn OpenHardware),
}

/// A GPU that the manager opens itself.
pub trait OpenGpu: fmt::Debug {
    /// Opens the GPU.
    ///
    /// # Errors
    ///
    /// Fails if the driver or the GPU is not available.
    fn open(&self) -> Result<Box<dyn Gpu>, GpuError>;
}

/// Hardware that a GPU process owns.
pub trait OpenHardware: fmt::Debug {
    /// Returns the video memory in bytes if it is known before the hardware is opened, or else 0.
    fn vram_bytes(&self) -> u64 {
        0
    }

    /// Returns true if the process opens the hardware as root. It gives root up afterwards.
    fn needs_root(&self) -> bool {
        false
    }

    /// Opens the hardware. Runs in the GPU process.
    ///
    /// # Errors
    ///
    /// Fails if the hardware is not available, in one line.
    fn open(&self) -> Result<Arc<dyn Hardware>, BoxError>;
}

/// Files that a worker opens at its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerFiles {
    /// Device nodes, on which the worker calls ioctl.
    pub devices: Vec<PathBuf>,
    /// Files that the worker reads.
    pub read: Vec<PathBuf>,
}

/// A list of backends.
#[derive(Clone, Copy, Debug)]
pub struct Registry(&'static [&'static dyn Backend]);

impl Registry {
    /// Makes a list of backends.
    pub const fn new(backends: &'static [&'static dyn Backend]) -> Self {
        Self(backends)
    }

    /// Returns the backends.
    pub fn iter(&self) -> impl Iterator<Item = &'static dyn Backend> {
        self.0.iter().copied()
    }

    /// Parses a `--parent` argument: `NAME[:PLACE][,OPTION...]`.
    ///
    /// # Errors
    ///
    /// Returns one line: what is wrong, and what to write.
    pub fn parse(&self, text: &str) -> Result<Arc<dyn Parent>, String> {
        let (head, options) = match text.split_once(',') {
            Some((head, options)) => (head, options.split(',').collect()),
            None => (text, Vec::new()),
        };
        let (name, place) = match head.split_once(':') {
            Some((name, place)) => (name, Some(place)),
            None => (head, None),
        };
        match self.iter().find(|backend| backend.name() == name) {
            Some(backend) => backend.parse(place, &options),
            None => Err(self.unknown_backend()),
        }
    }

    fn unknown_backend(&self) -> String {
        let names: Vec<_> = self.iter().map(|backend| format!("{:?}", backend.name())).collect();
        let examples: Vec<_> = self.iter().map(Backend::example).collect();
        format!("begin with {}, as in {}", any_of(&names), any_of(&examples))
    }

    /// Opens a worker's client of the GPU that admitted the vGPU under the name `admission`, or
    /// continues with it from a position and what was kept; `None` if no backend has that name.
    pub fn open_client(
        &self,
        admission: &str,
        connection: OwnedFd,
        position: Option<u64>,
        kept: &mut dyn FnMut(u64) -> Option<OwnedFd>,
    ) -> Option<Result<Box<dyn Client>, GpuError>> {
        let backend = self.iter().find(|backend| backend.admission() == admission)?;
        Some(match position {
            None => backend.open_client(connection),
            Some(position) => backend.adopt_client(connection, position, kept),
        })
    }

    /// Returns the files that workers open at their start on GPUs which admit under a name.
    pub fn worker_files(&self, admission: &str) -> WorkerFiles {
        let backend = self.iter().find(|backend| backend.admission() == admission);
        backend.map(Backend::worker_files).unwrap_or_default()
    }
}

/// Joins alternatives: `a, b or c`.
fn any_of(items: &[impl AsRef<str>]) -> String {
    let items: Vec<_> = items.iter().map(AsRef::as_ref).collect();
    match &items[..] {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [all @ .., last] => format!("{} or {last}", all.join(", ")),
    }
}
