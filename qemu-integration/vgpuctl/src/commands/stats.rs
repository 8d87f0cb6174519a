//! `stats`: shares and usage of running vGPUs.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use vgpud_api::{
    ErrorCode, Parent, ProgramProcess, Programs, Stats as StatsModel, VgpuState, VgpuStats,
};

use super::read::no_parent;
use crate::cli::{Output, Stats};
use crate::failure::Failure;
use crate::mdevctl::pretty;
use crate::units::{limit, memory, micros, quantiles, seconds};
use vgpud_client::Client;

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
    if let Some(asked) = args.vgpu.vgpu() {
        let uuid = client.vgpu(asked, None).await?.uuid;
        stats.vgpus.retain(|vgpu| vgpu.uuid == uuid);
        let Some(vgpu) = stats.vgpus.first() else {
            let message = format!("vGPU {uuid} is not running; start it: vgpuctl start -u {uuid}");
            return Err(Failure::refused(ErrorCode::Conflict, message));
        };
        let parent = vgpu.parent.clone();
        stats.parents.retain(|stats| stats.parent == parent);
    }
    match args.output {
        Output::Json => pretty(&stats),
        Output::Text => {
            let format = if args.verbose || args.vgpu.vgpu().is_some() {
                Format::Details
            } else if args.wide {
                Format::Wide
            } else {
                Format::Narrow
            };
            Ok(text(&stats, format).into_bytes())
        }
    }
}

/// Format of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// A row for each vGPU, in 100 columns.
    Narrow,
    /// A row for each vGPU, with all counters.
    Wide,
    /// Several lines for each vGPU.
    Details,
}

fn text(stats: &StatsModel, format: Format) -> String {
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
    if format == Format::Details {
        return stats.vgpus.iter().fold(text, |text, vgpu| text + &details(vgpu));
    }
    let rows = match format {
        Format::Wide => table(&stats.vgpus, |_| true),
        Format::Narrow | Format::Details => {
            let rows = table(&stats.vgpus, |column| column.shown != Shown::Wide);
            if rows.iter().any(|row| row.chars().count() > NARROW) {
                table(&stats.vgpus, |column| column.shown == Shown::Always)
            } else {
                rows
            }
        }
    };
    rows.iter().fold(text, |text, row| text + row + "\n")
}

/// Formats a table with some of the columns. Returns its lines.
fn table(vgpus: &[VgpuStats], is_shown: impl Fn(&Column) -> bool) -> Vec<String> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let columns: Vec<_> = COLUMNS.iter().filter(|column| is_shown(column)).collect();
    table.set_header(columns.iter().map(|column| column.title));
    for vgpu in vgpus {
        table.add_row(columns.iter().map(|column| (column.value)(vgpu)));
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.lines().map(|line| line.trim().to_owned()).collect()
}

/// Width of the narrow table.
const NARROW: usize = 100;

/// Column of the table.
struct Column {
    title: &'static str,
    shown: Shown,
    value: fn(&VgpuStats) -> String,
}

/// Tables with a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Always,
    /// The wide table, and the narrow one if it has room for all of these columns.
    IfRoom,
    Wide,
}

const fn narrow(title: &'static str, value: fn(&VgpuStats) -> String) -> Column {
    Column { title, shown: Shown::Always, value }
}

const fn if_room(title: &'static str, value: fn(&VgpuStats) -> String) -> Column {
    Column { title, shown: Shown::IfRoom, value }
}

const fn wide(title: &'static str, value: fn(&VgpuStats) -> String) -> Column {
    Column { title, shown: Shown::Wide, value }
}

const COLUMNS: [Column; 18] = [
    narrow("VGPU", |vgpu| vgpu.name.clone().unwrap_or_else(|| vgpu.uuid.to_string())),
    narrow("PARENT", |vgpu| vgpu.parent.clone()),
    narrow("TYPE", |vgpu| vgpu.mdev_type.clone()),
    narrow("ASKED", |vgpu| asked(vgpu).unwrap_or_else(|| "-".to_owned())),
    wide("MODE", |vgpu| vgpu.mode.clone()),
    wide("PRIORITY", |vgpu| vgpu.priority.clone()),
    narrow("DUE", |vgpu| format!("{:.1} %", vgpu.share_entitled)),
    narrow("SHARE", |vgpu| format!("{:.1} %", vgpu.share_measured)),
    wide("OF BUSY", |vgpu| format!("{:.1} %", vgpu.share_of_busy)),
    if_room("WAIT", |vgpu| waits(vgpu).unwrap_or_else(|| "-".to_owned())),
    wide("ENGINE", |vgpu| seconds(vgpu.engine_ns)),
    wide("WAITED", |vgpu| seconds(vgpu.wait_ns)),
    wide("HELD", |vgpu| seconds(vgpu.gated_ns)),
    wide("SUBMITTED", |vgpu| vgpu.submissions.to_string()),
    wide("TRAPS", |vgpu| traps(vgpu).to_string()),
    wide("FAULTS", |vgpu| vgpu.faults.to_string()),
    wide("HANGS", |vgpu| vgpu.hang_resets.to_string()),
    narrow("VM", |vgpu| user(vgpu).unwrap_or_else(|| "-".to_owned())),
];

