//! `/metrics`: the statistics in Prometheus' text format, version 0.0.4.
//!
//! Each metric is one row: name, help, and value in base units (seconds, bytes, ratios). Names
//! follow Prometheus' conventions: counters end in `_total`, and the unit is part of the name.

use foreign_fds::Backlog;
use prometheus::core::Collector;
use prometheus::{CounterVec, Encoder, GaugeVec, Opts, Registry, TextEncoder};

use vgpud_api::{ParentStats, Stats, Version, VgpuState, VgpuStats};

/// Content type of [`text`].
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// Metric of `T`: name, help and value.
type Row<T> = (&'static str, &'static str, fn(&T) -> f64);

const NS: f64 = 1e-9;

const DESCRIPTOR_GAUGES: &[Row<Backlog>] = &[
    (
        "tessera_lost_threads",
        "Threads of vgpud that wait for descriptors of other processes to be closed; at 16, vgpud takes no more files of workers.",
        |backlog| backlog.lost_threads as f64,
    ),
    (
        "tessera_unclosed_messages",
        "Messages of other processes for whose descriptors vgpud has no thread left to close them.",
        |backlog| backlog.waiting as f64,
    ),
];

const PARENT_GAUGES: &[Row<ParentStats>] = &[
    ("tessera_parent_up", "Whether the physical GPU accepts vGPUs: 1, or 0 if it is lost.", |p| {
        f64::from(u8::from(p.ready))
    }),
    (
        "tessera_parent_engine_busy_ratio",
        "Part of the last second or so in which the physical GPU's engine was busy, 0 to 1.",
        |p| p.busy / 100.0,
    ),
    (
        "tessera_parent_video_memory_bytes",
        "Video memory of the physical GPU that vGPUs can have in total.",
        |p| p.vram_bytes as f64,
    ),
    (
        "tessera_parent_video_memory_free_bytes",
        "Video memory of the physical GPU that no running vGPU occupies.",
        |p| p.vram_free_bytes as f64,
    ),
];

const VGPU_GAUGES: &[Row<VgpuStats>] = &[
    (
        "tessera_vgpu_running",
        "Whether the vGPU serves a VM or waits for one: 1, or 0 while it restarts or has failed.",
        |v| f64::from(u8::from(v.state == VgpuState::Running)),
    ),
    ("tessera_vgpu_attached", "Whether a VM is attached to the vGPU: 1 or 0.", |v| {
        f64::from(u8::from(v.vm_pid.is_some()))
    }),
    ("tessera_vgpu_processes", "Processes of CUDA programs that use the vGPU.", |v| {
        v.programs.as_ref().map_or(0.0, |programs| programs.processes.len() as f64)
    }),
    ("tessera_vgpu_runnable", "Whether the vGPU has unfinished work: 1 or 0.", |v| {
        f64::from(u8::from(v.runnable))
    }),
    (
        "tessera_vgpu_share_ratio",
        "Part of the physical GPU's engine time that the vGPU used in the last second or so, 0 to 1.",
        |v| v.share_measured / 100.0,
    ),
    (
        "tessera_vgpu_share_entitled_ratio",
        "Part of the physical GPU's engine time that the vGPU gets while all vGPUs are busy, 0 to 1.",
        |v| v.share_entitled / 100.0,
    ),
    (
        "tessera_vgpu_share_cap_ratio",
        "Upper limit of the part of the physical GPU's engine time that the vGPU can use, 0 to 1.",
        |v| v.share_cap / 100.0,
    ),
    (
        "tessera_vgpu_timeslice_seconds",
        "Time that the vGPU runs on the engine before another vGPU with work does.",
        |v| v.timeslice_us as f64 * 1e-6,
    ),
    ("tessera_vgpu_video_memory_bytes", "Video memory that the vGPU has, by its type.", |v| {
        v.vram_bytes as f64
    }),
    (
        "tessera_vgpu_imported_memory_bytes",
        "Guest memory that the VM's driver has imported into the vGPU's address spaces.",
        |v| v.imported_bytes as f64,
    ),
    (
        "tessera_vgpu_imported_memory_limit_bytes",
        "Limit of tessera_vgpu_imported_memory_bytes of the vGPU.",
        |v| v.limits.imported_bytes as f64,
    ),
    ("tessera_vgpu_channels", "Hardware channels that the vGPU has.", |v| f64::from(v.channels)),
    ("tessera_vgpu_channels_limit", "Limit of tessera_vgpu_channels of the vGPU.", |v| {
        f64::from(v.limits.channels)
    }),
];

