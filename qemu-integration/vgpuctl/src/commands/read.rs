//! `types`, `list`.

use mdev_core::definition::VgpuRef;
use mdev_core::ids::VgpuId;
use vgpud_api::{ErrorCode, ParentTypes, Vgpu, VgpuState};

use crate::cli::{List, Output, Types};
use crate::failure::{Failure, say};
use crate::mdevctl::{self, dump, pretty};
use vgpud_client::Client;

/// Runs `types`.
pub async fn types(client: &Client, args: Types) -> Result<Vec<u8>, Failure> {
    let mut parents: Vec<ParentTypes> = client.get("/v1/types").await?;
    if let Some(parent) = args.parent {
        let names: Vec<_> = parents.iter().map(|types| types.parent.clone()).collect();
        parents.retain(|types| types.parent == parent);
        // With --dumpjson, an unknown parent has an empty list, as in mdevctl.
        if parents.is_empty() && !args.dumpjson {
            return Err(no_parent(&parent, &names));
        }
    }
    match args.output {
        _ if args.dumpjson => dump(&mdevctl::types_json(&parents)),
        Output::Json => pretty(&parents),
        Output::Text => Ok(mdevctl::types_text(&parents).into_bytes()),
    }
}

/// Runs `list`.
pub async fn list(client: &Client, args: List) -> Result<Vec<u8>, Failure> {
    let all: Vec<Vgpu> = client.get("/v1/vgpus").await?;
    let asked = args.vgpu.vgpu();
    let shown = |vgpu: &&Vgpu| {
        let included = if args.defined { vgpu.defined } else { vgpu.state != VgpuState::Stopped };
        included
            && asked.is_none_or(|asked| is(vgpu, asked))
            && args.parent.as_ref().is_none_or(|parent| vgpu.parent == *parent)
    };
    let vgpus: Vec<_> = all.iter().filter(shown).collect();
    for vgpu in &vgpus {
        for warning in &vgpu.warnings {
            say(format_args!("warning: vGPU {}: {warning}", vgpu.uuid));
        }
    }
    match args.output {
        _ if args.dumpjson => dump(&mdevctl::list_json(&vgpus, args.defined, asked.is_some())),
        Output::Json => pretty(&vgpus),
        Output::Text => Ok(mdevctl::list_text(&vgpus, args.defined, args.verbose).into_bytes()),
    }
}

/// Returns a vGPU's uuid, followed by the name of the vGPU, if it has one.
pub(super) fn called(uuid: VgpuId, vgpus: &[Vgpu]) -> String {
    let name = vgpus.iter().find(|vgpu| vgpu.uuid == uuid).and_then(|vgpu| vgpu.name.as_ref());
    name.map_or_else(|| uuid.to_string(), |name| format!("{uuid} ({name})"))
}

/// Returns whether a vGPU is the named one.
fn is(vgpu: &Vgpu, asked: &VgpuRef) -> bool {
    match asked {
        VgpuRef::Id(id) => vgpu.uuid == *id,
        VgpuRef::Name(name) => vgpu.name.as_deref() == Some(name.as_str()),
    }
}

/// Returns the error for an unknown parent.
pub(super) fn no_parent(name: &str, names: &[String]) -> Failure {
    let message = format!("There is no parent {name}; the parents are: {}", names.join(", "));
    Failure::refused(ErrorCode::NotFound, message)
}