/// Formats the quantiles of the last waits, if there were any.
pub fn waits(vgpu: &VgpuStats) -> Option<String> {
    Some(quantiles(vgpu.wait_p50_us?, vgpu.wait_p99_us?))
}

/// Formats the last waits in words.
pub fn waits_in_words(vgpu: &VgpuStats) -> String {
    match (vgpu.wait_p50_us, vgpu.wait_p99_us) {
        (Some(p50), Some(p99)) => {
            format!("{} in the last 1 to 2 s, p50 {}, p99 {}", vgpu.waits, micros(p50), micros(p99))
        }
        _ => "none in the last 1 to 2 s".to_owned(),
    }
}

/// Returns the programs of the host that use a vGPU.
pub fn programs_of_host(vgpu: &VgpuStats) -> Option<&Programs> {
    vgpu.programs.as_ref().filter(|programs| !programs.in_vm)
}

/// Returns the name or the process ID of the VM, or the number of programs of the host.
pub fn user(vgpu: &VgpuStats) -> Option<String> {
    let programs = programs_of_host(vgpu).map(|programs| match programs.processes.len() {
        1 => "1 program".to_owned(),
        count => format!("{count} programs"),
    });
    programs.or_else(|| vgpu.vm_pid.map(|pid| vgpu.vm_name.clone().unwrap_or(pid.to_string())))
}

/// Returns what uses a vGPU, as part of a sentence: the VM's process chooses its name.
fn described_user(vgpu: &VgpuStats) -> String {
    match (user(vgpu), &vgpu.vm_name) {
        (Some(programs), _) if programs_of_host(vgpu).is_some() => programs,
        (Some(_), Some(name)) => format!("VM \"{name}\""),
        (Some(pid), None) => format!("VM {pid}"),
        (None, _) => "no VM".to_owned(),
    }
}

/// Formats all counters and limits of a vGPU.
fn details(vgpu: &VgpuStats) -> String {
    let user = described_user(vgpu);
    let worker = vgpu.pid.map_or_else(|| "no worker".to_owned(), |pid| format!("worker {pid}"));
    let state = match vgpu.state {
        VgpuState::Stopped => "stopped",
        VgpuState::Running => "running",
        VgpuState::Restarting => "restarting",
        VgpuState::Failed => "failed",
    };
    let mut text = format!(
        "\n{}{}  {} on {}, {state}, {user}, {worker}\n",
        vgpu.uuid,
        vgpu.name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default(),
        vgpu.mdev_type,
        vgpu.parent,
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
        ("waits", waits_in_words(vgpu)),
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_table_fits_100_columns() {
        let process = json!({ "pid": 1, "name": "python3", "vram_used_bytes": 0 });
        let vgpu = json!({
            "uuid": "11111111-1111-4111-8111-111111111111", "parent": "0000:3b:00.0",
            "mdev_type": "SOFT-256MQ", "state": "running", "vram_bytes": 1, "share_asked": 100,
            "share_entitled": 100.0, "share_cap": 100.0, "mode": "soft", "priority": "normal",
            "timeslice_us": 1, "share_measured": 100.0, "share_of_busy": 100.0, "runnable": true,
            "engine_ns": 1, "engines": { "copy_ns": 0, "compute_ns": 0, "host_ns": 0 },
            "wait_ns": 0, "gated_ns": 0, "gate_closings": 0, "gate_cost_ns": 0, "submissions": 0,
            "throttled": 0, "polled_doorbells": 0, "wakeups": 0, "preemptions": 0,
            "slice_overruns": 0, "overrun_ns": 0, "stolen_ns": 0, "faults": 0, "hang_resets": 0,
            "channels": 0, "imported_bytes": 0,
            "limits": {
                "channels": 32, "imported_bytes": 1, "submissions_per_second": null,
                "refresh_per_second": 60, "hang_timeout_ms": 60_000, "acquire_timeout_ms": null,
            },
            "traps": {
                "config": 0, "display": 0, "control": 0, "mailbox": 0, "doorbell": 0, "memory": 0,
            },
            "pid": 4711, "vm_pid": null,
            "programs": { "vram_used_bytes": 0, "processes": vec![process; 99] },
        });
        let mut stats: StatsModel =
            serde_json::from_value(json!({ "vgpus": [vgpu], "parents": [] })).unwrap();
        stats.vgpus[0].wait_p50_us = Some(20_000);
        stats.vgpus[0].wait_p99_us = Some(99_000);
        let has_waits = |text: &str| text.contains("20.0/99.0 ms");
        let narrow = text(&stats, Format::Narrow);
        for line in narrow.lines() {
            assert!(line.chars().count() <= NARROW, "{} columns: {line}", line.chars().count());
        }
        assert!(!has_waits(&narrow), "{narrow}");
        let most = text(&stats, Format::Wide);
        assert!(most.lines().any(|line| line.contains("OF BUSY")) && has_waits(&most), "{most}");
        stats.vgpus[0].name = Some("web1".into());
        let narrow = text(&stats, Format::Narrow);
        assert!(has_waits(&narrow) && narrow.contains(" WAIT "), "there is room: {narrow}");
    }
}
