//! The kinds of GPU that this build has: where a backend is opened, in the manager and in a worker.
//!
//! A new kind is a folder in vendor-backends, a variant of [`Backend`] and a line wherever the compiler asks for it.

use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use mdev_core::gpu::{Client, Gpu, GpuError};
use mdev_core::units::{GIB, KIB, MIB};
use vendor_backends::mediator::{self, MediatedClient};
use vendor_backends::nvidia::{self, Kernel, NvidiaClient, NvidiaGpu};
use vendor_backends::vfio;
use vendor_backends::vfio::host::Address;

use crate::spawn;
use crate::users::Account;

/// One kind of GPU, and which one of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The software GPU: a process of its own.
    Soft {
        /// Video memory, in bytes.
        vram_bytes: u64,
    },
    /// A device that vfio-pci has: owned by a process of its own.
    Vfio {
        /// Where it is.
        address: Address,
        /// What the operator chose.
        options: vfio::Options,
    },
    /// An NVIDIA GPU, through its driver.
    Nvidia {
        /// Its PCI address.
        address: String,
        /// What the operator chose.
        options: nvidia::Options,
    },
}

/// Video memory of a software GPU that is not told otherwise. It is memory that vGPUs may use, not memory in use: pages
/// are taken from the host as guests write to them.
const DEFAULT_VRAM: u64 = 8 * GIB;

/// The most that a software GPU can have.
const MAX_VRAM: u64 = 1 << 40;

/// In place of an address: all GPUs that the driver has.
const ALL: &str = "all";

impl Backend {
    /// As people write it, and as an admission names it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Soft { .. } => "soft",
            Self::Vfio { .. } => vfio::BACKEND,
            Self::Nvidia { .. } => nvidia::BACKEND,
        }
    }

    /// Video memory, where that is known before the GPU is opened.
    pub fn vram_bytes(&self) -> u64 {
        match self {
            Self::Soft { vram_bytes } => *vram_bytes,
            Self::Vfio { .. } | Self::Nvidia { .. } => 0,
        }
    }

    /// How the process of a GPU that needs one is started: its role with arguments, and whom it starts as.
    pub fn role(&self, user: Account) -> (Vec<String>, Account) {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        match self {
            Self::Soft { vram_bytes } => {
                (words(&["soft-gpu", "--vram", &vram_bytes.to_string()]), user)
            }
            Self::Vfio { address, options } => {
                // It leaves root by itself, when it has the device.
                let Account { uid, gid } = user;
                let (uid, gid) = (uid.to_string(), gid.to_string());
                let words_fd = (spawn::FIRST_FD + 1).to_string();
                let address = address.to_string();
                let args = ["owner", "--address", &address, "--uid", &uid, "--gid", &gid];
                let mut args: Vec<String> = words(&args);
                if let Some(bytes) = options.window_bytes {
                    args.extend(["--window".to_owned(), bytes.to_string()]);
                }
                args.extend(["--words-fd".to_owned(), words_fd]);
                if let Some(wanted) = options.iommufd {
                    args.extend(["--iommufd".to_owned(), wanted.to_string()]);
                }
                (args, Account::own())
            }
            Self::Nvidia { .. } => (Vec::new(), user),
        }
    }

    /// Opens a GPU that needs no process of its own; `None` for those that do.
    pub fn open(&self) -> Option<Result<Box<dyn Gpu>, GpuError>> {
        match self {
            Self::Soft { .. } | Self::Vfio { .. } => None,
            Self::Nvidia { address, options } => {
                let gpu = NvidiaGpu::open(Arc::new(Kernel), address, *options);
                Some(gpu.map(|gpu| Box::new(gpu) as Box<dyn Gpu>))
            }
        }
    }
}

/// Opens a worker's client of the GPU that admitted it.
pub fn open_client(
    backend: &str,
    parent: &str,
    fd: Option<OwnedFd>,
) -> anyhow::Result<Box<dyn Client>> {
    let fd = fd.context("The connection to the GPU is missing: --gpu-fd")?;
    let opened: Result<Box<dyn Client>, GpuError> = match backend {
        mediator::BACKEND => MediatedClient::open(fd).map(|client| Box::new(client) as _),
        nvidia::BACKEND => {
            NvidiaClient::open(Arc::new(Kernel), fd).map(|client| Box::new(client) as _)
        }
        other => bail!("There is no backend '{other}' in this build"),
    };
    opened.with_context(|| format!("Cannot open the GPU {parent}"))
}

