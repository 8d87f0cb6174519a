//! `parents`: the host's physical devices. Uses sysfs and does not need a running `vgpud`.

mod boot_binding;

use std::fmt::Write as _;
use std::process::{Command, Stdio};

use host_inventory::SUPPORT;
use host_inventory::support::Recommendation;
use host_inventory::{HostError, PciAddress, PciDevice, PciHost};
use serde::Serialize;
use vgpud_api::ErrorCode;

use crate::cli::{Output, Parents, ParentsTask};
use crate::failure::Failure;
use crate::mdevctl::pretty;

use boot_binding::BootBindings;

/// Device with the next step for sharing it.
#[derive(Debug, Serialize)]
struct Candidate {
    #[serde(flatten)]
    device: PciDevice,
    /// Whether Tessera can share the device in its current state.
    parent: bool,
    /// Whether the binding to vfio-pci is persistent.
    kept: bool,
    /// Next command, or the reason why there is none.
    next: String,
}

/// Runs `parents`.
pub fn parents(args: &Parents) -> Result<Vec<u8>, Failure> {
    let host = PciHost::default();
    let bindings = BootBindings::find();
    let bindings = bindings.as_ref();
    match &args.task {
        None => list(&host, bindings, args.output),
        Some(ParentsTask::Bind { address, until_reboot, output }) => {
            bind(&host, bindings.filter(|_| !until_reboot), *address, *output)
        }
        Some(ParentsTask::Unbind { address, output }) => unbind(&host, bindings, *address, *output),
    }
}

fn bind(
    host: &PciHost,
    bindings: Option<&BootBindings>,
    address: PciAddress,
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
    let file = bindings.map(|bindings| bindings.add(&device)).transpose()?;
    if output == Output::Json {
        return pretty(&candidate(device, bindings));
    }
    let files = device.files().replace(' ', " and ");
    let mut text = format!("{address} is bound to vfio-pci: {files}\n");
    if let (Some(file), Some(bindings)) = (file, bindings) {
        let _ = writeln!(text, "The binding is repeated after each boot: {}", file.display());
        let _ = writeln!(text, "{}", share_step(address, Some(bindings)));
    }
    Ok(text.into_bytes())
}

fn unbind(
    host: &PciHost,
    bindings: Option<&BootBindings>,
    address: PciAddress,
    output: Output,
) -> Result<Vec<u8>, Failure> {
    let remove_binding = || bindings.map_or(Ok(false), |bindings| bindings.remove(address));
    let device = match host.unbind(address) {
        Ok(device) => device,
        // A persistent binding may exist for a device that is absent or not bound.
        Err(error @ (HostError::NoDevice(_) | HostError::NotBound { .. })) => {
            if !remove_binding()? {
                return Err(failure(&error));
            }
            return match output {
                Output::Json => pretty(&serde_json::json!({ "address": address, "kept": false })),
                Output::Text => {
                    Ok(format!("{address} is not bound to vfio-pci at boot any more\n")
                        .into_bytes())
                }
            };
        }
        Err(error) => return Err(failure(&error)),
    };
    remove_binding()?;
    if output == Output::Json {
        return pretty(&candidate(device, bindings));
    }
    let driver = device.driver.unwrap_or_else(|| "no driver, because none supports it".to_owned());
    Ok(format!("{address} is returned to {driver}\n").into_bytes())
}

/// Runs `modprobe vfio-pci`. Callers detect a failure when they look for the driver again.
fn load_driver() {
    let mut command = Command::new("modprobe");
    command.arg("vfio-pci").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _ = command.status();
}

fn list(
    host: &PciHost,
    bindings: Option<&BootBindings>,
    output: Output,
) -> Result<Vec<u8>, Failure> {
    let all = host.devices().map_err(|error| failure(&error))?;
    let all = all
        .into_iter()
        .filter(|device| device.is_display_or_accelerator() || SUPPORT.recommend(device).is_some());
    let all: Vec<_> = all.map(|device| candidate(device, bindings)).collect();
    match output {
        Output::Json => pretty(&all),
        Output::Text if all.is_empty() => {
            Ok(b"This host has no PCI display adapter or accelerator; `vgpud run` shares a software GPU\n".to_vec())
        }
        Output::Text => {
            let mut text = String::new();
            for candidate in &all {
                let PciDevice { address, vendor, device, driver, .. } = &candidate.device;
                let driver = driver.as_deref().unwrap_or("no driver");
                let kept = match bindings {
                    Some(_) if candidate.kept => " after each boot",
                    Some(_) if candidate.device.is_bound() => " until the next boot",
                    _ => "",
                };
                let group = candidate.device.iommu_group.map(|group| format!("IOMMU group {group}"));
                let group = group.unwrap_or_else(|| "no IOMMU".to_owned());
                let kind = candidate.device.kind();
                let _ = writeln!(
                    text,
                    "{address}  {vendor:04x}:{device:04x}  {kind}, {driver}{kept}, {group}"
                );
                let _ = writeln!(text, "  {}", candidate.next);
            }
            Ok(text.into_bytes())
        }
    }
}

/// Returns the step that makes a bound device a parent.
fn share_step(address: PciAddress, bindings: Option<&BootBindings>) -> String {
    match bindings {
        None => format!("Share it: vgpud run --parent vfio:{address}"),
        Some(bindings) if bindings.is_parent(address) => {
            format!(
                "/etc/default/vgpud has --parent vfio:{address}, which takes effect after `systemctl restart vgpud`"
            )
        }
        Some(_) => format!(
            "Share it: add --parent vfio:{address} to VGPUD_ARGS in /etc/default/vgpud, then `systemctl restart vgpud`"
        ),
    }
}

fn candidate(device: PciDevice, bindings: Option<&BootBindings>) -> Candidate {
    let address = device.address;
    let (parent, next) = match SUPPORT.recommend(&device) {
        Some(Recommendation::Share { .. }) if device.is_bound() => {
            let back = format!("vgpuctl parents unbind {address}");
            (true, format!("{}; return it: {back}", share_step(address, bindings)))
        }
        Some(Recommendation::Share { parent }) => {
            (true, format!("Share it: vgpud run --parent {parent}"))
        }
        Some(Recommendation::BindFirst { parent }) => {
            let bind = format!("vgpuctl parents bind {address}");
            let then = match bindings {
                // `bind` prints the next step.
                Some(_) => String::new(),
                None => format!("; then: vgpud run --parent {parent}"),
            };
            (false, format!("Bind it to vfio-pci: {bind}{then}"))
        }
        Some(Recommendation::Prepare { step }) => (false, step),
        None => match device.driver.as_deref() {
            Some(driver) if device.is_bound() => (
                false,
                format!("It is bound to {driver}; return it: vgpuctl parents unbind {address}"),
            ),
            _ => (false, "Tessera has no backend that shares this device yet".to_owned()),
        },
    };
    let kept = bindings.is_some_and(|bindings| bindings.contains(address));
    Candidate { device, parent, kept, next }
}

fn failure(error: &HostError) -> Failure {
    let code = match error {
        HostError::Address(_) => ErrorCode::Invalid,
        HostError::NoDevice(_) => ErrorCode::NotFound,
        HostError::Busy { .. }
        | HostError::SharedGroup { .. }
        | HostError::NotBound { .. }
        | HostError::InUse(..) => ErrorCode::InUse,
        _ => return Failure::Local(error.to_string()),
    };
    Failure::refused(code, error.to_string())
}