const VGPU_COUNTERS: &[Row<VgpuStats>] = &[
    (
        "tessera_vgpu_wait_seconds_total",
        "Time in which the vGPU had work and waited for the engine.",
        |v| v.wait_ns as f64 * NS,
    ),
    (
        "tessera_vgpu_gated_seconds_total",
        "Part of tessera_vgpu_wait_seconds_total in which the vGPU had used up its cap.",
        |v| v.gated_ns as f64 * NS,
    ),
    (
        "tessera_vgpu_gate_closings_total",
        "Number of times that the vGPU was stopped because it had used up its cap.",
        |v| v.gate_closings as f64,
    ),
    (
        "tessera_vgpu_gate_cost_seconds_total",
        "Engine time that the vGPU used beyond its cap, until it released the engine.",
        |v| v.gate_cost_ns as f64 * NS,
    ),
    (
        "tessera_vgpu_submissions_total",
        "Submissions (GPFIFO entries) of the vGPU that the engine has executed.",
        |v| v.submissions as f64,
    ),
    (
        "tessera_vgpu_throttled_submissions_total",
        "Submissions of the vGPU that its limit of submissions per second delayed.",
        |v| v.throttled as f64,
    ),
    (
        "tessera_vgpu_polled_doorbells_total",
        "Doorbells of the vGPU that were found by polling, without an exit of the VM.",
        |v| v.polled_doorbells as f64,
    ),
    (
        "tessera_vgpu_wakeups_total",
        "Doorbells of the vGPU that woke a sleeping engine by a trapped write of the VM.",
        |v| v.wakeups as f64,
    ),
    (
        "tessera_vgpu_preemptions_total",
        "Number of times that the engine switched from the vGPU to another one with work left.",
        |v| v.preemptions as f64,
    ),
    (
        "tessera_vgpu_slice_overruns_total",
        "Time slices of the vGPU that ended late, because its work could not be interrupted.",
        |v| v.slice_overruns as f64,
    ),
    (
        "tessera_vgpu_overrun_seconds_total",
        "Engine time that the vGPU used after the ends of its time slices.",
        |v| v.overrun_ns as f64 * NS,
    ),
    (
        "tessera_vgpu_stolen_seconds_total",
        "Part of the vGPU's time slices in which the host ran other work; no vGPU is charged for it.",
        |v| v.stolen_ns as f64 * NS,
    ),
    (
        "tessera_vgpu_faults_total",
        "Channels of the vGPU that ended with an error, hangs included.",
        |v| v.faults as f64,
    ),
    (
        "tessera_vgpu_hang_resets_total",
        "Channels of the vGPU that were reset because their work did not end in time.",
        |v| v.hang_resets as f64,
    ),
];

/// Engine time by the label `engine`; the sum is the total engine time.
const ENGINE: &str = "tessera_vgpu_engine_seconds_total";

/// Trapped accesses by the label `kind`.
const TRAPS: &str = "tessera_vgpu_traps_total";

/// Waits of the last one to two seconds by the label `quantile`. OpenMetrics would take the name
/// `tessera_vgpu_wait_seconds` for that of the counter of the total time.
const WAITS: &str = "tessera_vgpu_wait_quantile_seconds";

/// Video memory in use, of vGPUs that CUDA programs use, and of each process.
const USED: &str = "tessera_vgpu_video_memory_used_bytes";
const USED_BY_PROCESS: &str = "tessera_vgpu_process_video_memory_bytes";

