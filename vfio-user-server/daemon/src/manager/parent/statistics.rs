//! Usage and limits of a parent and its vGPUs, as the manager knows them.

use std::time::Duration;

use mdev_core::gpu::Usage;
use mdev_core::sched::Core;

use super::Parent;
use super::scheduling::micros;
use crate::manager::vgpu::Vgpu;
use vgpud_api::Traps;
use vgpud_api::{EngineTimes, Limits, ParentStats, VgpuStats};

impl Parent {
    /// Returns the parent's statistics. The usage counters are read before, unless the last reading
    /// is recent.
    pub fn statistics(&mut self) -> ParentStats {
        self.read_if_stale();
        let total = self.scheduling.measured_total();
        ParentStats {
            parent: self.name().to_owned(),
            window_ms: total.window_ns / 1_000_000,
            busy: percent(total.engine_ns, total.window_ns),
            policy: self.scheduling.policy_name(),
            ready: self.is_ready(),
            vram_bytes: self.partitions.total(),
            vram_free_bytes: self.partitions.free(),
        }
    }

    /// Returns a vGPU's statistics as of the last reading.
    pub fn vgpu_statistics(&self, vgpu: &Vgpu) -> VgpuStats {
        let scheduling = &self.scheduling;
        let measured = scheduling.measured(vgpu.id);
        let snapshot = scheduling.snapshot(vgpu.id);
        let share = vgpu.settings.share;
        let usage = scheduling.usage(vgpu.id);
        let host_ns = usage.host_ns();
        // An exhaustive pattern: a new counter that is not reported does not compile.
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
            busy_groups: _,
            // Counts since the start; `wait_times` are of the last interval.
            waits: _,
        } = usage;
        let wait_times = scheduling.waits(vgpu.id);
        VgpuStats {
            uuid: vgpu.id,
            name: vgpu.name().map(String::from),
            parent: vgpu.parent.clone(),
            mdev_type: vgpu.profile.name.clone(),
            state: vgpu.state().reported(),
            vram_bytes: vgpu.profile.vram_bytes,
            share_asked: share.core.map(Core::get),
            share_entitled: snapshot.map_or(0.0, |one| one.entitled * 100.0),
            share_cap: snapshot.map_or(0.0, |one| one.cap * 100.0),
            mode: share.mode.to_string(),
            priority: share.priority.to_string(),
            timeslice_us: snapshot.map_or(0, |one| micros(one.slice)),
            share_measured: percent(measured.engine_ns, measured.window_ns),
            share_of_busy: percent(measured.engine_ns, scheduling.measured_total().engine_ns),
            runnable,
            engine_ns,
            engines: EngineTimes { copy_ns, compute_ns, host_ns },
            wait_ns,
            waits: wait_times.map_or(0, |times| times.count),
            wait_p50_us: wait_times.map(|times| times.p50_ns.div_ceil(1000)),
            wait_p99_us: wait_times.map(|times| times.p99_ns.div_ceil(1000)),
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
            pid: vgpu.pid(),
            vm_pid: None,
            vm_name: None,
            programs: None,
        }
    }
}

/// Returns the limits in force.
fn limits(vgpu: &Vgpu) -> Limits {
    let (profile, quotas) = (&vgpu.profile, vgpu.settings.quotas);
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
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
