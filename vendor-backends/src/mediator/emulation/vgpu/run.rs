//! Operations of the engine on a vGPU. None of them waits: a locked vGPU is skipped.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use mdev_core::abi::notifier;
use mdev_core::gpu::Pending;
use mdev_core::sched::Budget;

use super::state::VgpuState;
use super::{Vgpu, nanoseconds};
use crate::mediator::context_process::turns::OwnTurn;
use crate::mediator::emulation::channel::{Channel, Readiness};
use crate::mediator::emulation::clock::now_ns;
use crate::mediator::emulation::context::{Context, Progress};
use crate::mediator::emulation::counters::Counters;
use crate::mediator::emulation::engine_time::EngineTime;
use crate::mediator::emulation::run_limit::RunLimit;
use crate::mediator::emulation::wakeup::WakeupReceiver;
use crate::mediator::fault::Fault;

/// Result of polling a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollResult {
    /// A control request holds the lock.
    Busy,
    /// Best readiness of all channels.
    Polled(Readiness),
}

impl Vgpu {
    /// Returns the time slice in nanoseconds.
    pub fn slice_ns(&self) -> u64 {
        self.slice_ns.load(Ordering::Relaxed)
    }

    /// Returns whether the gate is open.
    pub fn gate_open(&self) -> bool {
        self.gate_open.load(Ordering::SeqCst)
    }

    /// Returns the time at which the gate was closed, if it is closed.
    pub fn gate_closed_ns(&self) -> Option<u64> {
        (!self.gate_open()).then(|| self.gate_closed_ns.load(Ordering::SeqCst))
    }

