//! Activity of a vGPU, as its rings show it.
//!
//! * `idle_check`, `wait_check`: checks of what the rings may hide
//! * `long_kernel`: detection of long kernels of programs
//! * `live`: the record of it, for the adopting process

mod idle_check;
mod live;
mod long_kernel;
mod wait_check;

use std::time::{Duration, Instant};

use mdev_core::gpu::EngineKind;
use mdev_core::ids::ChannelId;

use self::idle_check::IdleCheck;
pub use self::live::LiveAccounting;
use self::long_kernel::LongKernel;
use self::wait_check::WaitCheck;
use super::adoption::moment::Moment;
use super::channels::Channels;
use super::observed_channels::ObservedChannels;

/// Time after the last sign of work after which an engine counts as idle, if other vGPUs wait.
const IDLE_AFTER: Duration = Duration::from_millis(100);

/// Time after the last sign of work for which a vGPU counts as busy: its last work may still run.
const BUSY_LINGER: Duration = Duration::from_millis(20);

/// Time after the last fetched entry for which a copy may continue.
pub(super) const COPY_LINGER: Duration = Duration::from_millis(100);

/// Interval at which the log is read for residencies of others.
const PASSED_OVER_INTERVAL: Duration = Duration::from_millis(20);

/// Time for which entries may wait before the doorbell is rung again.
const RING_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Longest time without a process for which a vGPU is charged for work that was in progress.
const MAX_GAP: Duration = Duration::from_secs(1);

/// Poll interval for the rings of a vGPU that rests, and for notifiers: the driver may raise the
/// fault event before it writes the notifier.
pub(super) const REST_INTERVAL: Duration = Duration::from_millis(50);

/// Activity of a vGPU's rings.
#[derive(Debug)]
pub struct Activity {
    sampled_at: Instant,
    /// When each engine was last seen with work.
    busy_at: [Option<Instant>; 2],
    /// `GP_GET` of the channels of each engine.
    gp_gets: [Vec<(ChannelId, u32)>; 2],
    /// When each engine last fetched an entry.
    fetched_at: [Instant; 2],
    /// Number of rings for new entries, for each engine, and when the last ones were seen.
    submissions: [u64; 2],
    rung_at: [Option<Instant>; 2],
    /// Whether the vGPU was passed over, when that was read in the log, and how often the vGPU had
    /// rung for the compute engine then.
    passed_over: (bool, Option<Instant>, u64),
    /// Check of what the guest shows as idle.
    idle_check: IdleCheck,
    /// Check of what may wait although the guest shows no work.
    wait_check: WaitCheck,
    /// Detection of long kernels.
    long_kernel: LongKernel,
    /// Number of completed residencies on the compute engine.
    residencies: u64,
    /// When the vGPU was last resident on the compute engine.
    resident_at: Option<Instant>,
    /// Total time with copies to do.
    pub copying: Duration,
    /// Total time with any work to do.
    pub had_work: Duration,
    /// Time with copies to do, or with any work if the log does not tell, since the last report.
    had_other_work: Duration,
    /// Engine time and waits for the compute engine at the last report, and when that was.
    demand: (Duration, Instant),
}

impl Default for Activity {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            sampled_at: now,
            busy_at: [None; 2],
            gp_gets: [Vec::new(), Vec::new()],
            fetched_at: [now; 2],
            submissions: [0; 2],
            rung_at: [None; 2],
            passed_over: (false, None, 0),
            idle_check: IdleCheck::default(),
            wait_check: WaitCheck::default(),
            long_kernel: LongKernel::new(now),
            residencies: 0,
            resident_at: None,
            copying: Duration::ZERO,
            had_work: Duration::ZERO,
            had_other_work: Duration::ZERO,
            demand: (Duration::ZERO, now),
        }
    }
}

/// Conditions under which the rings are sampled.
#[derive(Clone, Copy, Debug)]
struct Conditions {
    now: Instant,
    /// Other vGPUs have work.
    contended: bool,
    gate_open: bool,
    /// The GPU has run other processes instead of this vGPU.
    passed_over: bool,
    /// The guest rings the GPU's doorbell itself, so an idle guest may ring without a count.
    direct_doorbell: bool,
}

impl Activity {
    /// Adopts the activity of an earlier process. What was in progress has gone on since
    /// then.
    pub(super) fn adopted(live: &LiveAccounting) -> Self {
        let since = live.at.map(|at| at.instant().elapsed().min(MAX_GAP)).unwrap_or_default();
        let gap = |was: bool| if was { since } else { Duration::ZERO };
        let mut activity = Self {
            copying: live.copying.saturating_add(gap(live.was_copying)),
            had_work: live.had_work.saturating_add(gap(live.was_busy)),
            ..Self::default()
        };
        // Until the rings are looked at.
        activity.busy_at = [Some(activity.sampled_at); 2];
        activity
    }

