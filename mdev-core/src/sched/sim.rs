//! A runlist in simulated time, to try policies on: same actions in, same counters out, no silicon.
//!
//! * [`workload`]: what a simulated vGPU has to do
//! * [`histogram`]: how long turns were waited for

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use super::budget::Meter;
use super::engine::{Action, Event, Scheduler, ShareError};
use super::policy::{Config, Silicon};
use super::share::Share;
use crate::gpu::{Usage, UsageReport};
use crate::ids::VgpuId;

pub mod histogram;
#[cfg(test)]
mod tests;
pub mod workload;

pub use histogram::Histogram;
pub use workload::Workload;

/// How many instances of its type a simulated parent has room for, for fixed shares.
pub const MAX_INSTANCES: u32 = 8;

#[derive(Clone, Debug)]
struct Group {
    id: VgpuId,
    workload: Workload,
    slice_ns: u64,
    open: bool,
    meter: Option<Meter>,
    /// Work left of this burst.
    left_ns: u64,
    /// When it has work (again), or since when it waits.
    ready_ns: u64,
    /// True while it is in the runlist.
    listed: bool,
    usage: Usage,
    waits: Histogram,
}

impl Group {
    fn has_work(&self, now_ns: u64) -> bool {
        self.left_ns > 0 && self.ready_ns <= now_ns
    }

    /// When it may run, where that needs no event.
    fn wakes_ns(&mut self, now_ns: u64) -> Option<u64> {
        if !self.open || self.left_ns == 0 {
            return None;
        }
        let has_work = self.has_work(now_ns);
        let opens_ns = self.meter.as_mut().map_or(0, |meter| {
            meter.advance(now_ns, has_work);
            if meter.is_open() { 0 } else { meter.opens_at_ns() }
        });
        Some(self.ready_ns.max(opens_ns))
    }

    /// The counters at an instant at which it does not run.
    fn usage(&self, now_ns: u64) -> Usage {
        let runnable = self.has_work(now_ns);
        let waits_ns = if runnable { now_ns - self.ready_ns } else { 0 };
        Usage { wait_ns: self.usage.wait_ns + waits_ns, runnable, ..self.usage }
    }

    /// Runs from `now_ns` until its slice, its budget or its work ends; how long that was.
    fn run(&mut self, now_ns: u64) -> u64 {
        let piece_ns = self.workload.piece_ns.max(1);
        let budget_ns = self.meter.map_or(u64::MAX, |meter| meter.left_ns());
        let granted_ns = self.slice_ns.min(budget_ns).div_ceil(piece_ns) * piece_ns;
        let ran_ns = granted_ns.min(self.left_ns);
        let waited_ns = now_ns - self.ready_ns;
        self.waits.record(waited_ns);
        self.usage.wait_ns += waited_ns;
        self.usage.engine_ns += ran_ns;
        self.usage.submissions += ran_ns.div_ceil(piece_ns);
        self.ready_ns = now_ns + ran_ns;
        if let Some(meter) = &mut self.meter {
            meter.settle(self.ready_ns, ran_ns, true);
        }
        if self.left_ns != u64::MAX {
            self.left_ns -= ran_ns;
        }
        if self.left_ns == 0 {
            self.left_ns = self.workload.burst_ns;
            self.ready_ns = self.ready_ns.saturating_add(self.workload.idle_ns);
        } else {
            self.usage.preemptions += 1;
        }
        ran_ns
    }
}

/// Makes other counters of the true ones.
pub type Misread = fn(&mut UsageReport);

/// One parent: a scheduler and the runlist that it steers.
#[derive(Clone, Debug)]
pub struct Simulation {
    scheduler: Scheduler,
    groups: Vec<Group>,
    places: BTreeMap<VgpuId, usize>,
    /// Who may run, in the order of turns.
    runlist: VecDeque<usize>,
    /// When others may run: looked at again then.
    wakes: BinaryHeap<Reverse<(u64, usize)>>,
    now_ns: u64,
    /// What it costs to switch from one group to another, in nanoseconds.
    switch_ns: u64,
    /// How late the scheduler is asked.
    late_ns: u64,
    /// What is wrong with the counters that the scheduler is told.
    misread: Option<Misread>,
    reports: u64,
    actions: u64,
}

impl Simulation {
    /// A parent without vGPUs.
    pub fn new(config: Config, silicon: impl Into<Silicon>, switch_ns: u64) -> Self {
        Self {
            scheduler: Scheduler::new(config, silicon, 0),
            groups: Vec::new(),
            places: BTreeMap::new(),
            runlist: VecDeque::new(),
            wakes: BinaryHeap::new(),
            now_ns: 0,
            switch_ns,
            late_ns: 0,
            misread: None,
            reports: 0,
            actions: 0,
        }
    }

    /// Lets the scheduler be asked so much after its deadline, as by a manager that is busy.
    pub fn set_late(&mut self, late: Duration) {
        self.late_ns = late.as_nanos() as u64;
    }

