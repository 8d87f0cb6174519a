//! The threads of a worker's backend: one obeys the manager and notices faults, one passes interrupts on.
//!
//! The manager's orders do not wait behind what the guest asks for: pinning 4 GiB of guest memory takes 0.1 s, and a gate
//! must close at once.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mdev_core::gpu::{EngineKind, GpuError, Pending, Usage};
use mdev_core::ids::ChannelId;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::bells::Bells;
use super::channels::Channels;
use super::session::Session;
use super::signals::Signals;
use super::trace::{Trace, Turns};
use super::watch::{self, Turn, Watch};
use super::wire::{FromManager, FromWorker, Report};
use crate::seqpacket::{MAX_PACKET, SeqPacket, decode, encode};

/// How often a busy vGPU's rings are looked at: what its time is charged by.
const LOOK: Duration = Duration::from_millis(5);

/// How often an idle one's are, and notifiers without an event: an event says that something has happened, not that it is
/// written.
const REST: Duration = Duration::from_millis(50);

/// How often those are that have an idle engine's slice: nobody waits longer for his own.
const IDLE_LOOK: Duration = Duration::from_millis(10);

/// How long after its last sign of work an engine is idle, where others wait for theirs.
const IDLE_AFTER: Duration = Duration::from_millis(100);

/// How long after its last sign of work a vGPU counts as busy: the last thing it was given may still run.
const LINGER: Duration = Duration::from_millis(20);

/// How long after its last entry was fetched a copy may go on.
const COPIES_LINGER: Duration = Duration::from_millis(100);

/// A kernel that runs for so long may have no end.
const MAY_BE_ENDLESS: Duration = Duration::from_millis(40);

/// How long a gate that is to close waits for the end of a turn, and how often it looks.
const TURN_ENDS: Duration = Duration::from_millis(50);
const CLOSING_LOOK: Duration = Duration::from_millis(1);

/// Where others come round so often without it, a vGPU has no work that the engine knows of, whatever its ring says.
const PASSED_OVER: u32 = 4;

/// How long entries may wait before somebody rings for them once more.
const RING_AGAIN: Duration = Duration::from_millis(100);

/// What the threads and the client share.
#[derive(Debug)]
pub struct Shared {
    /// The vGPU's channels.
    pub channels: Mutex<Channels>,
    /// Who rings for the guest, unless that does.
    pub bells: Option<Arc<Bells>>,
    /// Its engine time, where the driver tells.
    pub trace: Mutex<Option<Trace>>,
    /// What is seen of its work.
    pub activity: Mutex<Activity>,
    /// What the threads say.
    pub signals: Signals,
    /// A manager that comes later.
    pub next_manager: Mutex<Option<SeqPacket>>,
    /// Guest memory imported, in bytes.
    pub imported: AtomicU64,
}

impl Shared {
    /// The channels. A thread that panicked left them as the driver has them.
    pub fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which engines may be at work for this vGPU, although all of its entries were fetched.
    pub fn running(&self) -> [bool; 2] {
        if !self.channels().were_used() {
            return [false; 2];
        }
        // A copy has no log; the last entry's may still go on for a while.
        let copying = self.activity().stuck(EngineKind::Copy) < COPIES_LINGER;
        [copying, self.turn().is_some()]
    }

    /// Looks for faults, and tells the worker.
    pub fn note_errors(&self) {
        if self.channels().note_errors() {
            self.signals.raise(Pending::CHANNEL_ERROR);
        }
    }

    /// Resets the vGPU's groups, or those of one engine, and tells the worker.
    pub fn reset(&self, engine: Option<EngineKind>) {
        let mut channels = self.channels();
        channels.counters.hang_resets += 1;
        channels.reset_groups(engine);
        drop(channels);
        self.signals.raise(Pending::CHANNEL_ERROR);
    }

    /// For how long this vGPU has had the compute engine without a break, as far as the driver tells.
    fn turn(&self) -> Option<Turn> {
        let made_ns = self.channels().in_use_since(EngineKind::Compute);
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        let trace = trace.as_mut()?;
        trace.read().ok()?;
        // The end of one is not always logged where a channel was reset in it: none is older than its group.
        let since =
            trace.turns.since_ns.filter(|since| made_ns.is_some_and(|made| *since >= made))?;
        let lasts = Duration::from_nanos(trace.now_ns()?.saturating_sub(since));
        Some(Turn { since_ns: since, lasts, switches: trace.switches })
    }

