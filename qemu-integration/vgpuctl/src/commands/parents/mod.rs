//! `parents`: the host's physical devices. This reads and writes the kernel's files, and asks no `vgpud`.

mod keep;

use std::fmt::Write as _;
use std::process::{Command, Stdio};

use serde::Serialize;
use vendor_backends::vfio::host::{Address, Host, HostError, PciDevice};
use vfio_user_server::api::model::{ErrorCode, ErrorDetail};

use crate::cli::{Output, Parents, ParentsTask};
use crate::failure::Failure;
use crate::mdevctl::pretty;

use keep::Keeper;

const NVIDIA: u16 = 0x10de;

/// One device, and what to do to share it.
#[derive(Debug, Serialize)]
struct Candidate {
    #[serde(flatten)]
    device: PciDevice,
    /// Whether Tessera can share it out, as it is.
    parent: bool,
    /// Whether vfio-pci gets it after each boot.
    kept: bool,
    /// The command that comes next, or why there is none.
    next: String,
}

/// `parents`
pub fn parents(args: &Parents) -> Result<Vec<u8>, Failure> {
    let host = Host::default();
    let keeper = Keeper::find();
    let keeper = keeper.as_ref();
    match &args.task {
        None => list(&host, keeper, args.output),
        Some(ParentsTask::Bind { address, until_reboot, output }) => {
            bind(&host, keeper.filter(|_| !until_reboot), *address, *output)
        }
        Some(ParentsTask::Unbind { address, output }) => unbind(&host, keeper, *address, *output),
    }
}

fn bind(
    host: &Host,
    keeper: Option<&Keeper>,
    address: Address,
    output: Output,
) -> Result<Vec<u8>, Failure> {
    let bound = match host.bind(address) {
        Err(HostError::NoDriver) => {
            load_driver();
            host.bind(address)
        }
        other => other,
    };
    let device = bound.map_err(|error| failure(&error))?;
    let file = keeper.map(|keeper| keeper.keep(&device)).transpose()?;
    if output == Output::Json {
        return pretty(&candidate(device, keeper));
    }
    let files = device.files().replace(' ', " and ");
    let mut text = format!("{address} is vfio-pci's now: {files}\n");
    if let (Some(file), Some(keeper)) = (file, keeper) {
        let _ = writeln!(text, "It is again after each boot: {}", file.display());
        let _ = writeln!(text, "{}", share(address, Some(keeper)));
    }
    Ok(text.into_bytes())
}

fn unbind(
    host: &Host,
    keeper: Option<&Keeper>,
    address: Address,
    output: Output,
) -> Result<Vec<u8>, Failure> {
    let forget = || keeper.map_or(Ok(false), |keeper| keeper.forget(address));
    let device = match host.unbind(address) {
        Ok(device) => device,
        // It may be kept all the same, for when it is there again.
        Err(error @ (HostError::NoDevice(_) | HostError::NotOurs { .. })) => {
            if !forget()? {
                return Err(failure(&error));
            }
            return match output {
                Output::Json => pretty(&serde_json::json!({ "address": address, "kept": false })),
                Output::Text => {
                    Ok(format!("{address} is not given to vfio-pci at boot any more\n")
                        .into_bytes())
                }
            };
        }
        Err(error) => return Err(failure(&error)),
    };
    forget()?;
    if output == Output::Json {
        return pretty(&candidate(device, keeper));
    }
    let driver = device.driver.unwrap_or_else(|| "no driver: none wants it".to_owned());
    Ok(format!("{address} is back with {driver}\n").into_bytes())
}

/// What `modprobe vfio-pci` does. Whether it did is seen by whoever looks for the driver again.
fn load_driver() {
    let mut command = Command::new("modprobe");
    command.arg("vfio-pci").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _ = command.status();
}

fn list(host: &Host, keeper: Option<&Keeper>, output: Output) -> Result<Vec<u8>, Failure> {
    let all = host.candidates().map_err(|error| failure(&error))?;
    let all: Vec<_> = all.into_iter().map(|device| candidate(device, keeper)).collect();
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
                let kept = match keeper {
                    Some(_) if one.kept => " after each boot",
                    Some(_) if one.device.is_bound() => " until the next boot",
                    _ => "",
                };
                let group = one.device.iommu_group.map(|group| format!("IOMMU group {group}"));
                let group = group.unwrap_or_else(|| "no IOMMU".to_owned());
                let kind = one.device.kind();
                let _ = writeln!(
                    text,
                    "{address}  {vendor:04x}:{device:04x}  {kind}, {driver}{kept}, {group}"
                );
                let _ = writeln!(text, "  {}", one.next);
            }
            Ok(text.into_bytes())
        }
    }
}

/// How a device that is bound becomes a parent.
fn share(address: Address, keeper: Option<&Keeper>) -> String {
    match keeper {
        None => format!("Share it: vgpud run --parent vfio:{address}"),
        Some(keeper) if keeper.is_parent(address) => {
            format!(
                "vgpud is told to share it: --parent vfio:{address} is in /etc/default/vgpud; in force after `systemctl restart vgpud`"
            )
        }
        Some(_) => format!(
            "Share it: add --parent vfio:{address} to VGPUD_ARGS in /etc/default/vgpud, then `systemctl restart vgpud`"
        ),
    }
}

fn candidate(device: PciDevice, keeper: Option<&Keeper>) -> Candidate {
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
            if device.is_bound() {
                let back = format!("vgpuctl parents unbind {address}");
                (true, format!("{}; give it back: {back}", share(address, keeper)))
            } else {
                let bind = format!("vgpuctl parents bind {address}");
                let then = match keeper {
                    // It says what comes next.
                    Some(_) => String::new(),
                    None => format!("; then: vgpud run --parent vfio:{address}"),
                };
                (false, format!("Give it to vfio-pci: {bind}{then}"))
            }
        }
        (_, Some(driver)) if device.is_bound() => {
            (false, format!("{driver} has it; give it back: vgpuctl parents unbind {address}"))
        }
        _ => (false, "Tessera has no backend that shares this device yet".to_owned()),
    };
    let kept = keeper.is_some_and(|keeper| keeper.keeps(address));
    Candidate { device, parent, kept, next }
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
