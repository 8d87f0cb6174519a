//! Simulation of the scheduler and a runlist in simulated time, without a GPU.
//!
//! The simulated runlist takes the same actions and returns the same counters as a GPU.
//!
//! * [`workload`]: work of a simulated vGPU
//! * [`histogram`]: distribution of waits for the engine
//! * `vgpu`: simulated vGPU

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use super::policy::{Config, GpuFeatures};
use super::scheduler::{Action, Event, Scheduler, ShareError};
use super::share::ShareRequest;
use crate::gpu::UsageReport;
use crate::ids::VgpuId;

pub mod histogram;
#[cfg(test)]
mod tests;
mod vgpu;
pub mod workload;

pub use histogram::Histogram;
use vgpu::SimulatedVgpu;
pub use workload::Workload;

/// Maximum number of instances of the simulated vGPU type, for fixed shares.
pub const MAX_INSTANCES: u32 = 8;

/// Time in which an NVIDIA driver sets one slice, in nanoseconds.
const NVIDIA_CHANGE_NS: u64 = 1_200_000;
/// Time after its work for which a vGPU of an NVIDIA GPU counts as runnable, in nanoseconds.
const NVIDIA_LINGER_NS: u64 = 20_000_000;

/// Fault that replaces the true counters of a report.
pub type CounterFault = fn(&mut UsageReport);

/// One parent: a scheduler and the runlist that it controls.
#[derive(Clone, Debug)]
pub struct Simulation {
    scheduler: Scheduler,
    vgpus: Vec<SimulatedVgpu>,
    /// Positions in `vgpus`.
    index_by_id: BTreeMap<VgpuId, usize>,
    /// Runnable vGPUs in the order of rotation.
    runlist: VecDeque<usize>,
    /// Times at which vGPUs off the runlist may become runnable.
    wakeups: BinaryHeap<Reverse<(u64, usize)>>,
    now_ns: u64,
    /// Cost of a switch between two vGPUs, in nanoseconds.
    switch_ns: u64,
    /// vGPU that ran last.
    running: Option<VgpuId>,
    /// Number of vGPUs that counted as runnable at the last report.
    runnable: usize,
    /// Runlist and counters are as on an NVIDIA GPU.
    nvidia: bool,
    /// Until this time, the runlist starts from its first vGPU after each turn.
    restarts_until_ns: u64,
    /// Delay of reports after the scheduler's deadline.
    report_delay_ns: u64,
    counter_fault: Option<CounterFault>,
    reports: u64,
    actions: u64,
}

impl Simulation {
    /// Creates a parent without vGPUs.
    pub fn new(config: Config, gpu: impl Into<GpuFeatures>, switch_ns: u64) -> Self {
        Self {
            scheduler: Scheduler::new(config, gpu, 0),
            vgpus: Vec::new(),
            index_by_id: BTreeMap::new(),
            runlist: VecDeque::new(),
            wakeups: BinaryHeap::new(),
            now_ns: 0,
            switch_ns,
            running: None,
            runnable: 0,
            nvidia: false,
            restarts_until_ns: 0,
            report_delay_ns: 0,
            counter_fault: None,
            reports: 0,
            actions: 0,
        }
    }

    /// Delays reports after the scheduler's deadline, as by a busy manager.
    pub fn set_report_delay(&mut self, delay: Duration) {
        self.report_delay_ns = delay.as_nanos() as u64;
    }

    /// Imitates an NVIDIA GPU and its driver, as measured on H100s: where a slice changes, the
    /// runlist starts from its first vGPU, and a vGPU counts as runnable for a while after its
    /// work. While others do, it is charged for the time in which it stays on the engine.
    pub fn imitate_nvidia(&mut self) {
        self.nvidia = true;
    }

    /// Falsifies the counters of all reports from now on.
    pub fn set_counter_fault(&mut self, fault: CounterFault) {
        self.counter_fault = Some(fault);
    }

