//! `run-vm`: a VM with a vGPU, for the lifetime of the VM.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::process::Command;

use integrate::Device;
use integrate::boot::{Boot, DiskFormat};
use nix::unistd::{AccessFlags, access};
use vgpud_api::{ParentTypes, TypeInfo, Vgpu};

use super::transient::Transient;
use super::vm::has_head;
use crate::cli::RunVm;
use crate::failure::{Failure, say};
use vgpud_client::Client;

/// Device of KVM.
const KVM: &str = "/dev/kvm";

/// Largest video memory of a type that is chosen by default, if there is a smaller one.
const DEFAULT_VRAM: u64 = 1 << 30;

/// Runs `run-vm`. Does not return after the VM has run.
pub async fn run_vm(client: &Client, args: RunVm) -> Result<Vec<u8>, Failure> {
    let disk = args.disk.to_str().ok_or_else(|| {
        Failure::Usage(format!("{} is not UTF-8; rename the disk image", args.disk.display()))
    })?;
    let boot = Boot {
        program: args.qemu.clone(),
        name: args.attrs.name.as_ref().map(ToString::to_string),
        memory: args.memory.clone(),
        cpus: args.cpus,
        kvm: access(KVM, AccessFlags::R_OK | AccessFlags::W_OK).is_ok(),
        disk: disk.to_owned(),
        format: format(&args.disk)?,
        more: args.more.clone(),
    };
    let mdev_type = match args.mdev_type {
        Some(name) => name,
        None => default_type(
            &client.get::<Vec<ParentTypes>>("/v1/types").await?,
            args.parent.as_deref(),
        )?,
    };
    let attrs = args.attrs.pairs();
    let transient = Transient { parent: args.parent, mdev_type: Some(mdev_type), attrs };
    transient
        .run(client, async |vgpu| {
            let socket = vgpu.socket.clone().unwrap_or_default();
            let head = has_head(client, vgpu).await?;
            let line = boot.command_line(&Device::new(socket), head);
            let line = line.map_err(|error| Failure::Usage(error.to_string()))?;
            say(announcement(&boot, vgpu));
            let mut command = Command::new(&boot.program);
            command.args(line.iter().skip(1));
            Ok(command)
        })
        .await
}

/// Returns the format of a disk image.
fn format(disk: &Path) -> Result<DiskFormat, Failure> {
    let mut begin = Vec::new();
    let read = File::open(disk).and_then(|file| file.take(4).read_to_end(&mut begin));
    match read {
        Ok(_) => Ok(DiskFormat::of(&begin)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Failure::NotFound(format!("There is no disk image {}", disk.display())))
        }
        Err(error) => Err(Failure::Local(format!("Cannot read {}: {error}", disk.display()))),
    }
}

/// Returns the type for a VM on a parent, or on the only one: the largest with a display of at most
/// [`DEFAULT_VRAM`] that can be started, or else the smallest.
fn default_type(all: &[ParentTypes], parent: Option<&str>) -> Result<String, Failure> {
    let mut on = all.iter().filter(|on| parent.is_none_or(|parent| on.parent == parent));
    let names = || all.iter().map(|on| on.parent.as_str()).collect::<Vec<_>>().join(", ");
    let types = match (on.next(), on.next()) {
        (Some(only), None) => &only.types,
        (None, _) => {
            let asked = parent.unwrap_or_default();
            let message = format!("There is no parent {asked}; the parents are: {}", names());
            return Err(Failure::NotFound(message));
        }
        (Some(_), Some(_)) => {
            let message = format!(
                "There are several parents; name one with -p ({}), or a type with -t",
                names()
            );
            return Err(Failure::Usage(message));
        }
    };
    let mut free: Vec<&TypeInfo> =
        types.iter().filter(|info| info.heads > 0 && info.available_instances > 0).collect();
    free.sort_by_key(|info| info.vram_bytes);
    let chosen = free.iter().rev().find(|info| info.vram_bytes <= DEFAULT_VRAM).or(free.first());
    chosen.map(|info| info.name.clone()).ok_or_else(|| {
        Failure::NotNow(
            "No type with a display has room now; `vgpuctl types` shows what can be started, and -t \
             chooses a type"
                .to_owned(),
        )
    })
}

/// Says in one line what is started.
fn announcement(boot: &Boot, vgpu: &Vgpu) -> String {
    let id = vgpu.uuid;
    let (vm, view) = match &boot.name {
        Some(name) => (format!("VM {name} with vGPU {id}"), name.clone()),
        None => (format!("VM with vGPU {id}"), id.to_string()),
    };
    let how =
        if boot.kvm { "KVM".to_owned() } else { format!("emulated CPUs (no access to {KVM})") };
    let plural = if boot.cpus == 1 { "" } else { "s" };
    format!(
        "{vm} of type {} on {}, {} of memory, {} CPU{plural}, {how}; its screen: `vgpuctl view {view}`",
        vgpu.mdev_type, vgpu.parent, boot.memory, boot.cpus
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parent(name: &str, types: &[(&str, u64, u32, u32)]) -> ParentTypes {
        let one = |(name, mib, heads, free): &(&str, u64, u32, u32)| {
            json!({
                "name": name, "description": "", "device_api": "vfio-user",
                "available_instances": free, "max_instances": 8, "vram_bytes": mib << 20, "heads": heads,
            })
        };
        let types: Vec<_> = types.iter().map(one).collect();
        serde_json::from_value(json!({ "parent": name, "types": types })).unwrap()
    }

    #[test]
    fn a_type_with_a_display_and_room_is_chosen() {
        let soft0 = parent(
            "soft0",
            &[
                ("A-256MQ", 256, 1, 9),
                ("A-1C", 1024, 0, 9),
                ("A-1Q", 1024, 1, 9),
                ("A-2Q", 2048, 1, 4),
            ],
        );
        let (full, large) =
            (parent("b", &[("B-1Q", 1024, 1, 0)]), parent("c", &[("C-4Q", 4096, 1, 1)]));
        let chosen =
            |all: &[ParentTypes], on| default_type(all, on).map_err(|error| error.to_string());
        assert_eq!(chosen(std::slice::from_ref(&soft0), None).as_deref(), Ok("A-1Q"));
        let all = [soft0, full, large];
        assert_eq!(
            chosen(&all, Some("c")).as_deref(),
            Ok("C-4Q"),
            "none is as small as the default"
        );
        for (on, part) in [
            (None, "There are several parents; name one with -p (soft0, b, c), or a type with -t"),
            (Some("b"), "No type with a display has room now"),
            (Some("x"), "There is no parent x; the parents are: soft0, b, c"),
        ] {
            let error = chosen(&all, on).unwrap_err();
            assert!(error.starts_with(part), "{error}");
        }
    }
}
