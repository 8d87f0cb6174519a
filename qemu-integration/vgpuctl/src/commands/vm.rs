//! `screenshot`, `qemu-args`, `libvirt-xml`.

use std::fs;
use std::path::{Path, PathBuf};

use integrate::{Device, libvirt_xml as xml, qemu_args as qemu, shell};
use mdev_core::ids::VgpuId;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use serde_json::json;
use vgpud_api::{Version, VgpuState};

use crate::cli::{LibvirtXml, Output, QemuArgs, Screenshot};
use crate::client::{Client, vgpu_path};
use crate::failure::Failure;
use crate::mdevctl::pretty;

/// Runs `screenshot`.
pub async fn screenshot(client: &Client, args: Screenshot) -> Result<Vec<u8>, Failure> {
    let png = client.get_bytes(&format!("{}/screenshot", vgpu_path(args.uuid))).await?;
    if args.file == Path::new("-") {
        return match args.output {
            Output::Text => Ok(png.into()),
            Output::Json => Err(Failure::Usage(
                "The standard output is used for the picture; name a file for --output json".into(),
            )),
        };
    }
    let file = args.file.display();
    fs::write(&args.file, &png)
        .map_err(|error| Failure::Local(format!("Cannot write {file}: {error}")))?;
    match args.output {
        Output::Text => Ok(Vec::new()),
        Output::Json => {
            pretty(&json!({ "uuid": args.uuid, "file": args.file, "bytes": png.len() }))
        }
    }
}

/// Runs `qemu-args`.
pub async fn qemu_args(client: &Client, args: QemuArgs) -> Result<Vec<u8>, Failure> {
    let mut device = Device::new(socket(client, args.uuid).await?);
    if let Some(id) = args.id {
        device = device.with_id(id);
    }
    let list = if args.device {
        vec![device.json()]
    } else if args.command.is_empty() {
        qemu::new_vm(&device, &args.machine, &args.memory)
    } else {
        let attached = qemu::attach(&args.command, &device);
        attached.map_err(|error| Failure::Usage(error.to_string()))?
    };
    match args.output {
        Output::Json => pretty(&list),
        // Not quoted: the value goes to a file or a variable.
        Output::Text if args.device => Ok(format!("{}\n", list.join(" ")).into_bytes()),
        Output::Text => Ok(format!("{}\n", shell::lines(&list)).into_bytes()),
    }
}

/// Runs `libvirt-xml`.
pub async fn libvirt_xml(client: &Client, args: LibvirtXml) -> Result<Vec<u8>, Failure> {
    let socket = socket(client, args.uuid).await?;
    let device = Device::new(&socket).at(args.bus, args.addr);
    let text = xml::domain(&device).map_err(Failure::output)?;
    match args.output {
        Output::Text => Ok(text.into_bytes()),
        Output::Json => pretty(&json!({
            "uuid": args.uuid, "socket": socket, "device": device.json(), "xml": text,
        })),
    }
}

/// Returns the path of a vGPU's vfio-user socket. The path is known before the vGPU starts.
async fn socket(client: &Client, id: VgpuId) -> Result<PathBuf, Failure> {
    let vgpu = client.vgpu(id, None).await?;
    if let Some(socket) = vgpu.socket {
        let own = nix::unistd::geteuid();
        if access(socket.as_str(), AccessFlags::W_OK) == Err(Errno::EACCES) {
            eprintln!(
                "vgpuctl: note: the socket of vGPU {id} has another owner; to use it in your VM, stop \
                 the vGPU, then: vgpuctl start -u {id} --owner {own}"
            );
        }
        return Ok(socket.into());
    }
    if vgpu.state == VgpuState::Stopped {
        eprintln!(
            "vgpuctl: note: vGPU {id} is not running; start it before the VM: vgpuctl start -u {id}"
        );
    }
    let version: Version = client.get("/v1/version").await?;
    Ok(Path::new(&version.run_dir).join("vgpus").join(id.to_string()).join("vfio.sock"))
}
