//! The loop of the engine thread: polls groups and runs the group that the runlist picks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use super::busy_clock::BusyClock;
use super::sleep::{SEMAPHORE_POLL_MIN_NS, SPIN_MIN_NS};
use super::sleep_debt::SleepDebt;
use super::stolen_time::StolenTime;
use super::vgpu_list::VgpuList;
use super::watchdog::Steps;
use crate::mediator::context_process::turns::Turns;
use crate::mediator::emulation::channel::Readiness;
use crate::mediator::emulation::clock::now_ns;
use crate::mediator::emulation::counters::Counters;
use crate::mediator::emulation::runlist::{Entry, Runlist};
use crate::mediator::emulation::vgpu::Vgpu;
use crate::mediator::emulation::vgpu::run::PollResult;
use crate::mediator::hardware::Pace;

/// Time beyond its limit after which a run counts as a preemption timeout, and its channel is
/// reset. Long, because a hypervisor below may take the core away in a way that looks like work.
pub(super) const PREEMPTION_GRACE_NS: u64 = 2_000_000_000;
/// Longest wait for a control request on a vGPU, on an engine with long runs.
const REQUEST_WAIT_NS: u64 = 20_000_000;
/// Interval between readings of stolen time.
const STOLEN_TIME_INTERVAL_NS: u64 = 500_000;
/// Runs of other groups that a group may have to wait for while its budget allows it to run.
const MAX_WAIT_RUNS: u64 = 4;
/// Shortest interval between polls of all groups.
const POLL_NS: u64 = 20_000;
/// Interval between polls of all groups while the running group has time left in its slice. The
/// other groups have to wait for the end of the slice anyway.
const POLL_IN_SLICE_NS: u64 = 1_000_000;

/// Scheduling group of one vGPU.
#[derive(Debug)]
pub(super) struct Group {
    pub vgpu: Arc<Vgpu>,
    pub polled: PollResult,
    /// Start of the time with work but without the engine that is not yet counted.
    pub waiting_since: Option<u64>,
    /// Start of the wait for the engine, or end of the last run of the group that has the engine.
    pub wait_start: Option<u64>,
    /// Whether the group ran last, and has had work and been allowed to run since: its next run
    /// ends no wait.
    pub has_engine: bool,
    /// Whether the gate or the budget causes the wait.
    gated: bool,
    /// Time before which the group neither runs nor is polled, because the engine slept in it.
    pub paused_until_ns: u64,
    pub sleep_debt: SleepDebt,
    /// Sleep for which the vGPU is cut off as soon as its lock is free.
    cut_off_ns: Option<u64>,
    /// Whether a wake-up arrived. The next doorbell then does not count as polled.
    pub woken: bool,
    /// Wake-ups since the last work.
    pub empty_wakes: u32,
    /// Time before which a sleeping engine does not listen to the vGPU, because its wake-ups
    /// brought no work.
    pub deaf_until_ns: u64,
    /// Whether the worker is gone: no more wake-ups arrive.
    pub closed: bool,
}

/// State of the engine thread.
#[derive(Debug)]
pub(super) struct EngineLoop {
    pub vgpus: Arc<VgpuList>,
    pub pace: Pace,
    generation: u64,
    pub groups: Vec<Group>,
    pub runlist: Runlist,
    /// Index of the group that ran last.
    pub running: Option<usize>,
    /// Time of the last poll of all groups.
    pub last_poll_ns: u64,
    pub busy: BusyClock,
    pub idle_since: Option<u64>,
    /// Length of the sleep that a wake-up has just ended.
    pub woken_after_ns: Option<u64>,
    pub spin_ns: u64,
    pub semaphore_poll_ns: u64,
    pub stolen: StolenTime,
    pub steps: Arc<Steps>,
    /// Number of the current step.
    pub step_number: u64,
    /// [`PREEMPTION_GRACE_NS`]; shorter in tests.
    pub grace_ns: u64,
    /// Turns of a context's engine, which has one vGPU.
    pub turns: Option<Arc<Turns>>,
}

impl EngineLoop {
    pub fn new(vgpus: Arc<VgpuList>, pace: Pace) -> Self {
        Self {
            vgpus,
            pace,
            generation: 0,
            groups: Vec::new(),
            runlist: Runlist::default(),
            running: None,
            last_poll_ns: 0,
            busy: BusyClock::default(),
            idle_since: None,
            woken_after_ns: None,
            spin_ns: SPIN_MIN_NS,
            semaphore_poll_ns: SEMAPHORE_POLL_MIN_NS,
            stolen: StolenTime::new(pace.on_cpu),
            steps: Arc::new(Steps::new()),
            step_number: 0,
            grace_ns: PREEMPTION_GRACE_NS,
            turns: None,
        }
    }

