//! What every vGPU was given and used, as far as the manager knows it.

use std::path::PathBuf;

use mdev_core::gpu::Usage;
use mdev_core::sched::Core;

use super::requests::state;
use super::tick::Shares;
use super::vgpu::Vgpu;
use super::{Manager, scheduler};
use crate::api::model::{EngineTimes, Limits, ParentStats, VgpuStats};
use crate::private::Traps;
use crate::spawn::Process;

/// A vGPU's statistics as the manager knows them, and where its worker can be asked for the rest.
#[derive(Clone, Debug)]
pub struct Measured {
    /// What the manager knows.
    pub stats: VgpuStats,
    /// The worker's socket, while there is a worker.
    pub control: Option<PathBuf>,
}

impl Manager {
    /// Reads the counters now, and says what they mean.
    pub fn stats(&mut self) -> (Vec<Measured>, Vec<ParentStats>) {
        self.read_counters_if_old();
        let parents = self.parents.iter().map(|parent| {
            let total = parent.shares.total();
            ParentStats {
                parent: parent.name().to_owned(),
                window_ms: total.window_ns / 1_000_000,
                busy: percent(total.engine_ns, total.window_ns),
                policy: parent.shares.policy_name(),
                ready: parent.is_ready(),
                vram_bytes: parent.partitions.total(),
                vram_free_bytes: parent.partitions.free(),
            }
        });
        let parents = parents.collect();
        let vgpus = self.vgpus.values().filter_map(|vgpu| {
            let shares = &self.parents[self.parent_index(&vgpu.parent).ok()?].shares;
            let control = vgpu.control(&self.folders);
            Some(Measured { stats: vgpu_stats(vgpu, shares), control })
        });
        (vgpus.collect(), parents)
    }
}

fn vgpu_stats(vgpu: &Vgpu, shares: &Shares) -> VgpuStats {
    let measured = shares.measured(vgpu.id);
    let snapshot = shares.scheduler.snapshot(vgpu.id);
    let share = vgpu.settings.share;
    let usage = shares.usage(vgpu.id);
    let host_ns = usage.host_ns();
    // Every counter by its name: one that is new and not told of does not build.
    let Usage {
        engine_ns,
        copy_ns,
        compute_ns,
        wait_ns,
        gated_ns,
        gate_closings,
        gate_cost_ns,
        submissions,
        polled_doorbells,
        wakeups,
        preemptions,
        slice_overruns,
        overrun_ns,
        stolen_ns,
        faults,
        hang_resets,
        throttled,
        runnable,
        imported_bytes,
        channels,
    } = usage;
    VgpuStats {
        uuid: vgpu.id,
        parent: vgpu.parent.clone(),
        mdev_type: vgpu.profile.name.clone(),
        state: state(vgpu),
        vram_bytes: vgpu.profile.vram_bytes,
        share_asked: share.core.map(Core::get),
        share_entitled: snapshot.map_or(0.0, |one| one.entitled * 100.0),
        share_cap: snapshot.map_or(0.0, |one| one.cap * 100.0),
        mode: share.mode.to_string(),
        priority: share.priority.to_string(),
        timeslice_us: snapshot.map_or(0, |one| scheduler::micros(one.slice)),
        share_measured: percent(measured.engine_ns, measured.window_ns),
        share_of_busy: percent(measured.engine_ns, shares.total().engine_ns),
        runnable,
        engine_ns,
        engines: EngineTimes { copy_ns, compute_ns, host_ns },
        wait_ns,
        gated_ns,
        gate_closings,
        gate_cost_ns,
        submissions,
        throttled,
        polled_doorbells,
        wakeups,
        preemptions,
        slice_overruns,
        overrun_ns,
        stolen_ns,
        faults,
        hang_resets,
        channels,
        imported_bytes,
        limits: limits(vgpu),
        traps: Traps::default(),
        pid: vgpu.process.as_ref().map(Process::pid),
        vm_pid: None,
    }
}

/// The limits in force.
fn limits(vgpu: &Vgpu) -> Limits {
    let (profile, quotas) = (&vgpu.profile, vgpu.settings.quotas);
    let ms = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Limits {
        channels: quotas.max_channels.unwrap_or(u32::MAX).min(profile.max_channels),
        imported_bytes: quotas.max_pinned.unwrap_or(u64::MAX).min(profile.max_import_bytes),
        submissions_per_second: quotas.submissions.map(Into::into),
        refresh_per_second: profile.head.map(|_| quotas.refresh.into()),
        hang_timeout_ms: quotas.hang_timeout.or(profile.hang_timeout).map(ms),
        acquire_timeout_ms: quotas.acquire_timeout.map(ms),
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}
