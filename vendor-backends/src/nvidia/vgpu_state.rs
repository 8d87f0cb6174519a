//! State of a vGPU that the worker's main thread and the backend's threads share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ipc::seqpacket::SeqPacket;
use mdev_core::gpu::{EngineKind, Pending, Usage};

use super::activity::{Activity, COPY_LINGER, LiveAccounting, REST_INTERVAL};
use super::adoption::journal::{Journal, Live};
use super::channels::{Channels, Running, Teardown};
use super::doorbell_poller::DoorbellPoller;
use super::hang_detector::{HangDetector, Hints, Residency, Verdict};
use super::observed_channels::ObservedChannels;
use super::observers::ctxsw_log::CtxswLog;
use super::observers::switch_probe::{Request, SwitchProbe};
use super::signals::Signals;
use super::wire::Report;

/// Poll interval for the rings of a busy vGPU; the resolution of its charged copy time.
const BUSY_INTERVAL: Duration = Duration::from_millis(5);

/// Poll interval for vGPUs on the idle slice; bounds the latency of restoring their normal slice.
const IDLE_SLICE_INTERVAL: Duration = Duration::from_millis(10);

/// Residency after which a kernel may be endless.
const MAYBE_ENDLESS: Duration = Duration::from_millis(40);

/// Maximum delay of closing a gate until the end of a residency.
const MAX_CLOSE_DELAY: Duration = Duration::from_millis(50);

/// Time beyond the slice for which a teardown waits for the engine. Records of the log come late.
const MAX_TEARDOWN_WAIT: Duration = Duration::from_millis(100);

/// State that the threads share.
#[derive(Debug)]
pub struct VgpuState {
    /// Channels of the vGPU, and their observers.
    pub observed: ObservedChannels,
    /// Poller that rings for the guest, unless the guest has the GPU's doorbell.
    pub poller: Option<Arc<DoorbellPoller>>,
    /// Activity of the rings.
    pub activity: Mutex<Activity>,
    /// Signals between the threads.
    pub signals: Signals,
    /// Connection to a new manager that the manager thread has not taken over yet.
    pub next_manager: Mutex<Option<SeqPacket>>,
    /// Size of imported guest memory, in bytes.
    pub imported_bytes: AtomicU64,
    /// Records for the adopting process.
    pub journal: Arc<Journal>,
}

impl VgpuState {
    /// Creates the state of a vGPU without activity.
    pub fn new(
        channels: Channels,
        poller: Option<Arc<DoorbellPoller>>,
        mut ctxsw_log: Option<CtxswLog>,
        switch_probe: Option<SwitchProbe>,
        journal: Arc<Journal>,
    ) -> std::io::Result<Self> {
        if let (Some(log), Some(poller)) = (&mut ctxsw_log, &poller) {
            log.follow(poller.submissions.clone());
        }
        Ok(Self {
            observed: ObservedChannels::new(channels, ctxsw_log, switch_probe),
            poller,
            activity: Mutex::default(),
            signals: Signals::new()?,
            next_manager: Mutex::default(),
            imported_bytes: AtomicU64::new(0),
            journal,
        })
    }

    /// Records engine time and activity. `closing` says that the gate is to be closed.
    pub fn record_accounting(&self, closing: bool) {
        let log = self.observed.ctxsw_log().as_ref().map(CtxswLog::position);
        let used = self.channels().used();
        let count = |counter: fn(&DoorbellPoller) -> &AtomicU64| {
            self.poller.as_ref().map_or(0, |poller| counter(poller).load(Ordering::Relaxed))
        };
        let rings = [count(|poller| &poller.polled), count(|poller| &poller.wakeups)];
        let live = LiveAccounting { log, used, rings, closing, ..self.activity().live() };
        self.journal.write_live(Live::Accounting, &live);
    }