/// Returns the statistics in Prometheus' text format.
pub fn text(stats: &Stats, version: &Version) -> prometheus::Result<String> {
    let registry = Registry::new();
    let build = gauge(
        "tessera_build_info",
        "Version of vgpud, as a label; the value is always 1.",
        &["version"],
    )?;
    build.with_label_values(&[&version.version]).set(1.0);
    add(&registry, build)?;
    let backlog = foreign_fds::backlog();
    for (name, help, value) in DESCRIPTOR_GAUGES {
        let family = gauge(name, help, &[])?;
        family.with_label_values::<&str>(&[]).set(value(&backlog));
        add(&registry, family)?;
    }
    for (name, help, value) in PARENT_GAUGES {
        let family = gauge(name, help, &["parent"])?;
        for parent in &stats.parents {
            family.with_label_values(&[&parent.parent]).set(value(parent));
        }
        add(&registry, family)?;
    }
    vgpus(&registry, &stats.vgpus)?;
    let mut text = Vec::new();
    TextEncoder::new().encode(&registry.gather(), &mut text)?;
    // The encoder writes UTF-8.
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn vgpus(registry: &Registry, vgpus: &[VgpuStats]) -> prometheus::Result<()> {
    let names: Vec<_> = vgpus.iter().map(|vgpu| vgpu.uuid.to_string()).collect();
    let all = || names.iter().zip(vgpus);
    let info = gauge(
        "tessera_vgpu_info",
        "Name of the vGPU, its physical GPU (parent), its type and its VM, as labels; the value is always 1.",
        &["vgpu", "name", "parent", "type", "vm"],
    )?;
    let asked = gauge(
        "tessera_vgpu_share_asked_ratio",
        "Part of the physical GPU's engine time that the vGPU's attribute core requests, 0 to 1.",
        &["vgpu"],
    )?;
    let traps = counter(
        TRAPS,
        "Accesses of the VM to the vGPU that left the VM, by kind of register or memory.",
        &["vgpu", "kind"],
    )?;
    let engine = counter(
        ENGINE,
        "Engine time that the vGPU used, by engine; the sum is its whole engine time.",
        &["vgpu", "engine"],
    )?;
    let waits = gauge(
        WAITS,
        "Time that work of the vGPU waited for the engine before it ran in the last one to two seconds; absent without a wait.",
        &["vgpu", "quantile"],
    )?;
    for (name, vgpu) in all() {
        for (quantile, us) in [("0.5", vgpu.wait_p50_us), ("0.99", vgpu.wait_p99_us)] {
            if let Some(us) = us {
                waits.with_label_values(&[name.as_str(), quantile]).set(us as f64 * 1e-6);
            }
        }
        let times = vgpu.engines;
        for (kind, ns) in
            [("copy", times.copy_ns), ("compute", times.compute_ns), ("host", times.host_ns)]
        {
            engine.with_label_values(&[name.as_str(), kind]).inc_by(ns as f64 * NS);
        }
        let [own, vm] = [&vgpu.name, &vgpu.vm_name].map(|name| name.as_deref().unwrap_or_default());
        info.with_label_values(&[name.as_str(), own, &vgpu.parent, &vgpu.mdev_type, vm]).set(1.0);
        if let Some(core) = vgpu.share_asked {
            asked.with_label_values(&[name]).set(f64::from(core) / 100.0);
        }
        let kinds = vgpu.traps;
        for (kind, count) in [
            ("config", kinds.config),
            ("display", kinds.display),
            ("control", kinds.control),
            ("mailbox", kinds.mailbox),
            ("doorbell", kinds.doorbell),
            ("memory", kinds.memory),
        ] {
            traps.with_label_values(&[name.as_str(), kind]).inc_by(count as f64);
        }
    }
    programs(registry, vgpus)?;
    add(registry, info)?;
    add(registry, asked)?;
    add(registry, traps)?;
    add(registry, engine)?;
    add(registry, waits)?;
    for (metric, help, value) in VGPU_GAUGES {
        let family = gauge(metric, help, &["vgpu"])?;
        all().for_each(|(name, vgpu)| family.with_label_values(&[name]).set(value(vgpu)));
        add(registry, family)?;
    }
    for (metric, help, value) in VGPU_COUNTERS {
        let family = counter(metric, help, &["vgpu"])?;
        all().for_each(|(name, vgpu)| family.with_label_values(&[name]).inc_by(value(vgpu)));
        add(registry, family)?;
    }
    Ok(())
}

/// Adds the memory of CUDA programs.
fn programs(registry: &Registry, vgpus: &[VgpuStats]) -> prometheus::Result<()> {
    let used =
        gauge(USED, "Video memory of the vGPU that CUDA programs have allocated.", &["vgpu"])?;
    let help = "Video memory of the vGPU that a process of a CUDA program can use; shared memory counts for each process.";
    let by_process = gauge(USED_BY_PROCESS, help, &["vgpu", "process", "name"])?;
    for vgpu in vgpus {
        let Some(programs) = &vgpu.programs else { continue };
        let name = vgpu.uuid.to_string();
        used.with_label_values(&[&name]).set(programs.vram_used_bytes as f64);
        for process in &programs.processes {
            let labels = [name.as_str(), &process.pid.to_string(), &process.name];
            by_process.with_label_values(&labels).set(process.vram_used_bytes as f64);
        }
    }
    add(registry, used)?;
    add(registry, by_process)
}

fn gauge(name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
    GaugeVec::new(Opts::new(name, help), labels)
}

fn counter(name: &str, help: &str, labels: &[&str]) -> prometheus::Result<CounterVec> {
    CounterVec::new(Opts::new(name, help), labels)
}

fn add(registry: &Registry, family: impl Collector + 'static) -> prometheus::Result<()> {
    registry.register(Box::new(family))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use serde_json::json;

    use super::*;

    /// A graph or an alert shows the help without the other metrics and without this project's
    /// documents.
    #[test]
    fn every_help_stands_alone() {
        let parents = PARENT_GAUGES.iter().map(|row| (row.0, row.1));
        let vgpus = VGPU_GAUGES.iter().chain(VGPU_COUNTERS).map(|row| (row.0, row.1));
        let mut seen = BTreeSet::new();
        for (name, help) in parents.chain(vgpus) {
            let subject = if name.starts_with("tessera_vgpu_") { "vGPU" } else { "physical GPU" };
            assert!(help.contains(subject), "{name} does not name its {subject}: {help}");
            assert!(help.split_whitespace().count() >= 6, "{name}: {help}");
            assert!(seen.insert(help), "{name} has the help of another metric: {help}");
        }
        assert!(seen.len() > 25);
    }

    /// Statistics of a parent and of a vGPU that a program uses, and whose work has waited.
    fn stats() -> Stats {
        let process = json!({ "pid": 7, "name": "python3", "vram_used_bytes": 1 });
        let vgpu = json!({
            "uuid": "11111111-1111-4111-8111-111111111111", "parent": "soft0",
            "mdev_type": "SOFT-1Q", "state": "running", "vram_bytes": 1, "share_asked": 80,
            "share_entitled": 80.0, "share_cap": 100.0, "mode": "soft", "priority": "normal",
            "timeslice_us": 1, "share_measured": 79.0, "share_of_busy": 79.0, "runnable": true,
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
            "programs": { "vram_used_bytes": 1, "processes": [process] },
        });
        let parent = json!({
            "parent": "soft0", "window_ms": 1000, "busy": 99.0, "policy": "weighted",
            "ready": true, "vram_bytes": 1, "vram_free_bytes": 1,
        });
        let mut stats: Stats =
            serde_json::from_value(json!({ "vgpus": [vgpu], "parents": [parent] })).unwrap();
        (stats.vgpus[0].wait_p50_us, stats.vgpus[0].wait_p99_us) = (Some(2000), Some(5000));
        stats
    }

    fn version() -> Version {
        let version = json!({
            "version": "0.1.0", "api": "1", "pid": 1, "run_dir": "/run", "config_dir": "/var",
        });
        serde_json::from_value(version).unwrap()
    }

    #[test]
    fn waits_have_samples_while_there_are_any() {
        let mut stats = stats();
        let samples = |stats: &Stats| -> Vec<String> {
            let text = text(stats, &version()).unwrap();
            text.lines().filter(|line| line.starts_with(WAITS)).map(String::from).collect()
        };
        let vgpu = stats.vgpus[0].uuid;
        let expected = [("0.5", "0.002"), ("0.99", "0.005")].map(|(quantile, value)| {
            format!("{WAITS}{{quantile=\"{quantile}\",vgpu=\"{vgpu}\"}} {value}")
        });
        assert_eq!(samples(&stats), expected);
        (stats.vgpus[0].wait_p50_us, stats.vgpus[0].wait_p99_us) = (None, None);
        assert!(samples(&stats).is_empty());
    }

    #[test]
    fn dashboard_and_alerts_name_metrics_that_exist() {
        let text = text(&stats(), &version()).unwrap();
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let exported: BTreeSet<_> = types.filter_map(|line| line.split(' ').next()).collect();
        let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
        for (file, least) in [("grafana/tessera.json", 15), ("prometheus/tessera-rules.yml", 7)] {
            let content = std::fs::read_to_string(packaging.join(file)).unwrap();
            let words = content.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let named: BTreeSet<_> = words.filter(|word| word.starts_with("tessera_")).collect();
            assert!(named.len() >= least, "{file} names {named:?}");
            let unknown: Vec<_> = named.difference(&exported).collect();
            assert!(unknown.is_empty(), "{file} names {unknown:?}, which vgpud does not export");
        }
    }
}
