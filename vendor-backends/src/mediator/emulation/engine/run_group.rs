//! One run of a group on the engine, and its accounting.

use std::sync::atomic::Ordering;

use super::engine_loop::EngineLoop;
use super::sleep::SEMAPHORE_POLL_MIN_NS;
use crate::mediator::context_process::turns::OwnTurn;
use crate::mediator::emulation::clock::now_ns;
use crate::mediator::emulation::counters::Counters;
use crate::mediator::hardware::Pace;

impl EngineLoop {
    /// Runs group `index` for at most `budget` nanoseconds from `start`, the current time. Charges
    /// the time since the last run that was charged to no group. A context runs in a `turn`.
    /// Returns the end of the run.
    pub fn run_group(
        &mut self,
        index: usize,
        budget: u64,
        start: u64,
        turn: Option<&OwnTurn>,
    ) -> u64 {
        let since = self.busy.run_from(start);
        if let Some(before) = self.running.replace(index).filter(|before| *before != index)
            && self.groups[before].waiting_since.is_some()
        {
            let counters = self.groups[before].vgpu.counters();
            counters.preemptions.fetch_add(1, Ordering::Relaxed);
        }
        self.give_engine(index, start);
        let group = &mut self.groups[index];
        if let Some(since) = group.waiting_since {
            let waited = start.saturating_sub(since);
            group.vgpu.counters().wait_ns.fetch_add(waited, Ordering::Relaxed);
        }
        let Pace { preemption_latency_ns, max_run_ns, .. } = self.pace;
        let limit = start + budget.min(max_run_ns);
        let limit = turn.map_or(limit, |turn| limit.min(turn.end_ns));
        let engine_time = group.vgpu.run(since, start, limit, turn);
        let end = now_ns();
        group.waiting_since = Some(end);
        group.wait_start = Some(end);
        self.busy.end_run(end);
        let (mut used, mut slept_ns) = (end - since, 0);
        let vgpu = &self.groups[index].vgpu;
        let counters = vgpu.counters();
        let late = end.saturating_sub(limit) + (start - since);
        if late > preemption_latency_ns {
            let time = self.stolen.read(end);
            let stolen = time.stolen_ns.min(late);
            used -= stolen;
            Counters::add(&counters.stolen_ns, stolen);
            slept_ns = time.slept_ns;
        }
        if turn.is_some() {
            // A context that slept longer than its turn has not held the engine.
            used = used.min(limit.saturating_sub(since) + preemption_latency_ns);
        }
        Counters::add(&counters.engine_ns, used);
        let engine_time = engine_time.until(since + used);
        Counters::add(&counters.copy_ns, engine_time.copy_ns);
        Counters::add(&counters.compute_ns, engine_time.compute_ns);
        let overrun = (since + used).saturating_sub(limit);
        if overrun > preemption_latency_ns {
            Counters::add(&counters.slice_overruns, 1);
            Counters::add(&counters.overrun_ns, overrun);
        }
        if let Some(closed) = vgpu.gate_closed_ns() {
            Counters::add(&counters.gate_cost_ns, end.saturating_sub(closed).min(used));
        } else if self.runlist.entry(index).has_budget() {
            Counters::add(&counters.gate_cost_ns, (since + used).saturating_sub(start + budget));
        }
        if overrun > self.grace_ns {
            vgpu.fail_running(overrun);
        }
        self.runlist.charge(index, used);
        self.pause(index, slept_ns, end);
        self.idle_since = None;
        self.semaphore_poll_ns = SEMAPHORE_POLL_MIN_NS;
        if let Some(slept_ns) = self.woken_after_ns.take() {
            self.adapt_spin(slept_ns);
        }
        if let Some(turns) = &self.turns {
            turns.count(&self.groups[index].vgpu.usage());
        }
        end
    }

    /// Gives the engine to group `index`, which ends its wait, unless the group has the engine.
    fn give_engine(&mut self, index: usize, now: u64) {
        if self.groups[index].has_engine {
            return;
        }
        self.groups.iter_mut().for_each(|group| group.has_engine = false);
        let group = &mut self.groups[index];
        group.has_engine = true;
        if let Some(since) = group.wait_start {
            group.vgpu.counters().waits.record(now.saturating_sub(since));
        }
    }
}