    /// Returns the budget of engine time.
    pub fn budget(&self) -> Option<Budget> {
        *self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the receiver of wake-ups.
    pub fn wakeups(&self) -> &WakeupReceiver {
        &self.wakeups
    }

    /// Polls all channels for work. Counts new doorbells as polled, unless the vGPU was just woken.
    pub fn poll(&self, now_ns: u64, woken: bool) -> PollResult {
        let Some(mut state) = self.try_lock() else { return PollResult::Busy };
        if state.paused {
            return PollResult::Polled(Readiness::Idle);
        }
        let may_submit = state.may_submit(now_ns);
        let acquire_limit_ns = state.quotas.acquire_timeout.map_or(u64::MAX, nanoseconds);
        let VgpuState { spaces, channels, .. } = &mut *state;
        let mut best = Readiness::Idle;
        let (mut doorbells, mut hung) = (0, 0);
        for channel in channels.values_mut() {
            doorbells += u64::from(channel.take_doorbell());
            let mut readiness = channel.poll(now_ns, spaces, may_submit);
            if channel.blocked_ns(now_ns) > acquire_limit_ns {
                hung +=
                    u64::from(channel.fail(Fault { code: notifier::SEMAPHORE_TIMEOUT, info: 0 }));
                readiness = Readiness::Idle;
            }
            match readiness {
                Readiness::Ready => best = Readiness::Ready,
                Readiness::Waiting if best == Readiness::Idle => best = Readiness::Waiting,
                Readiness::Waiting | Readiness::Idle => {}
            }
        }
        if doorbells > 0 && !woken {
            self.counters.polled_doorbells.fetch_add(doorbells, Ordering::Relaxed);
        }
        if hung > 0 {
            Counters::add(&self.counters.hang_resets, hung);
            Counters::add(&self.counters.faults, hung);
            self.interrupts.raise(Pending::CHANNEL_ERROR, None);
        }
        PollResult::Polled(best)
    }

    /// Tells the guest whether doorbells need a wake-up. Returns false if the state is locked.
    pub fn announce_sleep(&self, asleep: bool) -> bool {
        let state = self.try_lock();
        if let Some(state) = state.as_ref().filter(|state| !state.paused) {
            state.channels.values().for_each(|channel| channel.announce_sleep(asleep));
        }
        state.is_some()
    }

    /// Faults the channel that ran last, because it exceeded its run limit by `overrun_ns`.
    pub fn fail_running(&self, overrun_ns: u64) {
        let Some(mut state) = self.try_lock() else { return };
        let last = state.last_run;
        let fault = Fault { code: notifier::CTXSW_TIMEOUT, info: overrun_ns };
        if state.channels.get_mut(&last).is_some_and(|channel| channel.fail(fault)) {
            log::warn!(
                "vGPU {}: channel {last} did not yield the engine: channel reset",
                self.spec.vgpu
            );
            Counters::add(&self.counters.hang_resets, 1);
            Counters::add(&self.counters.faults, 1);
            state.fault_backoff.count(now_ns());
            self.interrupts.raise(Pending::CHANNEL_ERROR, None);
        }
    }

    /// Faults all channels, because the engine slept in the guest's memory. Returns false if the
    /// state is locked.
    pub fn cut_off(&self, slept_ns: u64, pause_ns: u64) -> bool {
        let Some(mut state) = self.try_lock() else { return false };
        let fault = Fault { code: notifier::IDLE_TIMEOUT, info: slept_ns };
        self.fail_channels(&mut state, fault, |_| true);
        log::warn!(
            "vGPU {}: its memory held the GPU for {} ms, as if the VMM punched holes into it: \
             channels reset, new ones wait for {} s",
            self.spec.vgpu,
            slept_ns / 1_000_000,
            pause_ns / 1_000_000_000,
        );
        true
    }

    /// Runs the next ready channel until `end_ns`, or until its `turn` is revoked. Returns the time
    /// by engine since `since_ns`.
    pub fn run(&self, since_ns: u64, now: u64, end_ns: u64, turn: Option<&OwnTurn>) -> EngineTime {
        let idle = EngineTime::new(since_ns);
        let Some(mut state) = self.try_lock().filter(|state| !state.paused) else { return idle };
        let may_submit = state.may_submit(now);
        let hang_limit_ns = state.quotas.hang_timeout.map_or(u64::MAX, nanoseconds);
        let VgpuState { spaces, channels, last_run, submissions, memory_watch, .. } = &mut *state;
        let ready = |id: &u32, channel: &mut Channel| {
            (channel.poll(now, spaces, may_submit) == Readiness::Ready).then_some(*id)
        };
        let start = *last_run;
        let after = channels.range_mut(start.wrapping_add(1)..).find_map(|(i, c)| ready(i, c));
        let next = after.or_else(|| channels.iter_mut().find_map(|(id, c)| ready(id, c)));
        let Some(id) = next else { return idle };
        *last_run = id;
        let Some(channel) = channels.get_mut(&id) else { return idle };
        // The address space of a channel exists as long as the channel.
        let Some(space) = spaces.get(channel.spec().space) else { return idle };
        channel.begin(since_ns);
        let limit = RunLimit {
            end_ns,
            waiting_requests: &self.waiting_requests,
            gate_open: &self.gate_open,
            turn,
        };
        let cx = Context {
            hardware: &*self.hardware,
            vgpu: self.spec.vgpu,
            space,
            limit: &limit,
            interrupts: &self.interrupts,
            vector: channel.spec().vector,
        };
        let mut outcome = channel.run(cx, &self.counters, submissions);
        let poisoned = spaces.poisoned();
        if poisoned {
            outcome = Err(Fault::mmu(0));
        }
        let (ended, engine_time) = (now_ns(), channel.engine_time());
        if let Some(fault) = memory_watch.check(spaces, self.spec.vgpu, ended) {
            outcome = Err(fault);
        }
        let preemption_latency_ns = self.hardware.pace().preemption_latency_ns;
        // Time far beyond the limit is stolen by the host, or else a preemption timeout
        // (`fail_running`).
        let working =
            channel.charge((ended - now).min(end_ns.saturating_sub(now) + preemption_latency_ns));
        let hung = outcome == Ok(Progress::More) && working > hang_limit_ns;
        if hung {
            Counters::add(&self.counters.hang_resets, 1);
            outcome = Err(Fault { code: notifier::IDLE_TIMEOUT, info: working });
        }
        match outcome {
            Ok(Progress::Done | Progress::More | Progress::Blocked) => {}
            Err(fault) => {
                log::debug!("vGPU {}: channel {id} faulted: {fault:?}", self.spec.vgpu);
                channel.fail(fault);
                if let Some(code) = channel.take_machine_code() {
                    state.machine_code_log.report(self.spec.vgpu, code, ended);
                }
                self.counters.faults.fetch_add(1, Ordering::Relaxed);
                state.fault_backoff.count(ended);
                self.interrupts.raise(Pending::CHANNEL_ERROR, None);
            }
        }
        if poisoned {
            // The next accesses would store to memory of this process.
            self.fail_channels(&mut state, Fault::mmu(0), |_| true);
        }
        engine_time
    }
}