    /// Tells the scheduler wrong counters from now on.
    pub fn set_misread(&mut self, misread: Misread) {
        self.misread = Some(misread);
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Simulated nanoseconds so far.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// How often counters were read, and how many actions there were.
    pub fn effort(&self) -> (u64, u64) {
        (self.reports, self.actions)
    }

    /// How long each turn of a vGPU was waited for, since [`Simulation::forget_waits`].
    pub fn waits(&self, id: VgpuId) -> Option<&Histogram> {
        self.places.get(&id).map(|place| &self.groups[*place].waits)
    }

    /// Forgets how long turns were waited for.
    pub fn forget_waits(&mut self) {
        for group in &mut self.groups {
            group.waits = Histogram::default();
        }
    }

    /// Starts a vGPU.
    pub fn start(
        &mut self,
        id: VgpuId,
        share: Share,
        workload: Workload,
    ) -> Result<(), ShareError> {
        let started = Event::VgpuStarted { id, share, max_instances: MAX_INSTANCES };
        let actions = self.scheduler.handle(started)?;
        self.places.insert(id, self.groups.len());
        self.groups.push(Group {
            id,
            workload,
            slice_ns: 0,
            open: false,
            meter: None,
            left_ns: workload.burst_ns,
            ready_ns: self.now_ns.saturating_add(workload.first_ns),
            listed: false,
            usage: Usage::default(),
            waits: Histogram::default(),
        });
        self.apply(actions);
        Ok(())
    }

    /// Stops a vGPU.
    pub fn stop(&mut self, id: VgpuId) -> Result<(), ShareError> {
        self.groups.retain(|group| group.id != id);
        self.places = self.groups.iter().enumerate().map(|(at, group)| (group.id, at)).collect();
        self.runlist.clear();
        self.wakes.clear();
        for index in 0..self.groups.len() {
            self.groups[index].listed = false;
            self.look_at(index);
        }
        self.event(Event::VgpuStopped { id })
    }

    /// Gives the scheduler an event, and the runlist what comes of it.
    pub fn event(&mut self, event: Event<'_>) -> Result<(), ShareError> {
        let actions = self.scheduler.handle(event)?;
        self.apply(actions);
        Ok(())
    }

    /// Lets time pass. Ends with the slice that is running then.
    pub fn run(&mut self, time: Duration) -> Result<(), ShareError> {
        let end_ns = self.now_ns.saturating_add(time.as_nanos() as u64);
        while self.now_ns < end_ns {
            let asked_ns = self.scheduler.next_deadline().unwrap_or(u64::MAX);
            let asked_ns = asked_ns.saturating_add(self.late_ns);
            self.step(end_ns.min(asked_ns));
            if self.now_ns >= asked_ns {
                self.reports += 1;
                let mut report = self.usage();
                if let Some(misread) = self.misread {
                    misread(&mut report);
                }
                self.event(Event::UsageReport(&report))?;
            }
        }
        Ok(())
    }

    /// Lets time pass in which nobody runs, as while an engine is reset.
    pub fn stand_still(&mut self, time: Duration) {
        self.now_ns += time.as_nanos() as u64;
    }

    /// The counters now.
    pub fn usage(&self) -> UsageReport {
        let vgpus = self.groups.iter().map(|group| (group.id, group.usage(self.now_ns)));
        UsageReport { now_ns: self.now_ns, vgpus: vgpus.collect() }
    }

    fn step(&mut self, end_ns: u64) {
        while let Some(&Reverse((at_ns, index))) = self.wakes.peek()
            && at_ns <= self.now_ns
        {
            self.wakes.pop();
            self.look_at(index);
        }
        if let Some(index) = self.runlist.pop_front() {
            let group = &mut self.groups[index];
            group.listed = false;
            // It may have been closed since it was listed.
            if group.wakes_ns(self.now_ns).is_some_and(|at_ns| at_ns <= self.now_ns) {
                self.now_ns += group.run(self.now_ns) + self.switch_ns;
            }
            self.look_at(index);
        } else {
            let next_ns = self.wakes.peek().map_or(u64::MAX, |Reverse((at_ns, _))| *at_ns);
            self.now_ns = next_ns.min(end_ns).max(self.now_ns);
        }
    }

    /// Puts a group on the runlist, or notes when that is to be done.
    fn look_at(&mut self, index: usize) {
        let group = &mut self.groups[index];
        if group.listed {
            return;
        }
        match group.wakes_ns(self.now_ns) {
            Some(at_ns) if at_ns <= self.now_ns => {
                group.listed = true;
                self.runlist.push_back(index);
            }
            Some(u64::MAX) | None => {}
            Some(at_ns) => self.wakes.push(Reverse((at_ns, index))),
        }
    }

    fn apply(&mut self, actions: Vec<Action>) {
        self.actions += actions.len() as u64;
        for action in actions {
            let (Action::SetTimeslice(id, _) | Action::Gate(id, _) | Action::SetBudget(id, _)) =
                action;
            let Some(index) = self.places.get(&id).copied() else { continue };
            let group = &mut self.groups[index];
            match action {
                Action::SetTimeslice(_, slice) => group.slice_ns = slice.as_nanos() as u64,
                Action::SetBudget(_, budget) => {
                    group.meter = budget.map(|budget| match group.meter {
                        Some(mut meter) => {
                            meter.set_budget(budget, self.now_ns);
                            meter
                        }
                        None => Meter::new(budget, self.now_ns),
                    });
                    self.look_at(index);
                }
                Action::Gate(_, open) => {
                    group.open = open;
                    self.look_at(index);
                }
            }
        }
    }
}