    /// Resets the vGPU if its kernel will not end; or how soon that is to be looked at again.
    fn judge(&self, watch: &mut Watch) -> Option<Duration> {
        let stuck = self.activity().stuck(EngineKind::Compute);
        match watch.look(Instant::now(), stuck, || self.turn()) {
            watch::Verdict::Fine => None,
            // A poll waits for whole milliseconds.
            watch::Verdict::Later(after) => Some(after + Duration::from_millis(1)),
            watch::Verdict::Hung => {
                log::warn!("A kernel does not end while others wait: reset");
                self.reset(Some(EngineKind::Compute));
                None
            }
        }
    }

    /// Whether a gate that has been about to close for so long has to wait. It would wait for the kernel that runs, which
    /// may have no end, and with it everybody who asks the driver for anything: such a one is left to the watch.
    ///
    /// While others have work turns end by themselves, so it closes between two of them; where this one does not end, it
    /// closes if there is progress.
    fn closes_later(&self, waited: Duration, contended: bool) -> bool {
        let Some(turn) = self.turn() else { return false };
        let endless = turn.lasts > MAY_BE_ENDLESS
            && self.activity().stuck(EngineKind::Compute) > MAY_BE_ENDLESS;
        endless || contended && waited < TURN_ENDS
    }

    /// Opens or closes the gate. What the vGPU does not run from then on is not charged.
    fn gate(&self, open: bool) -> Result<(), GpuError> {
        let done = self.channels().gate(open);
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(trace) = &mut *trace
            && done.is_ok()
            && trace.read().is_ok()
            && let Some(now) = trace.now_ns()
        {
            trace.turns.gate(open, now);
            trace.others.forget();
        }
        done
    }

    /// Whether the others have had the compute engine again and again, and this vGPU could have and has not.
    fn is_passed_over(&self) -> bool {
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        trace.as_mut().is_some_and(|trace| {
            trace.read().is_ok()
                && trace.turns.since_ns.is_none()
                && trace.others.rounds() >= PASSED_OVER
        })
    }

    /// How long until the rings are to be looked at again.
    fn pause(&self) -> Duration {
        if self.activity().is_busy() {
            LOOK
        } else if self.channels().any_idle() {
            IDLE_LOOK
        } else {
            REST
        }
    }

    /// How the vGPU is.
    pub fn report(&self) -> Report {
        let (busy, copying, had_work) = {
            let activity = self.activity();
            (activity.is_busy(), activity.copying, activity.had_work)
        };
        let mut turns = Turns::default();
        let mut compute_ns = 0;
        if let Some(trace) = &mut *self.trace.lock().unwrap_or_else(PoisonError::into_inner) {
            if let Err(error) = trace.read() {
                log::debug!("{error}");
            }
            turns = trace.turns;
            compute_ns = trace.now_ns().map_or(turns.done_ns, |now| turns.total_ns(now));
        }
        let count = |of: fn(&Bells) -> &AtomicU64| {
            self.bells.as_ref().map_or(0, |bells| of(bells).load(Ordering::Relaxed))
        };
        let channels = self.channels();
        let counters = channels.counters;
        let usage = Usage {
            engine_ns: compute_ns,
            compute_ns,
            preemptions: turns.ended,
            faults: counters.faults,
            hang_resets: counters.hang_resets,
            gate_closings: counters.gate_closings,
            runnable: busy,
            polled_doorbells: count(|bells| &bells.polled),
            wakeups: count(|bells| &bells.woken),
            channels: channels.count(),
            imported_bytes: self.imported.load(Ordering::Acquire),
            ..Default::default()
        };
        Report {
            usage,
            copying_ns: copying.as_nanos() as u64,
            had_work_ns: had_work.as_nanos() as u64,
            alive: !self.signals.is_stopped(),
        }
    }
}

/// What is seen of a vGPU's work from outside: its rings.
#[derive(Debug)]
pub struct Activity {
    looked: Instant,
    /// When each engine was last seen with work.
    busy: [Option<Instant>; 2],
    progress: [Vec<(ChannelId, u32)>; 2],
    /// When each engine last fetched an entry.
    fetched: [Instant; 2],
    /// Turns on the compute engine so far, and when there was one last.
    turns: (u64, Option<Instant>),
    /// For how long there was something to copy.
    pub copying: Duration,
    /// For how long there was work at all.
    pub had_work: Duration,
}