    /// Runs until the list is stopped.
    pub fn run(&mut self) {
        let mut now = now_ns();
        while !self.vgpus.stopped() {
            now = self.step(now);
        }
    }

    /// Polls, and runs a group if one may run. Takes and returns the current time.
    pub fn step(&mut self, now: u64) -> u64 {
        self.step_number += 1;
        self.steps.begin(self.step_number);
        self.refresh();
        let since_poll = now - self.last_poll_ns;
        let polled = match self.running.filter(|index| since_poll < self.poll_interval_ns(*index)) {
            Some(index) => self.poll_running(index, now),
            None => self.poll_all(now),
        };
        match self.runlist.pick(self.stolen.available_ns(now)) {
            Some((index, budget)) => return self.run_in_turn(index, budget, polled),
            // Only the running group was polled: poll all groups before going idle.
            None if self.last_poll_ns < now => self.last_poll_ns = 0,
            None => self.idle(now),
        }
        now_ns()
    }

    /// Runs a group, if the engine has a turn or needs none, or else waits for a turn. Takes and
    /// returns the current time.
    fn run_in_turn(&mut self, index: usize, budget: u64, now: u64) -> u64 {
        let Some(turns) = self.turns.clone() else {
            return self.run_group(index, budget, now, None);
        };
        let group = &self.groups[index];
        let since = group.wait_start.unwrap_or(now);
        if let Some(turn) = turns.begin(now, since, || group.vgpu.usage()) {
            return self.run_group(index, budget, now, Some(&turn));
        }
        let (usage, counted_ns) = (group.vgpu.usage(), group.waiting_since);
        self.groups[index].has_engine = false;
        self.busy.stop();
        self.steps.sleep();
        turns.wait(since, &usage, counted_ns);
        self.steps.wake(self.step_number);
        let awake = now_ns();
        self.stolen.read_after_sleep(awake, 0);
        self.last_poll_ns = 0;
        awake
    }

    /// Gives the turn back, or keeps it for later work: there is none now. Returns whether later
    /// work can run at once.
    pub fn rest(&self) -> bool {
        match (&self.turns, &self.groups[..]) {
            (Some(turns), [group]) => turns.rest(&group.vgpu.usage()),
            _ => true,
        }
    }

    /// Returns the interval between polls of all groups while group `index` runs.
    fn poll_interval_ns(&mut self, index: usize) -> u64 {
        if self.runlist.entry(index).in_slice() { POLL_IN_SLICE_NS } else { POLL_NS }
    }

    /// Applies changes of the list of vGPUs.
    pub fn refresh(&mut self) {
        let generation = self.vgpus.generation();
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        let vgpus = self.vgpus.list();
        for index in (0..self.groups.len()).rev() {
            let group = &self.groups[index];
            if !vgpus.iter().any(|vgpu| Arc::ptr_eq(vgpu, &group.vgpu)) {
                self.groups.remove(index);
                self.runlist.remove(index);
            }
        }
        for vgpu in vgpus {
            if !self.groups.iter().any(|group| Arc::ptr_eq(&group.vgpu, &vgpu)) {
                self.runlist.push(Entry::new(vgpu.slice_ns()));
                self.groups.push(Group {
                    vgpu,
                    polled: PollResult::Busy,
                    waiting_since: None,
                    wait_start: None,
                    has_engine: false,
                    gated: false,
                    paused_until_ns: 0,
                    sleep_debt: SleepDebt::default(),
                    cut_off_ns: None,
                    woken: false,
                    empty_wakes: 0,
                    deaf_until_ns: 0,
                    closed: false,
                });
            }
        }
        self.running = None;
        self.last_poll_ns = 0;
    }

    /// Polls all groups. Takes and returns the current time.
    pub fn poll_all(&mut self, now: u64) -> u64 {
        let end = (0..self.groups.len()).fold(now, |at, index| self.poll_group(index, at));
        self.last_poll_ns = now;
        if end - self.stolen.last_reading_ns() > STOLEN_TIME_INTERVAL_NS {
            self.stolen.read(end);
        }
        end
    }

