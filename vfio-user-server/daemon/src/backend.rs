//! Parents as `vgpud run` is told of them, and the clients of admitted vGPUs.

use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, bail};
use mdev_core::gpu::{Client, Gpu, GpuError};
use vendor_backends::backend::{BACKENDS, OpenHardware, Opener, Parent};

use crate::spawn;
use vgpud_host::users::Account;

/// One physical GPU that the manager shares.
#[derive(Clone, Debug)]
pub struct ParentConfig {
    /// Name of the parent and of its directory.
    pub name: String,
    /// The GPU.
    pub source: Arc<dyn Parent>,
}

impl ParentConfig {
    /// Returns the single GPUs that the argument stands for.
    ///
    /// # Errors
    ///
    /// Fails if the driver cannot list its GPUs or has none.
    pub fn expand(self) -> anyhow::Result<Vec<Self>> {
        match self.source.expand().map_err(anyhow::Error::from_boxed)? {
            Some(sources) => Ok(sources.into_iter().map(Self::from).collect()),
            None => Ok(vec![self]),
        }
    }

    /// Returns the name of the backend.
    pub fn backend_name(&self) -> &'static str {
        self.source.backend().name()
    }

    /// Returns the video memory in bytes if it is known before the GPU is opened, or else 0.
    pub fn vram_bytes(&self) -> u64 {
        self.hardware().map_or(0, OpenHardware::vram_bytes)
    }

    /// Opens a GPU that needs no GPU process; `None` for other GPUs.
    pub fn open(&self) -> Option<Result<Box<dyn Gpu>, GpuError>> {
        match self.source.opener() {
            Opener::Manager(gpu) => Some(gpu.open()),
            Opener::Process(_) => None,
        }
    }

    /// Returns the arguments of the GPU process and the user that it starts as. The process becomes
    /// `user` once it has opened the hardware. Its descriptors are the admin socket and the file
    /// for a startup error, in this order from [`spawn::FIRST_FD`].
    pub fn gpu_process(&self, user: Account) -> (Vec<String>, Account) {
        let needs_root = self.hardware().is_some_and(OpenHardware::needs_root);
        let args = [
            ("--parent", self.source.argument()),
            ("--uid", user.uid.to_string()),
            ("--gid", user.gid.to_string()),
            ("--admin-fd", spawn::FIRST_FD.to_string()),
            ("--startup-error-fd", (spawn::FIRST_FD + 1).to_string()),
        ];
        let args = args.into_iter().flat_map(|(option, value)| [option.to_owned(), value]);
        let args = std::iter::once("gpu-process".to_owned()).chain(args).collect();
        (args, if needs_root { Account::own() } else { user })
    }

    fn hardware(&self) -> Option<&dyn OpenHardware> {
        match self.source.opener() {
            Opener::Process(hardware) => Some(hardware),
            Opener::Manager(_) => None,
        }
    }
}

impl From<Arc<dyn Parent>> for ParentConfig {
    fn from(source: Arc<dyn Parent>) -> Self {
        Self { name: source.name().to_owned(), source }
    }
}

impl FromStr for ParentConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        BACKENDS.parse(text).map(Self::from)
    }
}

/// Opens a worker's client of the GPU that admitted it under the name `admission`, or continues
/// with the client of an earlier worker from its position and what it kept.
///
/// # Errors
///
/// Fails if the connection is missing, no backend has the name, or the GPU cannot be opened.
pub fn open_client(
    admission: &str,
    parent: &str,
    connection: Option<OwnedFd>,
    position: Option<u64>,
    kept: &mut dyn FnMut(u64) -> Option<OwnedFd>,
) -> anyhow::Result<Box<dyn Client>> {
    let connection = connection.context("The connection to the GPU is missing: --gpu-fd")?;
    match BACKENDS.open_client(admission, connection, position, kept) {
        Some(opened) => opened.with_context(|| format!("Cannot open the GPU {parent}")),
        None => bail!("There is no backend '{admission}' in this build"),
    }
}

#[cfg(test)]
mod tests {
    use vendor_backends::mediator;

    use super::*;

    #[test]
    fn a_gpu_process_gets_an_argument_that_makes_the_same_parent() {
        let user = Account { uid: 7, gid: 8 };
        let (args, starts_as) = "soft:a".parse::<ParentConfig>().unwrap().gpu_process(user);
        assert_eq!(args[..3], ["gpu-process", "--parent", "soft:a,vram=8192M,contexts=yes"]);
        assert_eq!(starts_as, user);
        let again: ParentConfig = args[2].parse().unwrap();
        assert_eq!((again.name.as_str(), again.vram_bytes()), ("a", 8 << 30));
        let (_, starts_as) = "vfio:3b:00.0".parse::<ParentConfig>().unwrap().gpu_process(user);
        assert_eq!(starts_as, Account::own(), "it opens the device first");
    }

    #[test]
    fn a_worker_without_its_gpu_says_what_is_missing() {
        let fd = || Some(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        for (backend, fd, part) in [
            (mediator::BACKEND, None, "The connection to the GPU is missing"),
            ("voodoo", fd(), "There is no backend 'voodoo' in this build"),
            (mediator::BACKEND, fd(), "Cannot open the GPU soft0"),
        ] {
            let error =
                open_client(backend, "soft0", fd, None, &mut |_| None).err().unwrap().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("soft0", "begin with"),
            ("nvidia0", "begin with"),
            ("soft:", "no name"),
            ("soft:../x", "no name"),
            ("soft:.", "no name"),
            ("soft:a,vram=8", "no size"),
            ("soft:a,vram=G", "no size"),
            ("soft:a,vram=99999999999999999999G", "no size"),
            ("soft:a,vram=1M", "out of range"),
            ("soft:a,cores=3", "no option"),
            ("nvidia:3b:00.0", "not a PCI address"),
            ("nvidia:../../../x", "not a PCI address"),
            ("nvidia,vram=8G", "not an option"),
            ("nvidia,hang=1", "out of range"),
            ("vfio:02.0", "not a PCI address"),
            (
                "vfio:0000:00:02.0,vram=1G",
                "is no option of a VFIO parent; there are window=SIZE, iommufd=yes",
            ),
            ("vfio:0000:00:02.0,window=3M", "out of range"),
            ("vfio:0000:00:02.0,window=16", "out of range"),
        ] {
            let error = text.parse::<ParentConfig>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
