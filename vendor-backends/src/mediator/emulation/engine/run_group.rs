//! One run of a group on the engine, and its accounting.

use std::sync::atomic::Ordering;

use super::engine_loop::EngineLoop;
use super::sleep::SEMAPHORE_POLL_MIN_NS;
use crate::mediator::emulation::clock::now_ns;
use crate::mediator::emulation::counters::Counters;
use crate::mediator::hardware::Pace;

impl EngineLoop {
    /// Runs group `index` for at most `budget` nanoseconds and charges the time.
    pub fn run_group(&mut self, index: usize, budget: u64) {
        let start = now_ns();
        if let Some(before) = self.running.replace(index).filter(|before| *before != index)
            && self.groups[before].waiting_since.is_some()
        {
            let counters = self.groups[before].vgpu.counters();
            counters.preemptions.fetch_add(1, Ordering::Relaxed);
        }
        let group = &mut self.groups[index];
        if let Some(since) = group.waiting_since {
            let waited = start.saturating_sub(since);
            group.vgpu.counters().wait_ns.fetch_add(waited, Ordering::Relaxed);
        }
        let Pace { preemption_latency_ns, max_run_ns, .. } = self.pace;
        let limit = start + budget.min(max_run_ns);
        let engine_time = group.vgpu.run(start, limit);
        let end = now_ns();
        group.waiting_since = Some(end);
        let mut used = end - start;
        let vgpu = &self.groups[index].vgpu;
        let counters = vgpu.counters();
        if end > limit + preemption_latency_ns {
            let stolen = self.stolen.read(end).min(end - limit);
            used -= stolen;
            Counters::add(&counters.stolen_ns, stolen);
        }
        Counters::add(&counters.engine_ns, used);
        let engine_time = engine_time.until(start + used);
        Counters::add(&counters.copy_ns, engine_time.copy_ns);
        Counters::add(&counters.compute_ns, engine_time.compute_ns);
        let overrun = used.saturating_sub(budget.min(max_run_ns));
        if overrun > preemption_latency_ns {
            Counters::add(&counters.slice_overruns, 1);
            Counters::add(&counters.overrun_ns, overrun);
        }
        if let Some(closed) = vgpu.gate_closed_ns() {
            Counters::add(&counters.gate_cost_ns, end.saturating_sub(closed).min(used));
        } else if self.runlist.entry(index).has_budget() {
            Counters::add(&counters.gate_cost_ns, used.saturating_sub(budget));
        }
        if overrun > self.grace_ns {
            vgpu.fail_running(overrun);
        }
        self.runlist.charge(index, used);
        self.idle_since = None;
        self.semaphore_poll_ns = SEMAPHORE_POLL_MIN_NS;
    }
}
