//! `parents`: the host's physical devices. This reads and writes the kernel's files, and asks no `vgpud`.

use std::fmt::Write as _;

use serde::Serialize;
use vendor_backends::vfio::host::{Host, HostError, PciDevice};
use vfio_user_server::api::model::{ErrorCode, ErrorDetail};

use crate::cli::{Output, Parents, ParentsTask};
use crate::failure::Failure;
use crate::mdevctl::pretty;

const NVIDIA: u16 = 0x10de;

/// One device, and what to do to share it.
#[derive(Debug, Serialize)]
struct Candidate {
    #[serde(flatten)]
    device: PciDevice,
    /// Whether Tessera can share it out, as it is.
    parent: bool,
    /// The command that comes next, or why there is none.
    next: String,
}

/// `parents`
pub fn parents(args: &Parents) -> Result<Vec<u8>, Failure> {
    let host = Host::default();
    match &args.task {
        None => list(&host, args.output),
        Some(ParentsTask::Bind { address, output }) => {
            let device = host.bind(*address).map_err(|error| failure(&error))?;
            if *output == Output::Json {
                return pretty(&candidate(device));
            }
            let files = device.files().replace(' ', " and ");
            Ok(format!("{address} is vfio-pci's now: {files}\n").into_bytes())
        }
        Some(ParentsTask::Unbind { address, output }) => {
            let device = host.unbind(*address).map_err(|error| failure(&error))?;
            if *output == Output::Json {
                return pretty(&candidate(device));
            }
            let driver = device.driver.unwrap_or_else(|| "no driver: none wants it".to_owned());
            Ok(format!("{address} is back with {driver}\n").into_bytes())
        }
    }
}

fn list(host: &Host, output: Output) -> Result<Vec<u8>, Failure> {
    let all: Vec<_> =
        host.candidates().map_err(|error| failure(&error))?.into_iter().map(candidate).collect();
    match output {
        Output::Json => pretty(&all),
        Output::Text if all.is_empty() => {
            Ok(b"This host has no display and no accelerator on PCI; `vgpud run` shares a software GPU\n".to_vec())
        }
        Output::Text => {
            let mut text = String::new();
            for one in &all {
                let PciDevice { address, vendor, device, driver, .. } = &one.device;
                let driver = driver.as_deref().unwrap_or("no driver");
                let group = one.device.iommu_group.map(|group| format!("IOMMU group {group}"));
                let group = group.unwrap_or_else(|| "no IOMMU".to_owned());
                let kind = one.device.kind();
                let _ = writeln!(text, "{address}  {vendor:04x}:{device:04x}  {kind}, {driver}, {group}");
                let _ = writeln!(text, "  {}", one.next);
            }
            Ok(text.into_bytes())
        }
    }
}

fn candidate(device: PciDevice) -> Candidate {
    let address = device.address;
    let (parent, next) = match (device.vendor, device.driver.as_deref()) {
        (NVIDIA, Some("nvidia")) => {
            (true, format!("Share it: vgpud run --parent nvidia:{address}"))
        }
        (NVIDIA, driver) => {
            let driver = driver.unwrap_or("none");
            (
                false,
                format!(
                    "Tessera shares it beside NVIDIA's own driver, which has to be loaded (now: {driver})"
                ),
            )
        }
        _ if device.family().is_some() => {
            let share = format!("vgpud run --parent vfio:{address}");
            if device.is_bound() {
                let back = format!("vgpuctl parents unbind {address}");
                (true, format!("Share it: {share}; give it back: {back}"))
            } else {
                let bind = format!("vgpuctl parents bind {address}");
                (false, format!("Give it to vfio-pci: {bind}; then: {share}"))
            }
        }
        (_, Some(driver)) if device.is_bound() => {
            (false, format!("{driver} has it; give it back: vgpuctl parents unbind {address}"))
        }
        _ => (false, "Tessera has no backend that shares this device yet".to_owned()),
    };
    Candidate { device, parent, next }
}

fn failure(error: &HostError) -> Failure {
    let code = match error {
        HostError::Address(_) => ErrorCode::Invalid,
        HostError::NoDevice(_) => ErrorCode::NotFound,
        HostError::Busy { .. }
        | HostError::NotAlone { .. }
        | HostError::NotOurs { .. }
        | HostError::Held(..) => ErrorCode::InUse,
        _ => return Failure::Local(error.to_string()),
    };
    Failure::Refused(ErrorDetail { code, message: error.to_string() })
}