/// One physical GPU: `soft:NAME[,vram=SIZE]`, `nvidia[:ADDRESS][,hang=MS][,preempt=blocks][,doorbell=direct]`
/// or `vfio:ADDRESS[,window=SIZE][,iommufd=yes|no]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParentConfig {
    /// Its name: a folder of that name is made.
    pub name: String,
    /// What it is.
    pub backend: Backend,
}

impl ParentConfig {
    /// The GPUs that are meant: `nvidia` without an address is all that the driver has.
    pub fn expand(self) -> anyhow::Result<Vec<Self>> {
        match &self.backend {
            Backend::Nvidia { address, options } if address == ALL => {
                Self::each(NvidiaGpu::list(&Kernel)?, *options)
            }
            _ => Ok(vec![self]),
        }
    }

    fn each(addresses: Vec<String>, options: nvidia::Options) -> anyhow::Result<Vec<Self>> {
        if addresses.is_empty() {
            bail!(
                "NVIDIA's driver has no GPU; see nvidia-smi, or share another: --parent soft:soft0"
            );
        }
        let one = |address: String| Self {
            name: address.clone(),
            backend: Backend::Nvidia { address, options },
        };
        Ok(addresses.into_iter().map(one).collect())
    }
}

impl FromStr for ParentConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (head, options) = match text.split_once(',') {
            Some((head, options)) => (head, options.split(',').collect()),
            None => (text, Vec::new()),
        };
        match head.split_once(':') {
            Some(("soft", name)) => soft(name, &options),
            Some((nvidia::BACKEND, address)) => an_nvidia(address, &options),
            Some((vfio::BACKEND, address)) => a_vfio(address, &options),
            None if head == nvidia::BACKEND => an_nvidia(ALL, &options),
            _ => Err("begin with \"soft:\", \"nvidia\" or \"vfio:\", as in soft:soft0,vram=8G, \
                      nvidia:0000:3b:00.0 or vfio:0000:00:02.0"
                .into()),
        }
    }
}

fn soft(name: &str, options: &[&str]) -> Result<ParentConfig, String> {
    let fine = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
    // That folder is where scripts are.
    let taken = name == mdev_core::definition::store::SCRIPTS;
    if taken
        || name.is_empty()
        || name.len() > 32
        || name.starts_with('.')
        || !name.chars().all(fine)
    {
        return Err(format!(
            "{name:?} is no name for a parent: use up to 32 letters, digits, and - _ . :"
        ));
    }
    let mut vram_bytes = DEFAULT_VRAM;
    for option in options {
        match option.split_once('=') {
            Some(("vram", size)) => vram_bytes = parse_vram(size)?,
            _ => {
                return Err(format!("{option:?} is no option of a parent; there is vram=SIZE"));
            }
        }
    }
    Ok(ParentConfig { name: name.into(), backend: Backend::Soft { vram_bytes } })
}

fn an_nvidia(address: &str, given: &[&str]) -> Result<ParentConfig, String> {
    let address = address.to_ascii_lowercase();
    let shape = |c: u8| match c {
        b'0'..=b'9' | b'a'..=b'f' => 'x',
        other => other as char,
    };
    let shape: String = address.bytes().map(shape).collect();
    if address != ALL && shape != "xxxx:xx:xx.x" {
        return Err(format!("{address:?} is no PCI address: write it as in nvidia:0000:3b:00.0"));
    }
    let mut options = nvidia::Options::default();
    for option in given {
        match *option {
            "preempt=blocks" => options.preempt_blocks = true,
            "doorbell=direct" => options.direct_doorbell = true,
            "allow-sys-admin" => options.allow_sys_admin = true,
            "hang=off" => options.hang = None,
            _ => options.hang = Some(parse_hang(option)?),
        }
    }
    Ok(ParentConfig { name: address.clone(), backend: Backend::Nvidia { address, options } })
}

fn a_vfio(address: &str, given: &[&str]) -> Result<ParentConfig, String> {
    let address: Address =
        address.parse().map_err(|error: vfio::host::HostError| error.to_string())?;
    let mut options = vfio::Options::default();
    for option in given {
        match option.split_once('=') {
            Some(("window", size)) => options.window_bytes = Some(parse_window(size)?),
            Some(("iommufd", "yes")) => options.iommufd = Some(true),
            Some(("iommufd", "no")) => options.iommufd = Some(false),
            _ => {
                return Err(format!(
                    "{option:?} is no option of a VFIO parent; there are window=SIZE, iommufd=yes and iommufd=no"
                ));
            }
        }
    }
    Ok(ParentConfig { name: address.to_string(), backend: Backend::Vfio { address, options } })
}

