//! `types`, `list`, `stats`.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use vfio_user_server::api::model::{
    ErrorCode, ErrorDetail, Parent, ParentTypes, Stats as StatsModel, Vgpu, VgpuState, VgpuStats,
};

use crate::cli::{List, Output, Stats, Types};
use crate::client::Client;
use crate::failure::Failure;
use crate::mdevctl::{self, pretty};

/// `types`
pub async fn types(client: &Client, args: Types) -> Result<Vec<u8>, Failure> {
    let mut parents: Vec<ParentTypes> = client.get("/v1/types").await?;
    if let Some(parent) = args.parent {
        let names: Vec<_> = parents.iter().map(|types| types.parent.clone()).collect();
        parents.retain(|types| types.parent == parent);
        if parents.is_empty() {
            return Err(no_parent(&parent, &names));
        }
    }
    match args.output {
        _ if args.dumpjson => pretty(&mdevctl::types_json(&parents)),
        Output::Json => pretty(&parents),
        Output::Text => Ok(mdevctl::types_text(&parents).into_bytes()),
    }
}

/// `list`
pub async fn list(client: &Client, args: List) -> Result<Vec<u8>, Failure> {
    let all: Vec<Vgpu> = client.get("/v1/vgpus").await?;
    let shown = |vgpu: &&Vgpu| {
        let there = if args.defined { vgpu.defined } else { vgpu.state != VgpuState::Stopped };
        there
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
        _ if args.dumpjson => pretty(&mdevctl::list_json(&vgpus, args.uuid.is_some())),
        Output::Json => pretty(&vgpus),
        Output::Text => Ok(mdevctl::list_text(&vgpus, args.defined, args.verbose).into_bytes()),
    }
}

/// `stats`
pub async fn stats(client: &Client, args: Stats) -> Result<Vec<u8>, Failure> {
    let mut stats: StatsModel = client.get("/v1/stats").await?;
    if let Some(parent) = &args.parent {
        if !stats.parents.iter().any(|one| one.parent == *parent) {
            let parents: Vec<Parent> = client.get("/v1/parents").await?;
            let names: Vec<_> = parents.into_iter().map(|parent| parent.name).collect();
            return Err(no_parent(parent, &names));
        }
        stats.parents.retain(|one| one.parent == *parent);
        stats.vgpus.retain(|vgpu| vgpu.parent == *parent);
    }
    if let Some(uuid) = args.uuid {
        stats.vgpus.retain(|vgpu| vgpu.uuid == uuid);
        let Some(vgpu) = stats.vgpus.first() else {
            // There may be one that does not run: say which of the two it is.
            client.vgpu(uuid, None).await?;
            let message = format!("vGPU {uuid} is not running; start it: vgpuctl start -u {uuid}");
            return Err(Failure::Refused(ErrorDetail { code: ErrorCode::Conflict, message }));
        };
        let parent = vgpu.parent.clone();
        stats.parents.retain(|one| one.parent == parent);
    }
    match args.output {
        Output::Json => pretty(&stats),
        Output::Text => Ok(stats_text(&stats).into_bytes()),
    }
}

fn stats_text(stats: &StatsModel) -> String {
    let mut text = String::new();
    for parent in &stats.parents {
        let _ = match parent.window_ms {
            0 => writeln!(text, "{}: nothing measured yet", parent.parent),
            ms => writeln!(
                text,
                "{}: busy {:.1} % of the last {:.1} s",
                parent.parent,
                parent.busy,
                ms as f64 / 1000.0
            ),
        };
    }
    if stats.vgpus.is_empty() {
        return text + "No vGPU is running.\n";
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "UUID",
        "PARENT",
        "TYPE",
        "ASKED",
        "MODE",
        "PRIORITY",
        "DUE",
        "SHARE",
        "OF BUSY",
        "ENGINE",
        "WAITED",
        "SUBMITTED",
        "POLLED",
        "WOKEN",
        "TRAPS",
        "FAULTS",
        "VM",
    ]);
    for vgpu in &stats.vgpus {
        table.add_row(row(vgpu));
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for line in table.lines() {
        text += line.trim();
        text.push('\n');
    }
    text
}

fn row(vgpu: &VgpuStats) -> [String; 17] {
    let seconds = |ns: u64| format!("{:.2} s", ns as f64 / 1e9);
    let traps = vgpu.traps;
    let counted = [traps.config, traps.display, traps.control, traps.doorbell, traps.memory];
    let all_traps = counted.into_iter().fold(0_u64, u64::saturating_add);
    [
        vgpu.uuid.to_string(),
        vgpu.parent.clone(),
        vgpu.mdev_type.clone(),
        vgpu.share_asked.map_or_else(|| "-".to_owned(), |core| format!("{core} %")),
        vgpu.mode.clone(),
        vgpu.priority.clone(),
        format!("{:.1} %", vgpu.share_entitled),
        format!("{:.1} %", vgpu.share_measured),
        format!("{:.1} %", vgpu.share_of_busy),
        seconds(vgpu.engine_ns),
        seconds(vgpu.wait_ns),
        vgpu.submissions.to_string(),
        vgpu.polled_doorbells.to_string(),
        vgpu.wakeups.to_string(),
        all_traps.to_string(),
        vgpu.faults.to_string(),
        vgpu.vm_pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
    ]
}

pub(super) fn no_parent(name: &str, names: &[String]) -> Failure {
    let message = format!("There is no parent {name}; there are: {}", names.join(", "));
    Failure::Refused(ErrorDetail { code: ErrorCode::NotFound, message })
}
