//! Counters of vGPUs without their waits, which have a request of their own: with them, the
//! counters of many vGPUs would not fit into a packet.

use mdev_core::gpu::{Usage, UsageReport, Waits};
use mdev_core::ids::VgpuId;
use serde::{Deserialize, Serialize};

/// Encoding of a [`Usage`] without its waits.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Usage")]
struct Fields {
    engine_ns: u64,
    copy_ns: u64,
    compute_ns: u64,
    wait_ns: u64,
    gated_ns: u64,
    gate_closings: u64,
    gate_cost_ns: u64,
    submissions: u64,
    polled_doorbells: u64,
    wakeups: u64,
    preemptions: u64,
    slice_overruns: u64,
    overrun_ns: u64,
    stolen_ns: u64,
    faults: u64,
    hang_resets: u64,
    throttled: u64,
    runnable: bool,
    imported_bytes: u64,
    channels: u32,
    /// Emulated channels are one group.
    #[serde(skip)]
    busy_groups: u32,
    #[serde(skip)]
    waits: Waits,
}

/// Counters of a vGPU. Their waits are not transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WithoutWaits(#[serde(with = "Fields")] pub Usage);

/// Counters of all vGPUs. Their waits are not transferred.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageReportOnWire {
    now_ns: u64,
    vgpus: Vec<(VgpuId, WithoutWaits)>,
}

impl From<UsageReport> for UsageReportOnWire {
    fn from(report: UsageReport) -> Self {
        let vgpus = report.vgpus.into_iter().map(|(id, usage)| (id, WithoutWaits(usage)));
        Self { now_ns: report.now_ns, vgpus: vgpus.collect() }
    }
}

impl From<UsageReportOnWire> for UsageReport {
    fn from(report: UsageReportOnWire) -> Self {
        let vgpus = report.vgpus.into_iter().map(|(id, WithoutWaits(usage))| (id, usage));
        Self { now_ns: report.now_ns, vgpus: vgpus.collect() }
    }
}