    /// Locks the channels.
    pub fn channels(&self) -> MutexGuard<'_, Channels> {
        self.observed.channels()
    }

    pub(super) fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the work that the engines may execute after all entries were fetched.
    fn engines_running(&self) -> Running {
        if !self.channels().were_used() {
            return Running::default();
        }
        // Copy engines have no log. The last copy may continue for a while.
        let copying = self.activity().since_fetch(EngineKind::Copy) < COPY_LINGER;
        Running { copying, resident: self.observed.residency().is_some(), long_kernel: false }
    }

    /// Returns the work that the engines may execute, before channels are torn down. If compute
    /// channels have work and other vGPUs wait, waits until the engine changes: a group that is not
    /// on the engine can be reset without a stall. Work that keeps the engine is a long kernel.
    pub fn running_before(&self, teardown: Teardown) -> Running {
        let running = self.engines_running();
        if !running.resident || !self.channels().computes_in(teardown, running) {
            return running;
        }
        let limit = self.channels().timeslice() + MAX_TEARDOWN_WAIT;
        let long_kernel = if let Some(switched) = self.observed.await_switch(limit) {
            !switched
        } else {
            // The guest's ring tells, if the probe does not work.
            let exceeds = |residency: Residency| residency.duration > limit;
            let channels = self.channels();
            let shows_work = channels.load.contended && channels.has_queued(EngineKind::Compute);
            drop(channels);
            shows_work && self.observed.residency().is_some_and(exceeds)
        };
        Running { long_kernel, ..self.engines_running() }
    }

    /// Checks for faults, and signals new ones to the worker.
    pub fn note_errors(&self) {
        if self.channels().note_errors() {
            self.signals.raise(Pending::CHANNEL_ERROR);
        }
    }

    /// Resets all groups, or those of one engine, and signals the worker.
    pub fn reset(&self, engine: Option<EngineKind>) {
        let mut channels = self.channels();
        channels.counters.hang_resets += 1;
        channels.reset_groups(engine);
        drop(channels);
        self.signals.raise(Pending::CHANNEL_ERROR);
    }

    /// Resets the compute groups if a kernel hangs. Otherwise returns when to check again, if soon.
    pub(super) fn check_hang(&self, detector: &mut HangDetector) -> Option<Duration> {
        let hints = Hints {
            since_fetch: self.activity().since_fetch(EngineKind::Compute),
            timeslice: self.channels().timeslice(),
        };
        let probe = |request| self.observed.probe(request);
        match detector.check(Instant::now(), hints, || self.observed.residency(), probe) {
            Verdict::NotHung => None,
            // poll() takes whole milliseconds.
            Verdict::CheckAfter(after) => Some(after + Duration::from_millis(1)),
            Verdict::Hung => {
                log::warn!("A kernel exceeds the hang limit while other vGPUs wait: reset");
                self.reset(Some(EngineKind::Compute));
                None
            }
        }
    }

    /// Returns whether a gate that should have closed `waited` ago must stay open for now.
    ///
    /// Closing waits for the running kernel, and blocks all other clients of the driver meanwhile.
    /// A kernel that may be endless is therefore left to the hang detector: the gate closes when
    /// the engine has changed to the probe, whatever the guest's memory shows. `request` is the
    /// request for this closing. While other vGPUs have work, residencies end by themselves, so the
    /// gate closes between two of them.
    pub(super) fn must_delay_closing(
        &self,
        waited: Duration,
        contended: bool,
        request: &mut Option<Request>,
    ) -> bool {
        let Some(residency) = self.observed.residency() else { return false };
        let may_be_endless = residency.duration > MAYBE_ENDLESS;
        let probed = if may_be_endless { self.observed.probe(*request) } else { None };
        *request = probed.map(|probed| probed.request);
        let endless = match probed {
            Some(probed) => !probed.served,
            None => {
                may_be_endless && self.activity().since_fetch(EngineKind::Compute) > MAYBE_ENDLESS
            }
        };
        endless || contended && waited < MAX_CLOSE_DELAY
    }

    /// Returns the interval at which to poll the rings.
    pub(super) fn poll_interval(&self) -> Duration {
        if self.activity().is_pressing() {
            BUSY_INTERVAL
        } else if self.channels().any_idle() {
            IDLE_SLICE_INTERVAL
        } else {
            REST_INTERVAL
        }
    }

    /// Returns the usage of the vGPU.
    pub fn report(&self) -> Report {
        let (slice, busy_groups, load) = {
            let channels = self.channels();
            let groups = channels.sharing(EngineKind::Compute);
            (channels.timeslice() / groups, groups, channels.load)
        };
        let mut compute_ns = 0;
        let mut demand = None;
        if let Some(log) = &mut *self.observed.ctxsw_log() {
            log.demand.set_slices(slice.as_nanos() as u64, load.round.as_nanos() as u64);
            if let Err(error) = log.read() {
                log::debug!("{error}");
            }
            if !log.knows_probe() && !self.channels().had_groups() {
                log.had_only_probe();
            }
            let now = log.now_ns();
            if let Some(now) = now {
                log.withhold_unused(now, load.contended);
            }
            let engine_time = &log.engine_time;
            compute_ns = now.map_or(engine_time.completed_ns, |now| engine_time.total_ns(now));
            demand = now.map(|now| (log.demand, log.demand.waited_ns(now)));
        }
        let (demand, waited_ns) = demand.unwrap_or_default();
        let (busy, copying, had_work, long_kernel) = {
            let mut activity = self.activity();
            if self.poller.is_some() {
                activity.note_demand(Duration::from_nanos(compute_ns.saturating_add(waited_ns)));
            }
            let long_kernel = activity.has_long_kernel();
            (activity.is_busy(), activity.copying, activity.had_work, long_kernel)
        };
        let count = |counter: fn(&DoorbellPoller) -> &AtomicU64| {
            self.poller.as_ref().map_or(0, |poller| counter(poller).load(Ordering::Relaxed))
        };
        let channels = self.channels();
        let counters = channels.counters;
        let usage = Usage {
            engine_ns: compute_ns,
            compute_ns,
            preemptions: demand.preemptions(),
            faults: counters.faults,
            hang_resets: counters.hang_resets,
            gate_closings: counters.gate_closings,
            runnable: busy || demand.has_work(),
            busy_groups,
            waits: *demand.waits(),
            polled_doorbells: count(|poller| &poller.polled),
            wakeups: count(|poller| &poller.wakeups),
            channels: channels.count(),
            imported_bytes: self.imported_bytes.load(Ordering::Acquire),
            ..Default::default()
        };
        Report {
            usage,
            copying_ns: copying.as_nanos() as u64,
            had_work_ns: had_work.as_nanos() as u64,
            long_kernel,
            alive: !self.signals.is_stopped(),
        }
    }
}