    /// Returns what an adopting process needs.
    pub(super) fn live(&self) -> LiveAccounting {
        LiveAccounting {
            at: Some(Moment::now()),
            copying: self.copying,
            had_work: self.had_work,
            was_copying: self.since_fetch(EngineKind::Copy) < COPY_LINGER,
            was_busy: self.is_busy(),
            ..LiveAccounting::default()
        }
    }

    /// Notes the total of engine time and waits for the compute engine, as the log shows them.
    pub(super) fn note_demand(&mut self, total: Duration) {
        let (before, since) = std::mem::replace(&mut self.demand, (total, Instant::now()));
        let demanded = total.saturating_sub(before).min(since.elapsed());
        self.had_work += demanded.max(std::mem::take(&mut self.had_other_work));
    }

    /// Returns whether the vGPU has work.
    pub(super) fn is_busy(&self) -> bool {
        self.busy_at.iter().flatten().any(|at| at.elapsed() < BUSY_LINGER)
    }

    /// Returns whether a long kernel of a program runs.
    pub(super) fn has_long_kernel(&self) -> bool {
        self.long_kernel.is_running(Instant::now())
    }

    /// Returns the time since the engine fetched an entry.
    pub(super) fn since_fetch(&self, engine: EngineKind) -> Duration {
        self.fetched_at[engine as usize].elapsed()
    }

    /// Returns whether the rings should be sampled soon.
    pub(super) fn is_pressing(&self) -> bool {
        self.is_busy() || self.wait_check.is_asking()
    }

    /// Samples the rings, and sets or removes the idle slice.
    pub(super) fn sample(&mut self, observed: &ObservedChannels, contended: bool) {
        let now = Instant::now();
        if contended && is_idle(self.busy_at[EngineKind::Compute as usize], now) {
            self.sample_residency(observed, now);
        }
        let gate_open = observed.channels().is_gate_open();
        let direct_doorbell = observed.channels().has_direct_doorbell();
        // A ring that is never empty, or always fetched, may have no work for the engine.
        let waits = contended || self.since_fetch(EngineKind::Compute) > RING_AGAIN_AFTER;
        let passed_over = gate_open && waits && self.is_passed_over(observed, now);
        let conditions = Conditions { now, contended, gate_open, passed_over, direct_doorbell };
        let mut channels = observed.channels();
        for engine in [EngineKind::Copy, EngineKind::Compute] {
            self.sample_engine(&mut channels, engine, conditions);
        }
        drop(channels);
        if !contended && gate_open {
            self.check_idle(observed, now);
        }
        if gate_open {
            self.check_waiting(observed, now);
        }
        // The log shows demand for the compute engine only, and a submission is known only where
        // the worker rings.
        let copies = self.busy_at[EngineKind::Copy as usize];
        let passed = now.duration_since(self.sampled_at);
        if direct_doorbell && self.is_busy() {
            self.had_work += passed;
        } else if copies.is_some_and(|at| now.duration_since(at) < BUSY_LINGER) {
            self.had_other_work += passed;
        }
        self.sampled_at = now;
        let busy_at = self.busy_at[EngineKind::Compute as usize];
        // While other vGPUs wait, a resident context has work. The GPU would switch away from an
        // idle context.
        if (contended || busy_at.is_some_and(|at| now.duration_since(at) < BUSY_LINGER))
            && let Some(log) = &mut *observed.ctxsw_log()
            && let Some(now_ns) = log.now_ns()
        {
            let work_ns = now_ns.saturating_sub(REST_INTERVAL.as_nanos() as u64);
            log.engine_time.count_until(work_ns, now_ns + BUSY_LINGER.as_nanos() as u64);
        }
        self.check_long_kernel(observed, now);
    }

    /// Looks at the engine time of a program without progress.
    fn check_long_kernel(&mut self, observed: &ObservedChannels, now: Instant) {
        if !self.long_kernel.is_suspected(now) || !observed.channels().compute_for_programs() {
            return;
        }
        if let Some(log) = &mut *observed.ctxsw_log()
            && log.read().is_ok()
            && let Some(now_ns) = log.now_ns()
        {
            self.long_kernel.note_engine_time(now, log.engine_time.total_ns(now_ns));
        }
    }

    /// Returns whether other processes repeatedly had the compute engine while this vGPU had not.
    fn is_passed_over(&mut self, observed: &ObservedChannels, now: Instant) -> bool {
        let (passed_over, read_at, rings) = self.passed_over;
        let rings_now = observed.channels().submissions(EngineKind::Compute);
        let is_recent = read_at.is_some_and(|at| now.duration_since(at) < PASSED_OVER_INTERVAL);
        // New work may not be what others had the engine instead of.
        if is_recent && rings == rings_now {
            return passed_over;
        }
        self.passed_over = (observed.is_passed_over(), Some(now), rings_now);
        if self.passed_over.0 {
            observed.note_no_work();
        }
        self.passed_over.0
    }

