//! The backend `nvidia`:
//! `--parent
//! nvidia[:ADDRESS][,hang=MS][,preempt=blocks][,doorbell=direct][,vram=direct][,allow-sys-admin]`.

use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use mdev_core::gpu::{Client, Gpu, GpuError};
use nvidia_rm::KernelDriver;

use super::adoption::descriptors::Descriptors;
use super::{BACKEND, NvidiaClient, NvidiaGpu, Options};
use crate::backend::{Backend, BoxError, OpenGpu, Opener, Parent, WorkerFiles};

/// Place of the argument that stands for all GPUs of the driver.
const ALL: &str = "all";

/// NVIDIA GPUs, through the unmodified driver.
#[derive(Clone, Copy, Debug)]
pub struct NvidiaBackend;

/// An NVIDIA GPU by its PCI address, or all of them.
#[derive(Debug)]
struct NvidiaParent {
    address: String,
    options: Options,
}

impl Backend for NvidiaBackend {
    fn name(&self) -> &'static str {
        BACKEND
    }

    fn example(&self) -> &'static str {
        "nvidia:0000:3b:00.0"
    }

    fn parse(&self, place: Option<&str>, options: &[&str]) -> Result<Arc<dyn Parent>, String> {
        let address = place.unwrap_or(ALL).to_ascii_lowercase();
        let shape = |c: u8| match c {
            b'0'..=b'9' | b'a'..=b'f' => 'x',
            other => other as char,
        };
        let shape: String = address.bytes().map(shape).collect();
        if address != ALL && shape != "xxxx:xx:xx.x" {
            return Err(format!(
                "{address:?} is not a PCI address: write it as in nvidia:0000:3b:00.0"
            ));
        }
        let options = parse_options(options)?;
        Ok(Arc::new(NvidiaParent { address, options }))
    }

    fn admission(&self) -> &'static str {
        BACKEND
    }

    fn open_client(&self, connection: OwnedFd) -> Result<Box<dyn Client>, GpuError> {
        Ok(Box::new(NvidiaClient::open(Arc::new(KernelDriver), connection)?))
    }

    fn adopt_client(
        &self,
        connection: OwnedFd,
        position: u64,
        kept: &mut dyn FnMut(u64) -> Option<OwnedFd>,
    ) -> Result<Box<dyn Client>, GpuError> {
        let rm = Arc::new(KernelDriver);
        Ok(Box::new(NvidiaClient::adopt(rm, connection, position, Descriptors(kept))?))
    }

    fn worker_files(&self) -> WorkerFiles {
        let numbered = |name: &str| {
            let number = name.strip_prefix("nvidia");
            number.is_some_and(|number| !number.is_empty() && number.parse::<u32>().is_ok())
        };
        let nodes = std::fs::read_dir("/dev").into_iter().flatten().flatten();
        let nodes = nodes.filter(|node| node.file_name().to_str().is_some_and(numbered));
        let control = std::iter::once("/dev/nvidiactl".into());
        WorkerFiles {
            devices: control.chain(nodes.map(|node| node.path())).collect(),
            read: vec![nvidia_rm::kernel_driver::VERSION.into()],
        }
    }
}

impl Parent for NvidiaParent {
    fn name(&self) -> &str {
        &self.address
    }

    fn backend(&self) -> &'static dyn Backend {
        &NvidiaBackend
    }

    fn argument(&self) -> String {
        let Options { preempt_blocks, allow_sys_admin, hang_limit, direct_doorbell, direct_vram } =
            self.options;
        let mut text = format!("{BACKEND}:{}", self.address);
        match hang_limit {
            None => text.push_str(",hang=off"),
            Some(limit) => {
                // Writing to a String cannot fail.
                let _ = write!(text, ",hang={}", limit.as_millis());
            }
        }
        for (set, option) in [
            (preempt_blocks, ",preempt=blocks"),
            (direct_doorbell, ",doorbell=direct"),
            (direct_vram, ",vram=direct"),
            (allow_sys_admin, ",allow-sys-admin"),
        ] {
            text.push_str(if set { option } else { "" });
        }
        text
    }

    fn expand(&self) -> Result<Option<Vec<Arc<dyn Parent>>>, BoxError> {
        if self.address != ALL {
            return Ok(None);
        }
        each(NvidiaGpu::list(&KernelDriver)?, self.options).map(Some).map_err(Into::into)
    }

    fn opener(&self) -> Opener<'_> {
        Opener::Manager(self)
    }
}

