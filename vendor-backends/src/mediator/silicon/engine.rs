//! The engine: one thread that does the work of all vGPUs, in the order of the runlist.
//!
//! It looks at the rings of all channels while there is work, and for a while after. Then it tells the guests that it
//! sleeps, looks once more, and sleeps: from then on a doorbell comes with a wake-up.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::{fs::File, hint};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

use super::channel::Readiness;
use super::clock::{now_ns, thread_ns};
use super::counters::Counters;
use super::runlist::{Entry, Runlist};
use super::vgpu::{Glance, Vgpu};
use crate::mediator::hardware::Pace;

/// A turn that goes on for so long after its limit is not obeying: its channel is reset. Long, since a hypervisor below
/// may take the core away in a way that looks like work.
const PREEMPTION_GRACE_NS: u64 = 2_000_000_000;
/// How long an engine with long turns waits for a control request at work on a vGPU.
const REQUEST_NS: u64 = 20_000_000;
/// How often to ask how much the host has taken.
const ACCOUNT_NS: u64 = 500_000;
/// A vGPU whose cap would let it go on may have to wait for so many pieces of others' work.
const WAITS: u64 = 4;
/// Turns shorter than this share a look.
const LOOK_NS: u64 = 20_000;
/// While somebody has more of its slice left, the others, who have to wait for its end anyway, are looked at this often.
const GLANCE_NS: u64 = 1_000_000;
/// Sleeps end so much after their time without anybody being to blame.
const PUNCTUAL_NS: u64 = 200_000;
/// How long to look for new work before sleeping: adapts between these.
const SPIN_MIN_NS: u64 = 50_000;
const SPIN_MAX_NS: u64 = 500_000;
/// Within a spin, for so long without giving the core to others.
const SPIN_HARD_NS: u64 = 30_000;
/// A sleep that is shorter than this was not worth it.
const SHORT_SLEEP_NS: u64 = 1_000_000;
/// How often to look at what nobody will announce: semaphores that a CPU writes. Adapts between these.
const WATCH_MIN_NS: u64 = 50_000;
const WATCH_MAX_NS: u64 = 4_000_000;
/// A sleep with an end is no longer than this.
const WATCH_LONGEST_NS: u64 = 500_000_000;

/// Wakes the engine after something changed.
#[derive(Clone, Debug)]
pub struct Kick(Arc<File>);

impl Kick {
    fn new() -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self(Arc::new(File::from(std::os::fd::OwnedFd::from(event)))))
    }

    /// Wakes it.
    pub fn kick(&self) {
        let _ = (&*self.0).write(&1u64.to_ne_bytes());
    }

    fn take(&self) {
        let _ = (&*self.0).read(&mut [0; 8]);
    }
}

/// What the engine thread and the others share.
#[derive(Debug)]
pub struct Board {
    vgpus: Mutex<Vec<Arc<Vgpu>>>,
    /// Counts changes of `vgpus`.
    generation: AtomicU64,
    stop: AtomicBool,
    kick: Kick,
}

