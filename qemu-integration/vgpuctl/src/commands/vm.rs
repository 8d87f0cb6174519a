//! `screenshot`, `qemu-args`, `libvirt-xml`.

use std::io::Write;
use std::path::{Path, PathBuf};

use integrate::{Device, libvirt_xml as xml, qemu_args as qemu, shell};
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use serde_json::json;
use vgpud_api::{ParentTypes, Version, Vgpu, VgpuState};

use super::new_file::NewFile;
use crate::cli::{LibvirtXml, Output, QemuArgs, Screenshot};
use crate::failure::{Failure, say};
use crate::mdevctl::pretty;
use vgpud_client::{Client, vgpu_path};

/// Runs `screenshot`.
pub async fn screenshot(client: &Client, args: Screenshot) -> Result<Vec<u8>, Failure> {
    let vgpu = args.vgpu.vgpu()?;
    let request = format!("{}/screenshot", vgpu_path(vgpu));
    if args.file == Path::new("-") {
        return match args.output {
            Output::Text => Ok(client.get_bytes(&request).await?.into()),
            Output::Json => Err(Failure::Usage(
                "The standard output is used for the picture; name a file for --output json".into(),
            )),
        };
    }
    let mut file = NewFile::create(&args.file)?;
    let png = client.get_bytes(&request).await?;
    let written = file.write_all(&png).and_then(|()| file.finish());
    let bytes = written.map_err(|error| {
        Failure::Local(format!("Cannot write {}: {error}", args.file.display()))
    })?;
    match args.output {
        Output::Text => Ok(Vec::new()),
        Output::Json => {
            let uuid = client.vgpu(vgpu, None).await?.uuid;
            pretty(&json!({ "uuid": uuid, "file": args.file, "bytes": bytes }))
        }
    }
}

/// Runs `qemu-args`.
pub async fn qemu_args(client: &Client, args: QemuArgs) -> Result<Vec<u8>, Failure> {
    let vgpu = client.vgpu(args.vgpu.vgpu()?, None).await?;
    let mut device = Device::new(socket(client, &vgpu).await?);
    if let Some(id) = args.id {
        device = device.with_id(id);
    }
    let list = if args.device {
        vec![device.json()]
    } else {
        let head = has_head(client, &vgpu).await?;
        if let Some(other) = qemu::other_display(&args.command).filter(|_| head) {
            say(format_args!(
                "note: the VM starts on its other display adapter ({other}); without that \
                 adapter it starts on the vGPU"
            ));
        }
        if args.command.is_empty() {
            qemu::new_vm(&device, &args.machine, &args.memory, head)
        } else {
            let attached = qemu::attach(&args.command, &device, head);
            attached.map_err(|error| Failure::Usage(error.to_string()))?
        }
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
    let vgpu = client.vgpu(args.vgpu.vgpu()?, None).await?;
    let socket = socket(client, &vgpu).await?;
    let device = Device::new(&socket).at(args.bus, args.addr);
    let text = xml::domain(&device).map_err(Failure::output)?;
    match args.output {
        Output::Text => Ok(text.into_bytes()),
        Output::Json => pretty(&json!({
            "uuid": vgpu.uuid, "socket": socket, "device": device.json(), "xml": text,
        })),
    }
}

/// Returns whether a vGPU has a display head.
pub async fn has_head(client: &Client, vgpu: &Vgpu) -> Result<bool, Failure> {
    let name = vgpu.live_type.as_ref().unwrap_or(&vgpu.mdev_type);
    type_has_head(client, name).await
}

/// Returns whether vGPUs of a type have a display head. Types that no parent offers have none.
pub async fn type_has_head(client: &Client, name: &str) -> Result<bool, Failure> {
    let parents: Vec<ParentTypes> = client.get("/v1/types").await?;
    let mut types = parents.iter().flat_map(|parent| &parent.types);
    Ok(types.any(|offered| offered.name == name && offered.heads > 0))
}

/// Returns the path of a vGPU's vfio-user socket. The path is known before the vGPU starts.
async fn socket(client: &Client, vgpu: &Vgpu) -> Result<PathBuf, Failure> {
    let id = vgpu.uuid;
    if let Some(socket) = &vgpu.socket {
        let own = nix::unistd::geteuid();
        if access(socket.as_str(), AccessFlags::W_OK) == Err(Errno::EACCES) {
            say(format_args!(
                "note: the socket of vGPU {id} has another owner; to use it in your VM, stop \
                 the vGPU, then: vgpuctl start -u {id} --owner {own}"
            ));
        }
        return Ok(socket.into());
    }
    if vgpu.state == VgpuState::Stopped {
        say(format_args!(
            "note: vGPU {id} is not running; start it before the VM: vgpuctl start -u {id}"
        ));
    }
    let version: Version = client.get("/v1/version").await?;
    Ok(Path::new(&version.run_dir).join("vgpus").join(id.to_string()).join("vfio.sock"))
}