impl OpenGpu for NvidiaParent {
    fn open(&self) -> Result<Box<dyn Gpu>, GpuError> {
        Ok(Box::new(NvidiaGpu::open(Arc::new(KernelDriver), &self.address, self.options)?))
    }
}

/// Returns a parent for each address.
fn each(addresses: Vec<String>, options: Options) -> Result<Vec<Arc<dyn Parent>>, String> {
    if addresses.is_empty() {
        return Err(
            "NVIDIA's driver has no GPU; see nvidia-smi, or share another: --parent soft:soft0"
                .to_owned(),
        );
    }
    let one = |address| Arc::new(NvidiaParent { address, options }) as Arc<dyn Parent>;
    Ok(addresses.into_iter().map(one).collect())
}

fn parse_options(given: &[&str]) -> Result<Options, String> {
    let mut options = Options::default();
    for option in given {
        match *option {
            "preempt=blocks" => options.preempt_blocks = true,
            "doorbell=direct" => options.direct_doorbell = true,
            "vram=direct" => options.direct_vram = true,
            "allow-sys-admin" => options.allow_sys_admin = true,
            "hang=off" => options.hang_limit = None,
            _ => options.hang_limit = Some(parse_hang(option)?),
        }
    }
    Ok(options)
}

/// Parses `hang=MS`.
fn parse_hang(option: &str) -> Result<Duration, String> {
    let Some(text) = option.strip_prefix("hang=") else {
        return Err(format!(
            "{option:?} is not an option of an NVIDIA parent; the options are hang=MS, preempt=blocks, \
             doorbell=direct, vram=direct and allow-sys-admin"
        ));
    };
    match text.parse::<u64>() {
        Ok(ms @ 20..=3_600_000) => Ok(Duration::from_millis(ms)),
        _ => Err(format!("{option} is out of range: hang=off, or 20 to 3600000 milliseconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed() {
        let options = parse_options(&["preempt=blocks"]).unwrap();
        assert!(options.preempt_blocks && !options.allow_sys_admin);
        assert!(!options.direct_doorbell, "an operator has to ask for it");
        assert!(parse_options(&["doorbell=direct"]).unwrap().direct_doorbell);
        assert!(!options.direct_vram && parse_options(&["vram=direct"]).unwrap().direct_vram);
        let long = parse_options(&["hang=2000"]).unwrap();
        assert_eq!(long.hang_limit, Some(Duration::from_secs(2)));
        let parent = NvidiaBackend.parse(Some("0000:3B:00.0"), &["hang=off"]).unwrap();
        assert_eq!(parent.name(), "0000:3b:00.0");
        assert_eq!(parent.argument(), "nvidia:0000:3b:00.0,hang=off");
        assert_eq!(NvidiaBackend.parse(None, &[]).unwrap().name(), ALL);
    }

    #[test]
    fn every_gpu_of_the_driver_is_a_parent() {
        let all = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            each(names, Options::default())
        };
        let two = all(&["0000:3b:00.0", "0000:af:00.0"]).unwrap();
        assert_eq!(two.iter().map(|one| &one.name()[5..7]).collect::<Vec<_>>(), ["3b", "af"]);
        let none = all(&[]).unwrap_err();
        assert!(none.starts_with("NVIDIA's driver has no GPU; see nvidia-smi"), "{none}");
    }
}