impl Board {
    /// An empty one.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            vgpus: Mutex::default(),
            generation: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            kick: Kick::new()?,
        })
    }

    /// What wakes the engine.
    pub fn kick(&self) -> Kick {
        self.kick.clone()
    }

    /// Changes the list of vGPUs.
    pub fn update<R>(&self, change: impl FnOnce(&mut Vec<Arc<Vgpu>>) -> R) -> R {
        let mut vgpus = self.vgpus.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut vgpus);
        self.generation.fetch_add(1, Ordering::Release);
        drop(vgpus);
        self.kick.kick();
        result
    }

    /// Reads the list of vGPUs.
    pub fn list(&self) -> Vec<Arc<Vgpu>> {
        self.vgpus.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The running engine; dropping it ends it.
#[derive(Debug)]
pub struct Engine {
    board: Arc<Board>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the thread.
    pub fn start(board: Arc<Board>, pace: Pace) -> io::Result<Self> {
        let mut state = State::new(Arc::clone(&board), pace);
        let thread = thread::Builder::new().name("gpu-engine".into()).spawn(move || {
            // A GPU without an engine is worse than one that fell off the bus.
            let guard = AbortOnPanic;
            state.run();
            std::mem::forget(guard);
        })?;
        Ok(Self { board, thread: Some(thread) })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.board.stop.store(true, Ordering::Release);
        self.board.kick.kick();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        std::process::abort();
    }
}

/// What the engine knows of one vGPU.
#[derive(Debug)]
struct Group {
    vgpu: Arc<Vgpu>,
    seen: Glance,
    /// Since when it has had work without having the engine.
    waiting_since: Option<u64>,
    /// That is for its gate's or budget's sake.
    gated: bool,
    /// It was just woken: its next doorbell was not found by looking.
    woken: bool,
    /// Its worker is gone: no wake-up will come.
    deaf: bool,
}

/// Time in which the host ran something else on the engine's core, in nanoseconds. It is nobody's: no vGPU is charged
/// for it.
#[derive(Debug, Default)]
struct Stolen {
    /// The CPU is the engine; time of any other cannot be stolen.
    on_cpu: bool,
    wall: u64,
    cpu: u64,
    total: u64,
}

impl Stolen {
    /// Nanoseconds stolen since this was asked last.
    fn take(&mut self, wall_ns: u64) -> u64 {
        let cpu_ns = thread_ns();
        let stolen = (wall_ns - self.wall).saturating_sub(cpu_ns - self.cpu);
        let stolen = if self.on_cpu { stolen } else { 0 };
        *self = Self { wall: wall_ns, cpu: cpu_ns, total: self.total + stolen, ..*self };
        stolen
    }

    /// The engine has slept, which is nobody's doing; that it slept too long is the host's.
    fn skip(&mut self, wall_ns: u64, late_ns: u64) {
        let late_ns = if self.on_cpu { late_ns } else { 0 };
        *self = Self { wall: wall_ns, cpu: thread_ns(), total: self.total + late_ns, ..*self };
    }

    /// The engine's own time: budgets come in by it, so that a part of the GPU is a part of what there is of it.
    fn engine_time(&self, wall_ns: u64) -> u64 {
        wall_ns.saturating_sub(self.total)
    }
}

struct State {
    board: Arc<Board>,
    pace: Pace,
    generation: u64,
    groups: Vec<Group>,
    runlist: Runlist,
    /// Who had the last turn.
    running: Option<usize>,
    looked_ns: u64,
    idle_since: Option<u64>,
    spin_ns: u64,
    watch_ns: u64,
    stolen: Stolen,
    /// [`PREEMPTION_GRACE_NS`].
    grace_ns: u64,
}

impl State {
    fn new(board: Arc<Board>, pace: Pace) -> Self {
        Self {
            board,
            pace,
            generation: 0,
            groups: Vec::new(),
            runlist: Runlist::default(),
            running: None,
            looked_ns: 0,
            idle_since: None,
            spin_ns: SPIN_MIN_NS,
            watch_ns: WATCH_MIN_NS,
            stolen: Stolen { on_cpu: pace.on_cpu, ..Stolen::default() },
            grace_ns: PREEMPTION_GRACE_NS,
        }
    }

    fn run(&mut self) {
        while !self.board.stop.load(Ordering::Acquire) {
            self.refresh();
            let now = now_ns();
            match self.running.filter(|index| now - self.looked_ns < self.look_after(*index)) {
                Some(index) => self.look_at_running(index, now),
                None => self.look_at_all(now),
            }
            match self.runlist.pick(self.stolen.engine_time(now)) {
                Some((index, budget)) => self.turn(index, budget),
                // What is idle may be so only because one group alone was looked at.
                None if self.looked_ns != now => self.looked_ns = 0,
                None => self.idle(now),
            }
        }
    }

    /// How long nobody else needs to be looked at while this group runs.
    fn look_after(&mut self, index: usize) -> u64 {
        if self.runlist.entry(index).has_turn() { GLANCE_NS } else { LOOK_NS }
    }

    /// Follows changes of the list of vGPUs.
    fn refresh(&mut self) {
        let generation = self.board.generation.load(Ordering::Acquire);
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        let vgpus = self.board.list();
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
                    seen: Glance::Busy,
                    waiting_since: None,
                    gated: false,
                    woken: false,
                    deaf: false,
                });
            }
        }
        self.running = None;
        self.looked_ns = 0;
    }

    fn look_at_all(&mut self, now: u64) {
        for index in 0..self.groups.len() {
            self.look_at(index, now);
        }
        self.looked_ns = now;
        if now - self.stolen.wall > ACCOUNT_NS {
            self.stolen.take(now);
        }
    }

    /// Looks at the one that had the last turn, and at all if it has no more work: others may have some by now.
    fn look_at_running(&mut self, index: usize, now: u64) {
        self.look_at(index, now);
        if !self.runlist.entry(index).ready && now - self.looked_ns >= LOOK_NS {
            self.look_at_all(now);
        }
    }

    fn look_at(&mut self, index: usize, now: u64) {
        let group = &mut self.groups[index];
        group.seen = group.vgpu.glance(now, group.woken);
        // A control request is over in a moment, and where turns are long nobody is to lose one for it.
        let until = now + if self.pace.on_cpu { 0 } else { REQUEST_NS };
        while group.seen == Glance::Busy && now_ns() < until {
            thread::yield_now();
            group.seen = group.vgpu.glance(now, group.woken);
        }
        let has_work = match group.seen {
            Glance::Busy => group.waiting_since.is_some(),
            Glance::Seen(readiness) => readiness == Readiness::Ready,
        };
        if has_work {
            group.woken = false;
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
        group.waiting_since = has_work.then_some(now);
        let gate_open = group.vgpu.gate_open();
        let entry = self.runlist.entry(index);
        let gated = has_work && (!gate_open || entry.capped());
        if gated && !group.gated {
            Counters::add(&counters.gate_closings, 1);
        }
        group.gated = gated;
        entry.slice_ns = group.vgpu.slice_ns();
        let wait_ns = WAITS * self.pace.grain_ns;
        entry.set_budget(group.vgpu.budget(), self.stolen.engine_time(now), wait_ns);
        entry.ready = has_work && group.seen != Glance::Busy && gate_open;
    }

    fn turn(&mut self, index: usize, budget: u64) {
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
        let Pace { grain_ns, turn_ns, .. } = self.pace;
        let limit = start + budget.min(turn_ns);
        let stretch = group.vgpu.run(start, limit);
        let end = now_ns();
        group.waiting_since = Some(end);
        let mut used = end - start;
        let vgpu = &self.groups[index].vgpu;
        let counters = vgpu.counters();
        if end > limit + grain_ns {
            let stolen = self.stolen.take(end).min(end - limit);
            used -= stolen;
            Counters::add(&counters.stolen_ns, stolen);
        }
        Counters::add(&counters.engine_ns, used);
        let stretch = stretch.until(start + used);
        Counters::add(&counters.copy_ns, stretch.copy_ns);
        Counters::add(&counters.compute_ns, stretch.compute_ns);
        let overrun = used.saturating_sub(budget.min(turn_ns));
        if overrun > grain_ns {
            Counters::add(&counters.slice_overruns, 1);
            Counters::add(&counters.overrun_ns, overrun);
        }
        if let Some(closed) = vgpu.closed_ns() {
            Counters::add(&counters.gate_cost_ns, end.saturating_sub(closed).min(used));
        } else if self.runlist.entry(index).has_budget() {
            Counters::add(&counters.gate_cost_ns, used.saturating_sub(budget));
        }
        if overrun > self.grace_ns {
            vgpu.fail_running(overrun);
        }
        self.runlist.charge(index, used);
        self.idle_since = None;
        self.watch_ns = WATCH_MIN_NS;
    }

    fn idle(&mut self, now: u64) {
        self.running = None;
        if self.groups.iter().any(|group| group.seen == Glance::Busy) {
            thread::yield_now();
            return;
        }
        let idle = now - *self.idle_since.get_or_insert(now);
        if idle < self.spin_ns {
            if idle < SPIN_HARD_NS {
                hint::spin_loop();
            } else {
                thread::yield_now();
            }
            return;
        }
        self.sleep();
    }

    fn sleep(&mut self) {
        let announced = self.groups.iter().all(|group| group.vgpu.announce_sleep(true));
        // A guest writes GP_PUT, fences and reads NEED_WAKEUP; we write NEED_WAKEUP, fence and read GP_PUT.
        fence(Ordering::SeqCst);
        let now = now_ns();
        self.look_at_all(now);
        let time = self.stolen.engine_time(now);
        let quiet = self.groups.iter().all(|group| group.seen != Glance::Busy)
            && self.runlist.pick(time).is_none();
        if announced && quiet {
            let opens = self.runlist.next_ns().map(|next| next.saturating_sub(time));
            let (called, timeout) = self.wait(opens);
            let woke = now_ns();
            let late = timeout.filter(|_| !called).map_or(0, |ns| (woke - now).saturating_sub(ns));
            self.stolen.skip(woke, if late > PUNCTUAL_NS { late } else { 0 });
            // Looking again at what nobody announces is no reason to stay awake.
            self.idle_since = (!called).then_some(0);
            if called && woke - now < SHORT_SLEEP_NS {
                self.spin_ns = (self.spin_ns * 2).min(SPIN_MAX_NS);
            } else if called {
                self.spin_ns = (self.spin_ns / 2).max(SPIN_MIN_NS);
            }
        } else {
            self.idle_since = None;
        }
        // A world that is locked now gets its turn in the next sleep; until then its guest wakes us for nothing.
        for group in &self.groups {
            group.vgpu.announce_sleep(false);
        }
        self.looked_ns = 0;
    }

    /// Sleeps; false where only the time to look again has come, and after how many nanoseconds that was to be.
    ///
    /// `opens_ns` is when a budget allows somebody to go on.
    fn wait(&mut self, opens_ns: Option<u64>) -> (bool, Option<u64>) {
        let watch = self.groups.iter().any(|group| group.seen == Glance::Seen(Readiness::Waiting));
        let timeout_ns = watch.then_some(self.watch_ns).into_iter().chain(opens_ns).min();
        let timeout_ns = timeout_ns.map(|ns| ns.min(WATCH_LONGEST_NS));
        let timeout = timeout_ns.map(|ns| TimeSpec::new(0, ns.cast_signed()));
        if watch {
            self.watch_ns = (self.watch_ns * 2).min(WATCH_MAX_NS);
        }
        let listening: Vec<usize> =
            (0..self.groups.len()).filter(|index| !self.groups[*index].deaf).collect();
        let mut fds = vec![PollFd::new(self.board.kick.0.as_fd(), PollFlags::POLLIN)];
        fds.extend(
            listening.iter().map(|index| {
                PollFd::new(self.groups[*index].vgpu.wake().as_fd(), PollFlags::POLLIN)
            }),
        );
        let called = ppoll(&mut fds, timeout, None) != Ok(0);
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any() == Some(true)).collect();
        drop(fds);
        self.board.kick.take();
        for (index, _) in listening.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            let group = &mut self.groups[*index];
            let taken = group.vgpu.wake().take();
            group.woken |= taken.woken;
            group.deaf |= taken.deaf;
            if group.woken {
                group.vgpu.counters().wakeups.fetch_add(1, Ordering::Relaxed);
            }
        }
        (called, timeout_ns)
    }
}

#[cfg(test)]
mod tests;
