//! `stats`: shares and usage of running vGPUs.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use vgpud_api::{
    ErrorCode, ErrorDetail, Parent, ProgramProcess, Stats as StatsModel, VgpuState, VgpuStats,
};

use super::read::no_parent;
use crate::cli::{Output, Stats};
use crate::client::Client;
use crate::failure::Failure;
use crate::mdevctl::pretty;
use crate::units::{limit, memory, seconds};

/// Runs `stats`.
pub async fn stats(client: &Client, args: Stats) -> Result<Vec<u8>, Failure> {
    let mut stats: StatsModel = client.get("/v1/stats").await?;
    if let Some(parent) = &args.parent {
        if !stats.parents.iter().any(|stats| stats.parent == *parent) {
            let parents: Vec<Parent> = client.get("/v1/parents").await?;
            let names: Vec<_> = parents.into_iter().map(|parent| parent.name).collect();
            return Err(no_parent(parent, &names));
        }
        stats.parents.retain(|stats| stats.parent == *parent);
        stats.vgpus.retain(|vgpu| vgpu.parent == *parent);
    }
    if let Some(uuid) = args.uuid {
        stats.vgpus.retain(|vgpu| vgpu.uuid == uuid);
        let Some(vgpu) = stats.vgpus.first() else {
            // Distinguish a vGPU that is not running from one that does not exist.
            client.vgpu(uuid, None).await?;
            let message = format!("vGPU {uuid} is not running; start it: vgpuctl start -u {uuid}");
            return Err(Failure::Refused(ErrorDetail { code: ErrorCode::Conflict, message }));
        };
        let parent = vgpu.parent.clone();
        stats.parents.retain(|stats| stats.parent == parent);
    }
    match args.output {
        Output::Json => pretty(&stats),
        Output::Text => Ok(text(&stats, args.verbose || args.uuid.is_some()).into_bytes()),
    }
}