    /// Returns the scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Returns the simulated time, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Returns the number of reports and the number of actions.
    pub fn effort(&self) -> (u64, u64) {
        (self.reports, self.actions)
    }

    /// Returns a vGPU's waits for the engine since [`Simulation::reset_waits`].
    pub fn waits(&self, id: VgpuId) -> Option<&Histogram> {
        self.index_by_id.get(&id).map(|index| &self.vgpus[*index].waits)
    }

    /// Clears the histograms of waits.
    pub fn reset_waits(&mut self) {
        for vgpu in &mut self.vgpus {
            vgpu.waits = Histogram::default();
        }
    }

    /// Starts a vGPU.
    pub fn start(
        &mut self,
        id: VgpuId,
        share: ShareRequest,
        workload: Workload,
    ) -> Result<(), ShareError> {
        let started = Event::VgpuStarted { id, share, max_instances: MAX_INSTANCES };
        let actions = self.scheduler.handle(started)?;
        self.index_by_id.insert(id, self.vgpus.len());
        self.vgpus.push(SimulatedVgpu::new(id, workload, self.now_ns));
        self.apply(actions);
        Ok(())
    }

    /// Stops a vGPU.
    pub fn stop(&mut self, id: VgpuId) -> Result<(), ShareError> {
        self.vgpus.retain(|vgpu| vgpu.id != id);
        self.index_by_id = self.vgpus.iter().enumerate().map(|(at, vgpu)| (vgpu.id, at)).collect();
        self.runlist.clear();
        self.wakeups.clear();
        for index in 0..self.vgpus.len() {
            self.vgpus[index].listed = false;
            self.enqueue(index);
        }
        self.event(Event::VgpuStopped { id })
    }

    /// Passes an event to the scheduler, and applies the scheduler's actions to the runlist.
    pub fn event(&mut self, event: Event<'_>) -> Result<(), ShareError> {
        let actions = self.scheduler.handle(event)?;
        self.apply(actions);
        Ok(())
    }

    /// Lets time pass, until the end of the slice that runs after `time`.
    pub fn run(&mut self, time: Duration) -> Result<(), ShareError> {
        let end_ns = self.now_ns.saturating_add(time.as_nanos() as u64);
        while self.now_ns < end_ns {
            let report_ns = self.scheduler.next_deadline().unwrap_or(u64::MAX);
            let report_ns = report_ns.saturating_add(self.report_delay_ns);
            self.step(end_ns.min(report_ns));
            if self.now_ns >= report_ns {
                self.reports += 1;
                let mut report = self.usage();
                self.runnable = 0;
                for (vgpu, (_, usage)) in self.vgpus.iter_mut().zip(&mut report.vgpus) {
                    vgpu.was_runnable = usage.runnable;
                    self.runnable += usize::from(usage.runnable);
                    usage.engine_ns += vgpu.stayed_ns;
                }
                if let Some(fault) = self.counter_fault {
                    fault(&mut report);
                }
                self.event(Event::UsageReport(&report))?;
            }
        }
        Ok(())
    }

    /// Lets time pass while the engine is stalled, as during a reset.
    pub fn stall(&mut self, time: Duration) {
        self.now_ns += time.as_nanos() as u64;
    }

    /// Returns the true counters.
    pub fn usage(&self) -> UsageReport {
        let linger_ns = if self.nvidia { NVIDIA_LINGER_NS } else { 0 };
        let vgpus = self.vgpus.iter().map(|vgpu| (vgpu.id, vgpu.usage(self.now_ns, linger_ns)));
        UsageReport { now_ns: self.now_ns, vgpus: vgpus.collect() }
    }

