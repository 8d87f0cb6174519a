//! The engine without work: spinning, then sleeping.

use std::hint;
use std::os::fd::AsFd;
use std::sync::atomic::{Ordering, fence};
use std::thread;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::engine_loop::{EngineLoop, Group};
use crate::mediator::emulation::channel::Readiness;
use crate::mediator::emulation::clock::now_ns;
use crate::mediator::emulation::vgpu::run::PollResult;

/// Tolerated delay of a wake-up. A longer delay counts as stolen time.
const LATE_NS: u64 = 200_000;
/// Bounds of the adaptive time for which the engine polls for new work before it sleeps.
pub(super) const SPIN_MIN_NS: u64 = 50_000;
const SPIN_MAX_NS: u64 = 500_000;
/// Time of the spin during which the thread does not yield its core.
const SPIN_WITHOUT_YIELD_NS: u64 = 30_000;
/// A sleep shorter than this should have been a spin.
const SHORT_SLEEP_NS: u64 = 1_000_000;
/// Bounds of the adaptive interval between polls of semaphores that a CPU may release without a
/// wake-up.
pub(super) const SEMAPHORE_POLL_MIN_NS: u64 = 50_000;
const SEMAPHORE_POLL_MAX_NS: u64 = 4_000_000;
/// Wake-ups without work after which a vGPU is listened to less often.
const EMPTY_WAKES: u32 = 16;
/// Interval at which a sleeping engine looks for wake-ups of vGPUs that had many without work, at
/// first and at last. All of them at once: each look polls all vGPUs.
const DEAF_NS: u64 = 1_000_000;
const MAX_DEAF_NS: u64 = 4_000_000;
/// Wake-ups without work after which this interval doubles.
const EMPTY_WAKES_TO_DOUBLE: u32 = 64;
/// Longest sleep with a timeout.
const MAX_SLEEP_NS: u64 = 500_000_000;

impl EngineLoop {
    /// Spins for a while, then sleeps.
    pub fn idle(&mut self, now: u64) {
        self.running = None;
        self.busy.stop();
        if self.groups.iter().any(|group| group.polled == PollResult::Busy) {
            thread::yield_now();
            return;
        }
        // Where others use the engine, spinning would slow them down and save little.
        let spins = self.rest();
        let idle = now - *self.idle_since.get_or_insert(now);
        if spins && idle < self.spin_ns {
            if idle < SPIN_WITHOUT_YIELD_NS {
                hint::spin_loop();
            } else {
                thread::yield_now();
            }
            return;
        }
        self.sleep();
    }

    /// Announces the sleep to the guests and sleeps, unless a poll finds work.
    fn sleep(&mut self) {
        let announced = self.announce_sleep(true);
        // The guest writes GP_PUT, fences and reads NEED_WAKEUP. The engine writes NEED_WAKEUP,
        // fences and reads GP_PUT.
        fence(Ordering::SeqCst);
        let now = now_ns();
        self.poll_all(now);
        let time = self.stolen.available_ns(now);
        let quiet = self.groups.iter().all(|group| group.polled != PollResult::Busy)
            && self.runlist.pick(time).is_none();
        if announced && quiet {
            let pauses =
                self.groups.iter().filter_map(|group| group.paused_until_ns.checked_sub(now));
            let opens = self.runlist.next_ns().map(|next| next.saturating_sub(time));
            let opens = opens.into_iter().chain(pauses).min();
            let (woken, timeout) = self.wait(opens);
            let awake = now_ns();
            let late = timeout.filter(|_| !woken).map_or(0, |ns| (awake - now).saturating_sub(ns));
            self.stolen.read_after_sleep(awake, if late > LATE_NS { late } else { 0 });
            // Only work restarts the spinning: no timeout, such as polling a semaphore again, and
            // no wake-up without work, by which a guest could keep the engine awake.
            self.idle_since = Some(0);
            self.woken_after_ns = woken.then_some(awake - now);
        } else {
            self.idle_since = None;
        }
        // A vGPU that is locked now is updated after the next sleep. Until then its guest sends
        // unnecessary wake-ups.
        self.announce_sleep(false);
        self.last_poll_ns = 0;
    }