    /// Polls the group that ran last. Polls all groups if that group has no more work.
    fn poll_running(&mut self, index: usize, now: u64) -> u64 {
        let end = self.poll_group(index, now);
        if self.runlist.entry(index).ready || now - self.last_poll_ns < POLL_NS {
            return end;
        }
        self.poll_all(end)
    }

    /// Polls one group. Updates its waiting times and its runlist entry. Takes and returns the
    /// current time, which is read only while time is charged.
    fn poll_group(&mut self, index: usize, now: u64) -> u64 {
        self.cut_off(index, now);
        let group = &mut self.groups[index];
        let paused = now < group.paused_until_ns;
        if !paused {
            group.polled = group.vgpu.poll(now, group.woken);
        }
        // Control requests are short. Where runs are long, a group should not miss one because of a
        // request.
        let until = now + if self.pace.on_cpu { 0 } else { REQUEST_WAIT_NS };
        while group.polled == PollResult::Busy && now_ns() < until {
            thread::yield_now();
            group.polled = group.vgpu.poll(now, group.woken);
        }
        let has_work = match group.polled {
            PollResult::Busy => group.waiting_since.is_some(),
            PollResult::Polled(readiness) => readiness == Readiness::Ready,
        };
        if has_work {
            group.woken = false;
            group.empty_wakes = 0;
            group.deaf_until_ns = 0;
        }
        let counters = group.vgpu.counters();
        counters.runnable.store(has_work, Ordering::Relaxed);
        if let Some(since) = group.waiting_since {
            let waited = now.saturating_sub(since);
            Counters::add(&counters.wait_ns, waited);
            if group.gated {
                Counters::add(&counters.gated_ns, waited);
            }
        }
        let end = if self.busy.runs() { now_ns() } else { now };
        group.waiting_since = has_work.then_some(end);
        let gate_open = group.vgpu.gate_open();
        let entry = self.runlist.entry(index);
        let gated = has_work && (!gate_open || entry.capped());
        if gated && !group.gated {
            Counters::add(&counters.gate_closings, 1);
        }
        group.gated = gated;
        group.has_engine &= has_work && !gated && !paused;
        group.wait_start = has_work.then(|| group.wait_start.unwrap_or(end));
        entry.slice_ns = group.vgpu.slice_ns();
        let wait_ns = MAX_WAIT_RUNS * self.pace.preemption_latency_ns;
        entry.set_budget(group.vgpu.budget(), self.stolen.available_ns(now), wait_ns);
        entry.ready = has_work && group.polled != PollResult::Busy && gate_open && !paused;
        let idle = group.polled == PollResult::Polled(Readiness::Idle);
        let cost = self.busy.end_poll(end - now, idle);
        if cost > 0 {
            self.charge_poll(index, cost, end);
        }
        end
    }

    /// Pauses a group for as long as the engine slept in it, or cuts its vGPU off. Otherwise a
    /// group that holds the engine whenever no other group has work would delay all new work of the
    /// others.
    pub fn pause(&mut self, index: usize, slept_ns: u64, now: u64) {
        if slept_ns > 0 && self.groups.len() > 1 {
            let group = &mut self.groups[index];
            let consequence = group.sleep_debt.add(slept_ns, now);
            group.paused_until_ns = now.saturating_add(consequence.pause_ns);
            // Until it is polled again.
            group.polled = PollResult::Polled(Readiness::Ready);
            group.cut_off_ns = consequence.cut_off_ns;
            self.cut_off(index, now);
        }
    }

    /// Cuts a vGPU off if that is due and its lock is free.
    fn cut_off(&mut self, index: usize, now: u64) {
        let group = &mut self.groups[index];
        if let Some(slept_ns) = group.cut_off_ns
            && group.vgpu.cut_off(slept_ns, group.paused_until_ns.saturating_sub(now))
        {
            group.cut_off_ns = None;
            group.polled = PollResult::Polled(Readiness::Idle);
            group.waiting_since = None;
        }
    }

    /// Charges a group for a poll that took `cost` and ended at `end`.
    fn charge_poll(&mut self, index: usize, cost: u64, end: u64) {
        let mut stolen = 0;
        if cost > self.pace.preemption_latency_ns {
            // A poll sleeps if the guest takes the memory of a USERD away.
            let time = self.stolen.read(end);
            stolen = time.stolen_ns.min(cost);
            self.pause(index, time.slept_ns, end);
        }
        let counters = self.groups[index].vgpu.counters();
        Counters::add(&counters.stolen_ns, stolen);
        Counters::add(&counters.engine_ns, cost - stolen);
        self.runlist.charge(index, cost - stolen);
    }
}