impl Default for Activity {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            looked: now,
            busy: [None; 2],
            progress: [Vec::new(), Vec::new()],
            fetched: [now; 2],
            turns: (0, None),
            copying: Duration::ZERO,
            had_work: Duration::ZERO,
        }
    }
}

impl Activity {
    fn is_busy(&self) -> bool {
        self.busy.iter().flatten().any(|at| at.elapsed() < LINGER)
    }

    /// Looks at the rings.
    fn look(&mut self, shared: &Shared, others_wait: bool) {
        let now = Instant::now();
        let at_rest =
            |last: Option<Instant>| last.is_none_or(|last| now.duration_since(last) > IDLE_AFTER);
        if others_wait && at_rest(self.busy[EngineKind::Compute as usize]) {
            self.look_at_turns(shared, now);
        }
        let open = shared.channels().is_open();
        // A ring that is never empty is no work: a doorbell that is rung all the time may keep the GPU from saying that it
        // has fetched everything.
        let passed_over =
            open && self.stuck(EngineKind::Compute) > RING_AGAIN && shared.is_passed_over();
        let mut channels = shared.channels();
        for engine in [EngineKind::Copy, EngineKind::Compute] {
            let index = engine as usize;
            let progress = channels.progress(engine);
            let fetched = progress != self.progress[index];
            if fetched {
                self.progress[index] = progress;
                // Some time since then; the engine may be at work on it since then, too.
                self.fetched[index] = self.looked;
            }
            let queued = channels.has_queued(engine);
            if queued && !fetched && now.duration_since(self.fetched[index]) > RING_AGAIN {
                // Either it runs something long, and does not mind, or a ring was lost.
                channels.ring_again();
            }
            if fetched || queued && !(passed_over && engine == EngineKind::Compute) {
                self.busy[index] = Some(now);
                // A gate stops copies, and so does a fault, or a semaphore that they wait for.
                let copies = open && now.duration_since(self.fetched[index]) < COPIES_LINGER;
                if engine == EngineKind::Copy && copies {
                    self.copying += now.duration_since(self.looked);
                }
            }
            let turned = if engine == EngineKind::Compute { self.turns.1 } else { None };
            let rested = at_rest(self.busy[index]) && at_rest(turned);
            if (!rested || others_wait)
                && let Err(error) = channels.set_idle(engine, rested)
            {
                log::warn!("{error}");
            }
        }
        drop(channels);
        if self.is_busy() {
            self.had_work += now.duration_since(self.looked);
        }
        self.looked = now;
        let compute = self.busy[EngineKind::Compute as usize];
        // While others wait, whoever has the engine uses it: it would be taken away from an idle one.
        if others_wait || compute.is_some_and(|at| now.duration_since(at) < LINGER) {
            let mut trace = shared.trace.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(trace) = &mut *trace
                && let Some(now) = trace.now_ns()
            {
                trace.turns.counts_until_ns = now + LINGER.as_nanos() as u64;
            }
        }
    }

    /// A kernel may run for long with nothing queued behind it. Doorbells that ring for nothing make no turns in the log.
    fn look_at_turns(&mut self, shared: &Shared, now: Instant) {
        let mut trace = shared.trace.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(trace) = &mut *trace
            && trace.read().is_ok()
            && (trace.turns.since_ns.is_some() || trace.turns.ended != self.turns.0)
        {
            self.turns = (trace.turns.ended, Some(now));
        }
    }

    /// How long ago the engine fetched an entry.
    fn stuck(&self, engine: EngineKind) -> Duration {
        self.fetched[engine as usize].elapsed()
    }
}