    /// Runs the next vGPU, or skips idle time until `end_ns` at most.
    fn step(&mut self, end_ns: u64) {
        self.wake();
        if let Some(index) = self.next() {
            let vgpu = &mut self.vgpus[index];
            vgpu.listed = false;
            // The gate may have closed since the vGPU was put on the runlist.
            if vgpu.runnable_at_ns(self.now_ns).is_some_and(|at_ns| at_ns <= self.now_ns) {
                // A vGPU that keeps the engine needs no switch.
                let switched = self.running.replace(vgpu.id) != Some(vgpu.id);
                self.now_ns += if switched { self.switch_ns } else { 0 };
                self.now_ns += vgpu.run(self.now_ns, switched);
                // vGPUs that got work meanwhile have their turn before this one.
                self.wake();
                let alone = self.runlist.is_empty();
                self.vgpus[index].end_turn(self.nvidia && alone);
            }
            self.enqueue(index);
        } else {
            let next_ns = self.wakeups.peek().map_or(u64::MAX, |Reverse((at_ns, _))| *at_ns);
            let next_ns = next_ns.min(end_ns).max(self.now_ns);
            self.stay(next_ns - self.now_ns);
            self.now_ns = next_ns;
        }
    }

    /// Charges idle time: a context without work stays on an NVIDIA GPU's engine, and what it
    /// needed is not known while others had work lately.
    fn stay(&mut self, idle_ns: u64) {
        let Some(index) = self.running.and_then(|id| self.index_by_id.get(&id)).copied() else {
            return;
        };
        let others = self.runnable - usize::from(self.vgpus[index].was_runnable);
        if self.nvidia && others > 0 {
            self.vgpus[index].stayed_ns += idle_ns;
        }
    }

    /// Takes the next vGPU off the runlist.
    fn next(&mut self) -> Option<usize> {
        if !self.nvidia {
            return self.runlist.pop_front();
        }
        // The order is that of the vGPUs, whenever they got work.
        let restarts = self.now_ns < self.restarts_until_ns;
        let last = self.running.filter(|_| !restarts).and_then(|id| self.index_by_id.get(&id));
        let count = self.vgpus.len();
        let turn = |index: usize| last.map_or(index, |last| (index + count - last - 1) % count);
        let at = (0..self.runlist.len()).min_by_key(|at| turn(self.runlist[*at]))?;
        self.runlist.remove(at)
    }

    /// Puts the vGPUs that have become runnable on the runlist.
    fn wake(&mut self) {
        while let Some(&Reverse((at_ns, index))) = self.wakeups.peek()
            && at_ns <= self.now_ns
        {
            self.wakeups.pop();
            self.enqueue(index);
        }
    }

    /// Puts a vGPU on the runlist, or schedules its wakeup.
    fn enqueue(&mut self, index: usize) {
        let vgpu = &mut self.vgpus[index];
        if vgpu.listed {
            return;
        }
        match vgpu.runnable_at_ns(self.now_ns) {
            Some(at_ns) if at_ns <= self.now_ns => {
                vgpu.listed = true;
                self.runlist.push_back(index);
            }
            Some(u64::MAX) | None => {}
            Some(at_ns) => self.wakeups.push(Reverse((at_ns, index))),
        }
    }

    fn apply(&mut self, actions: Vec<Action>) {
        self.actions += actions.len() as u64;
        for action in actions {
            let (Action::SetTimeslice(id, _) | Action::Gate(id, _) | Action::SetBudget(id, _)) =
                action;
            let Some(index) = self.index_by_id.get(&id).copied() else { continue };
            let vgpu = &mut self.vgpus[index];
            match action {
                Action::SetTimeslice(_, slice) => {
                    vgpu.set_slice(slice);
                    // The driver sets the slice of a group without work when it gets work.
                    if self.nvidia && vgpu.listed {
                        let start_ns = self.restarts_until_ns.max(self.now_ns);
                        self.restarts_until_ns = start_ns + NVIDIA_CHANGE_NS;
                    }
                }
                Action::SetBudget(_, budget) => {
                    vgpu.set_budget(budget, self.now_ns);
                    self.enqueue(index);
                }
                Action::Gate(_, open) => {
                    vgpu.set_gate(open);
                    self.enqueue(index);
                }
            }
        }
    }
}