/// `hang=MS`: the last option there is.
fn parse_hang(option: &str) -> Result<Duration, String> {
    let Some(text) = option.strip_prefix("hang=") else {
        return Err(format!(
            "{option:?} is no option of an NVIDIA parent; there are hang=MS, preempt=blocks, \
             doorbell=direct and allow-sys-admin"
        ));
    };
    match text.parse::<u64>() {
        Ok(ms @ 20..=3_600_000) => Ok(Duration::from_millis(ms)),
        _ => Err(format!("{option} is out of range: hang=off, or 20 to 3600000 milliseconds")),
    }
}

fn parse_vram(text: &str) -> Result<u64, String> {
    let wrong = || format!("vram={text} is no size: give MiB or GiB, as in vram=512M or vram=8G");
    let bytes = parse_size(text).ok_or_else(wrong)?;
    if bytes % MIB != 0 || !(256 * MIB..=MAX_VRAM).contains(&bytes) {
        return Err(format!("vram={text} is out of range: 256M to 1024G, in whole MiB"));
    }
    Ok(bytes)
}

fn parse_window(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Some(bytes) if bytes.is_power_of_two() && (MIB..=512 * GIB).contains(&bytes) => Ok(bytes),
        _ => Err(format!("window={text} is out of range: 1M, 2M, 4M and so on, up to 512G")),
    }
}

/// `512M`: bytes.
fn parse_size(text: &str) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit = match &text[split..] {
        "K" => KIB,
        "M" => MIB,
        "G" => GIB,
        _ => return None,
    };
    text[..split].parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_read() {
        let soft = |text: &str| match text.parse::<ParentConfig>().unwrap() {
            ParentConfig { name, backend: Backend::Soft { vram_bytes } } => (name, vram_bytes),
            other => panic!("{other:?}"),
        };
        assert_eq!(soft("soft:soft0"), ("soft0".into(), 8 * GIB));
        assert_eq!(soft("soft:a,vram=512M"), ("a".into(), 512 * MIB));
        let parent: ParentConfig = "nvidia:0000:3B:00.0,preempt=blocks".parse().unwrap();
        assert_eq!(parent.name, "0000:3b:00.0");
        let Backend::Nvidia { address, options } = parent.backend else { panic!() };
        assert!(address == parent.name && options.preempt_blocks && !options.allow_sys_admin);
        assert!(!options.direct_doorbell, "only where an operator says so");
        let direct: ParentConfig = "nvidia,doorbell=direct".parse().unwrap();
        let Backend::Nvidia { options, .. } = direct.backend else { panic!() };
        assert!(options.direct_doorbell);
        let patient: ParentConfig = "nvidia,hang=2000".parse().unwrap();
        let Backend::Nvidia { options, .. } = patient.backend else { panic!() };
        assert_eq!(options.hang, Some(Duration::from_secs(2)));
        assert_eq!("nvidia".parse::<ParentConfig>().unwrap().name, ALL);
        for (text, wanted) in
            [("", None), (",iommufd=yes", Some(true)), (",window=32M,iommufd=no", Some(false))]
        {
            let parent: ParentConfig = format!("vfio:3B:00.0{text}").parse().unwrap();
            assert_eq!(parent.name, "0000:3b:00.0");
            let Backend::Vfio { options, .. } = parent.backend else { panic!() };
            assert_eq!(options.iommufd, wanted);
        }
    }

    #[test]
    fn every_gpu_of_a_driver_is_a_parent() {
        let all = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            ParentConfig::each(names, nvidia::Options::default())
        };
        let two = all(&["0000:3b:00.0", "0000:af:00.0"]).unwrap();
        assert_eq!(two.iter().map(|one| &one.name[5..7]).collect::<Vec<_>>(), ["3b", "af"]);
        let none = all(&[]).unwrap_err().to_string();
        assert!(none.starts_with("NVIDIA's driver has no GPU; see nvidia-smi"), "{none}");
    }

    #[test]
    fn a_worker_without_its_gpu_says_what_is_missing() {
        let fd = || Some(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        for (backend, fd, part) in [
            (mediator::BACKEND, None, "The connection to the GPU is missing"),
            ("voodoo", fd(), "There is no backend 'voodoo' in this build"),
            (mediator::BACKEND, fd(), "Cannot open the GPU soft0"),
        ] {
            let error = open_client(backend, "soft0", fd).err().unwrap().to_string();
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
            ("nvidia:3b:00.0", "no PCI address"),
            ("nvidia:../../../x", "no PCI address"),
            ("nvidia,vram=8G", "no option"),
            ("nvidia,hang=1", "out of range"),
            ("vfio:02.0", "no PCI address"),
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
