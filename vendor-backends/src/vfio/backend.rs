//! The backend `vfio`: `--parent vfio:ADDRESS[,window=SIZE][,iommufd=yes|no]`.

use std::fmt::Write as _;
use std::sync::Arc;

use host_inventory::{HostError, PciAddress};
use mdev_core::units::{GIB, MIB};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

use super::{BACKEND, Options};
use crate::backend::{Backend, BoxError, OpenHardware, Opener, Parent};
use crate::mediator::Hardware;
use crate::parent_options::parse_size;

/// Physical PCI devices through VFIO.
#[derive(Clone, Copy, Debug)]
pub struct VfioBackend;

/// A device that is bound to vfio-pci.
#[derive(Debug)]
struct VfioParent {
    name: String,
    address: PciAddress,
    options: Options,
}

impl Backend for VfioBackend {
    fn name(&self) -> &'static str {
        BACKEND
    }

    fn example(&self) -> &'static str {
        "vfio:0000:00:02.0"
    }

    fn parse(&self, place: Option<&str>, given: &[&str]) -> Result<Arc<dyn Parent>, String> {
        let address = place.unwrap_or_default().parse::<PciAddress>();
        let address = address.map_err(|error: HostError| error.to_string())?;
        let mut options = Options::default();
        for option in given {
            match option.split_once('=') {
                Some(("window", size)) => options.window_bytes = Some(parse_window(size)?),
                Some(("iommufd", "yes")) => options.iommufd = Some(true),
                Some(("iommufd", "no")) => options.iommufd = Some(false),
                _ => {
                    return Err(format!(
                        "{option:?} is no option of a VFIO parent; there are window=SIZE, \
                         iommufd=yes and iommufd=no"
                    ));
                }
            }
        }
        Ok(Arc::new(VfioParent { name: address.to_string(), address, options }))
    }
}

impl Parent for VfioParent {
    fn name(&self) -> &str {
        &self.name
    }

    fn backend(&self) -> &'static dyn Backend {
        &VfioBackend
    }

    fn argument(&self) -> String {
        let mut text = format!("{BACKEND}:{}", self.address);
        // Writing to a String cannot fail.
        if let Some(bytes) = self.options.window_bytes {
            let _ = write!(text, ",window={}M", bytes / MIB);
        }
        if let Some(wanted) = self.options.iommufd {
            let _ = write!(text, ",iommufd={}", if wanted { "yes" } else { "no" });
        }
        text
    }

    fn opener(&self) -> Opener<'_> {
        Opener::Process(self)
    }
}

impl OpenHardware for VfioParent {
    fn needs_root(&self) -> bool {
        true
    }

    fn open(&self) -> Result<Arc<dyn Hardware>, BoxError> {
        raise_locked_memory_limit();
        Ok(super::open(&self.name, self.address, self.options)?)
    }
}

/// Raises RLIMIT_MEMLOCK as far as the process may. Memory that a device reaches is locked and
/// counts against the limit.
fn raise_locked_memory_limit() {
    let Ok((_, hard)) = getrlimit(Resource::RLIMIT_MEMLOCK) else { return };
    if setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY).is_err() {
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, hard, hard);
    }
}

fn parse_window(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Some(bytes) if bytes.is_power_of_two() && (MIB..=512 * GIB).contains(&bytes) => Ok(bytes),
        _ => Err(format!("window={text} is out of range: 1M, 2M, 4M and so on, up to 512G")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_and_options_survive_the_way_to_the_gpu_process() {
        for options in [&[][..], &["iommufd=yes"], &["window=32M", "iommufd=no"]] {
            let parent = VfioBackend.parse(Some("3B:00.0"), options).unwrap();
            assert_eq!(parent.name(), "0000:3b:00.0");
            let expected = [&["vfio:0000:3b:00.0"], options].concat().join(",");
            assert_eq!(parent.argument(), expected);
        }
    }
}