    /// Tells all guests whether doorbells need a wake-up, but those of paused groups. Returns false
    /// if a vGPU is locked.
    fn announce_sleep(&mut self, asleep: bool) -> bool {
        let mut from = now_ns();
        self.stolen.read(from);
        let mut announced = true;
        for index in 0..self.groups.len() {
            let group = &self.groups[index];
            // The engine would sleep in the same memory again. It polls the group after the pause.
            if from < group.paused_until_ns {
                continue;
            }
            announced &= group.vgpu.announce_sleep(asleep);
            let to = now_ns();
            if to - from > self.pace.preemption_latency_ns {
                let slept_ns = self.stolen.read(to).slept_ns;
                self.pause(index, slept_ns, to);
            }
            from = to;
        }
        announced
    }

    /// Adapts the time of spinning after a wake-up that brought work and ended a sleep of
    /// `slept_ns`.
    pub fn adapt_spin(&mut self, slept_ns: u64) {
        self.spin_ns = if slept_ns < SHORT_SLEEP_NS {
            (self.spin_ns * 2).min(SPIN_MAX_NS)
        } else {
            (self.spin_ns / 2).max(SPIN_MIN_NS)
        };
    }

    /// Sleeps until a wake-up or a timeout. Returns whether a wake-up arrived, and the timeout.
    ///
    /// `opens_ns` is the time until a budget, or the end of a pause, allows a group to run again.
    fn wait(&mut self, opens_ns: Option<u64>) -> (bool, Option<u64>) {
        let waiting = PollResult::Polled(Readiness::Waiting);
        let poll_semaphores = self.groups.iter().any(|group| group.polled == waiting);
        let now = now_ns();
        let listens = self.groups.iter().filter_map(|group| group.deaf_until_ns.checked_sub(now));
        let semaphores = poll_semaphores.then_some(self.semaphore_poll_ns);
        let timeout_ns = semaphores.into_iter().chain(opens_ns).chain(listens).min();
        let timeout_ns = timeout_ns.map(|ns| ns.min(MAX_SLEEP_NS));
        let timeout = timeout_ns.map(|ns| TimeSpec::new(0, ns.cast_signed()));
        if poll_semaphores {
            self.semaphore_poll_ns = (self.semaphore_poll_ns * 2).min(SEMAPHORE_POLL_MAX_NS);
        }
        let listens = |group: &Group| !group.closed && group.deaf_until_ns <= now;
        let listening: Vec<usize> =
            (0..self.groups.len()).filter(|index| listens(&self.groups[*index])).collect();
        let mut fds = vec![PollFd::new(self.vgpus.waker().as_fd(), PollFlags::POLLIN)];
        fds.extend(listening.iter().map(|index| {
            PollFd::new(self.groups[*index].vgpu.wakeups().as_fd(), PollFlags::POLLIN)
        }));
        self.steps.sleep();
        let woken = ppoll(&mut fds, timeout, None) != Ok(0);
        self.steps.wake(self.step_number);
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any() == Some(true)).collect();
        drop(fds);
        self.vgpus.waker().clear();
        for (index, _) in listening.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            let group = &mut self.groups[*index];
            let taken = group.vgpu.wakeups().take();
            group.woken |= taken.woken;
            group.empty_wakes = group.empty_wakes.saturating_add(u32::from(taken.woken));
            if let Some(more) = group.empty_wakes.checked_sub(EMPTY_WAKES + 1) {
                let doublings = (more / EMPTY_WAKES_TO_DOUBLE).min(2);
                let deaf_ns = (DEAF_NS << doublings).min(MAX_DEAF_NS);
                group.deaf_until_ns = (now_ns() / deaf_ns + 1) * deaf_ns;
            }
            group.closed |= taken.closed;
            if group.woken {
                group.vgpu.counters().wakeups.fetch_add(1, Ordering::Relaxed);
            }
        }
        (woken, timeout_ns)
    }
}