fn text(stats: &StatsModel, verbose: bool) -> String {
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
    if verbose {
        return stats.vgpus.iter().fold(text, |text, vgpu| text + &details(vgpu));
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(HEADER);
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

const HEADER: [&str; 17] = [
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
    "HELD",
    "SUBMITTED",
    "TRAPS",
    "FAULTS",
    "HANGS",
    "VM",
];

fn row(vgpu: &VgpuStats) -> [String; HEADER.len()] {
    [
        vgpu.uuid.to_string(),
        vgpu.parent.clone(),
        vgpu.mdev_type.clone(),
        asked(vgpu).unwrap_or_else(|| "-".to_owned()),
        vgpu.mode.clone(),
        vgpu.priority.clone(),
        format!("{:.1} %", vgpu.share_entitled),
        format!("{:.1} %", vgpu.share_measured),
        format!("{:.1} %", vgpu.share_of_busy),
        seconds(vgpu.engine_ns),
        seconds(vgpu.wait_ns),
        seconds(vgpu.gated_ns),
        vgpu.submissions.to_string(),
        traps(vgpu).to_string(),
        vgpu.faults.to_string(),
        vgpu.hang_resets.to_string(),
        user(vgpu).unwrap_or_else(|| "-".to_owned()),
    ]
}

/// Returns the process ID of the VM, or the number of programs.
pub fn user(vgpu: &VgpuStats) -> Option<String> {
    let programs = vgpu.programs.as_ref().map(|programs| match programs.processes.len() {
        1 => "1 program".to_owned(),
        count => format!("{count} programs"),
    });
    programs.or_else(|| vgpu.vm_pid.map(|pid| pid.to_string()))
}

/// Formats all counters and limits of a vGPU.
fn details(vgpu: &VgpuStats) -> String {
    let user = match (user(vgpu), &vgpu.programs) {
        (Some(programs), Some(_)) => programs,
        (Some(pid), None) => format!("VM {pid}"),
        (None, _) => "no VM".to_owned(),
    };
    let worker = vgpu.pid.map_or_else(|| "no worker".to_owned(), |pid| format!("worker {pid}"));
    let state = match vgpu.state {
        VgpuState::Stopped => "stopped",
        VgpuState::Running => "running",
        VgpuState::Restarting => "restarting",
        VgpuState::Failed => "failed",
    };
    let mut text = format!(
        "\n{}  {} on {}, {state}, {user}, {worker}\n",
        vgpu.uuid, vgpu.mdev_type, vgpu.parent,
    );
    for (name, value) in time_lines(vgpu).into_iter().chain(work_lines(vgpu)) {
        let _ = writeln!(text, "  {name:<9}  {value}");
    }
    let processes = vgpu.programs.iter().flat_map(|programs| &programs.processes);
    for (index, process) in processes.enumerate() {
        let title = if index == 0 { "programs" } else { "" };
        let ProgramProcess { pid, name, vram_used_bytes } = process;
        let used = memory(*vram_used_bytes);
        let space = if name.is_empty() { "" } else { " " };
        let _ = writeln!(text, "  {title:<9}  process {pid}{space}{name}: {used} of video memory");
    }
    text
}

/// Formats shares and engine time.
fn time_lines(vgpu: &VgpuStats) -> Vec<(&'static str, String)> {
    let times = vgpu.engines;
    vec![
        (
            "share",
            format!(
                "{:.1} % of the GPU, {:.1} % of its busy time; requested {}, due {:.1} %, at most {:.0} %",
                vgpu.share_measured,
                vgpu.share_of_busy,
                asked(vgpu).unwrap_or_else(|| "none".to_owned()),
                vgpu.share_entitled,
                vgpu.share_cap
            ),
        ),
        (
            "",
            format!(
                "{}, {} priority, slice {} ms",
                vgpu.mode,
                vgpu.priority,
                vgpu.timeslice_us as f64 / 1e3
            ),
        ),
        (
            "engine",
            format!(
                "{}: kernels {}, copies {}, other {}",
                seconds(vgpu.engine_ns),
                seconds(times.compute_ns),
                seconds(times.copy_ns),
                seconds(times.host_ns)
            ),
        ),
        (
            "waited",
            format!(
                "{}, of which {} gated by its cap ({} times); {} used beyond the cap",
                seconds(vgpu.wait_ns),
                seconds(vgpu.gated_ns),
                vgpu.gate_closings,
                seconds(vgpu.gate_cost_ns)
            ),
        ),
        (
            "slices",
            format!(
                "{} preemptions; {} overruns, {} in total; {} stolen by the host",
                vgpu.preemptions,
                vgpu.slice_overruns,
                seconds(vgpu.overrun_ns),
                seconds(vgpu.stolen_ns)
            ),
        ),
    ]
}

/// Formats submissions, errors, memory and channels.
fn work_lines(vgpu: &VgpuStats) -> Vec<(&'static str, String)> {
    let limits = vgpu.limits;
    vec![
        (
            "work",
            format!(
                "{} submissions, {} throttled; {}",
                vgpu.submissions,
                vgpu.throttled,
                limit(limits.submissions_per_second, "no limit", |n| {
                    format!("at most {n} per second")
                })
            ),
        ),
        (
            "doorbells",
            format!(
                "{} polled, {} wake-ups; {} traps",
                vgpu.polled_doorbells,
                vgpu.wakeups,
                traps(vgpu)
            ),
        ),
        (
            "errors",
            format!(
                "{} faults, {} of them hangs; hang timeout {}, semaphore timeout {}",
                vgpu.faults,
                vgpu.hang_resets,
                limit(limits.hang_timeout_ms, "none", milliseconds),
                limit(limits.acquire_timeout_ms, "none", milliseconds)
            ),
        ),
        (
            "memory",
            format!(
                "{} video{}; {} guest memory imported, at most {}",
                memory(vgpu.vram_bytes),
                vgpu.programs.as_ref().map_or_else(String::new, |programs| {
                    format!(", {} in use", memory(programs.vram_used_bytes))
                }),
                memory(vgpu.imported_bytes),
                memory(limits.imported_bytes)
            ),
        ),
        ("channels", format!("{}, at most {}", vgpu.channels, limits.channels)),
        (
            "screen",
            limit(limits.refresh_per_second, "none", |hz| {
                format!("at most {hz} readouts per second")
            }),
        ),
    ]
}

fn milliseconds(ms: u64) -> String {
    format!("{} s", ms as f64 / 1e3)
}

fn asked(vgpu: &VgpuStats) -> Option<String> {
    vgpu.share_asked.map(|core| format!("{core} %"))
}

fn traps(vgpu: &VgpuStats) -> u64 {
    let traps = vgpu.traps;
    let counted = [traps.config, traps.display, traps.control, traps.doorbell, traps.memory];
    counted.into_iter().fold(0_u64, u64::saturating_add)
}