    /// Checks a vGPU that shows no work although its context is resident.
    fn check_idle(&mut self, observed: &ObservedChannels, now: Instant) {
        let engine = EngineKind::Compute;
        let shows_work =
            self.busy_at[engine as usize].is_some_and(|at| now.duration_since(at) < BUSY_LINGER);
        if shows_work {
            return;
        }
        let rings = observed.channels().rings(engine);
        if rings > 0 && self.idle_check.has_work(observed, now, rings) {
            self.busy_at[engine as usize] = Some(now);
        }
    }

    /// Checks a vGPU whose entries have been fetched and that may wait for the engine.
    fn check_waiting(&mut self, observed: &ObservedChannels, now: Instant) {
        let busy_at = &mut self.busy_at[EngineKind::Compute as usize];
        let is_busy = busy_at.is_some_and(|at| now.duration_since(at) < BUSY_LINGER);
        if !self.wait_check.is_needed(is_busy) {
            return;
        }
        if observed.channels().in_use_since(EngineKind::Compute).is_none() {
            self.wait_check = WaitCheck::default();
        } else if let Some(seen) = observed.seen_in_log()
            && self.wait_check.waits(now, seen, |request| observed.probe(request))
        {
            *busy_at = Some(now);
        }
        if !self.wait_check.may_have_work() {
            observed.note_no_work();
        }
    }

    fn sample_engine(
        &mut self,
        channels: &mut Channels,
        engine: EngineKind,
        conditions: Conditions,
    ) {
        let Conditions { now, contended, gate_open, passed_over, direct_doorbell } = conditions;
        let index = engine as usize;
        let gp_gets = channels.gp_gets(engine);
        let shows_fetch = gp_gets != self.gp_gets[index];
        self.gp_gets[index] = gp_gets;
        // A ring is counted by the worker: a guest that hides entries does not hide rings.
        let submissions = channels.submissions(engine);
        let rung = std::mem::replace(&mut self.submissions[index], submissions) < submissions;
        if rung {
            self.rung_at[index] = Some(now);
        }
        let fetched = shows_fetch || rung;
        if shows_fetch || rung && engine == EngineKind::Copy {
            // The fetch was after the previous sample, and the work may have run since then.
            self.fetched_at[index] = self.sampled_at;
        }
        if fetched && engine == EngineKind::Compute {
            self.wait_check.note_work(now);
            self.long_kernel.note_progress(now);
        }
        let queued = channels.has_queued(engine);
        if queued && !fetched && now.duration_since(self.fetched_at[index]) > RING_AGAIN_AFTER {
            // Either the engine executes long work, or the GPU has lost a ring.
            channels.ring_again();
        }
        if (fetched || queued) && !(passed_over && engine == EngineKind::Compute) {
            self.busy_at[index] = Some(now);
            // Copies stop behind a closed gate, after a fault, and at a semaphore.
            let copies = gate_open && now.duration_since(self.fetched_at[index]) < COPY_LINGER;
            if engine == EngineKind::Copy && copies {
                self.copying += now.duration_since(self.sampled_at);
            }
        }
        if let Err(error) = channels.share_slice(engine, now) {
            log::warn!("{error}");
        }
        let resident_at = if engine == EngineKind::Compute { self.resident_at } else { None };
        let quiet = is_idle(self.busy_at[index], now) && is_idle(resident_at, now);
        // A vGPU that rests keeps its slice for its next request. One that rings without work for
        // the engine takes time from others.
        let rings = self.rung_at[index].is_some_and(|at| now.duration_since(at) < IDLE_AFTER);
        let rings_in_vain = rings && passed_over && engine == EngineKind::Compute;
        let idle = quiet && (direct_doorbell || rings_in_vain);
        if (!idle || contended)
            && let Err(error) = channels.set_idle(engine, idle)
        {
            log::warn!("{error}");
        }
    }

    /// Samples the context switch log: a long kernel may run without queued entries. Rings without
    /// entries cause no context switches.
    fn sample_residency(&mut self, observed: &ObservedChannels, now: Instant) {
        if let Some(log) = &mut *observed.ctxsw_log()
            && log.read().is_ok()
            && (log.engine_time.resident_since_ns.is_some()
                || log.engine_time.residencies != self.residencies)
        {
            self.residencies = log.engine_time.residencies;
            self.resident_at = Some(now);
        }
    }
}

/// Returns whether the last sign of work is long ago.
fn is_idle(last: Option<Instant>, now: Instant) -> bool {
    last.is_none_or(|last| now.duration_since(last) > IDLE_AFTER)
}