/// Obeys the manager until it is over. Without one it waits for the next.
pub fn obey(
    shared: &Shared,
    session: &Arc<Session>,
    manager: SeqPacket,
    faults: &OwnedFd,
    hang: Option<Duration>,
) {
    let mut manager = Some(manager);
    let mut watch = Watch::new(hang);
    let mut soon = None;
    // Since when the gate is to close.
    let mut closing: Option<Instant> = None;
    let mut buffer = vec![0; MAX_PACKET];
    while !shared.signals.is_stopped() {
        let readable = {
            let mut fds = vec![
                PollFd::new(shared.signals.stop_event(), PollFlags::POLLIN),
                PollFd::new(faults.as_fd(), PollFlags::POLLIN | PollFlags::POLLPRI),
            ];
            fds.extend(manager.as_ref().map(|m| PollFd::new(m.as_fd(), PollFlags::POLLIN)));
            let pause = if closing.is_some() { CLOSING_LOOK } else { shared.pause() };
            let pause = pause.min(soon.unwrap_or(REST));
            let timeout = PollTimeout::try_from(pause).unwrap_or(PollTimeout::MAX);
            let _ = poll(&mut fds, timeout);
            fds.get(2).is_some_and(|fd| fd.any() == Some(true))
        };
        shared.note_errors();
        shared.activity().look(shared, watch.is_contended());
        soon = shared.judge(&mut watch);
        if closing.is_some_and(|since| !shared.closes_later(since.elapsed(), watch.is_contended()))
        {
            closing = None;
            if let Err(error) = shared.gate(false) {
                log::warn!("{error}");
            }
        }
        if let Ok(mut next) = shared.next_manager.lock()
            && let Some(next) = next.take()
        {
            manager = Some(next);
            continue;
        }
        let Some(socket) = manager.as_ref().filter(|_| readable) else { continue };
        let order = match socket.try_recv(&mut buffer) {
            Ok(Some(packet)) => decode::<FromManager>(&buffer[..packet.len]),
            Ok(None) => Err(std::io::ErrorKind::BrokenPipe.into()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) => Err(error),
        };
        match order {
            Ok(order) => {
                if let FromManager::Usage(_, others_wait) = order {
                    watch.others_wait(others_wait, Instant::now());
                }
                if let FromManager::SetGate(open) = order {
                    let later = !open && shared.closes_later(Duration::ZERO, watch.is_contended());
                    closing = later.then(|| closing.unwrap_or_else(Instant::now));
                    if later {
                        continue;
                    }
                }
                if let Some(answer) = carry_out(shared, session, &order)
                    && let Ok(bytes) = encode(&answer)
                {
                    // A manager that does not read gets no answers.
                    let _ = socket.try_send(&bytes, &[]);
                }
            }
            Err(error) => {
                log::debug!("The manager's connection: {error}");
                manager = None;
                closing = None;
                // Nobody else would: a guest goes on without its manager.
                if let Err(error) = shared.gate(true) {
                    log::warn!("{error}");
                }
            }
        }
    }
}

fn carry_out(shared: &Shared, session: &Session, order: &FromManager) -> Option<FromWorker> {
    let done = match *order {
        FromManager::SetTimeslice(slice) => shared.channels().set_slice(slice),
        FromManager::SetGate(open) => shared.gate(open),
        FromManager::Reset => {
            shared.reset(None);
            Ok(())
        }
        FromManager::Usage(number, _) => {
            return Some(FromWorker::Usage(number, shared.report()));
        }
        FromManager::Evict => {
            session.end();
            shared.signals.raise(Pending::DEVICE_LOST);
            Ok(())
        }
        FromManager::Grant(_) => Err(GpuError::Invalid("a vGPU is granted once")),
    };
    if let Err(error) = done {
        log::warn!("The manager's order failed: {error}");
    }
    None
}

/// Passes non-stall interrupts on until it is over.
///
/// The GPU tells every client of every channel's interrupt, so a guest is woken for others' too: it looks at its
/// semaphores and goes back to sleep. A vGPU without channels is left alone.
pub fn interrupt(shared: &Shared, event: &OwnedFd) {
    while !shared.signals.is_stopped() {
        let mut fds = [
            PollFd::new(shared.signals.stop_event(), PollFlags::POLLIN),
            PollFd::new(event.as_fd(), PollFlags::POLLIN | PollFlags::POLLPRI),
        ];
        if poll(&mut fds, PollTimeout::NONE).is_err() || fds[1].any() != Some(true) {
            continue;
        }
        let vectors = shared.channels().vectors();
        if vectors != 0 {
            shared.signals.raise(Pending::NONSTALL);
            shared.signals.signal(vectors);
        }
    }
}
