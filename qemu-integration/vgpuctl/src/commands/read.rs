//! `types`, `list`.

use vgpud_api::{ErrorCode, ErrorDetail, ParentTypes, Vgpu, VgpuState};

use crate::cli::{List, Output, Types};
use crate::client::Client;
use crate::failure::Failure;
use crate::mdevctl::{self, dump, pretty};

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
    let shown = |vgpu: &&Vgpu| {
        let included = if args.defined { vgpu.defined } else { vgpu.state != VgpuState::Stopped };
        included
            && args.uuid.is_none_or(|uuid| vgpu.uuid == uuid)
            && args.parent.as_ref().is_none_or(|parent| vgpu.parent == *parent)
    };
    let vgpus: Vec<_> = all.iter().filter(shown).collect();
    for vgpu in &vgpus {
        for warning in &vgpu.warnings {
            eprintln!("vgpuctl: warning: vGPU {}: {warning}", vgpu.uuid);
        }
    }
    match args.output {
        _ if args.dumpjson => dump(&mdevctl::list_json(&vgpus, args.defined, args.uuid.is_some())),
        Output::Json => pretty(&vgpus),
        Output::Text => Ok(mdevctl::list_text(&vgpus, args.defined, args.verbose).into_bytes()),
    }
}

/// Returns the error for an unknown parent.
pub(super) fn no_parent(name: &str, names: &[String]) -> Failure {
    let message = format!("There is no parent {name}; the parents are: {}", names.join(", "));
    Failure::Refused(ErrorDetail { code: ErrorCode::NotFound, message })
}
