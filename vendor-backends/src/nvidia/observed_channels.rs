//! Channels of a vGPU together with their observers, which threads of the worker share.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mdev_core::gpu::{EngineKind, GpuError};

use super::channels::Channels;
use super::hang_detector::Residency;
use super::observers::ctxsw_log::{CtxswLog, Seen};
use super::observers::switch_probe::{Probed, Request, SwitchProbe};

/// Maximum time to wait for the engine before a channel of several is freed, and interval of
/// looking at it. The hang detector acts earlier.
pub(super) const MAX_SWITCH_WAIT: Duration = Duration::from_secs(2);
const SWITCH_INTERVAL: Duration = Duration::from_millis(2);

/// Minimum time without a residency before the GPU is taken to have no work of this vGPU.
const ABSENT: Duration = Duration::from_millis(100);

/// Rounds of the runlist without a residency before the GPU is taken to have no work of this vGPU.
/// With many vGPUs, a round takes longer than [`ABSENT`].
const ABSENT_ROUNDS: u32 = 4;

/// Residencies that another process must have had, while this vGPU had none, before the GPU is
/// taken to have no work of this vGPU, whatever its rings contain.
const PASSED_OVER: u32 = 4;

/// Channels of a vGPU, and what shows their use of the compute engine.
#[derive(Debug)]
pub struct ObservedChannels {
    channels: Mutex<Channels>,
    /// Context switch log, if the driver has one.
    ctxsw_log: Mutex<Option<CtxswLog>>,
    /// Probe for context switches, if it works.
    switch_probe: Mutex<Option<SwitchProbe>>,
}

impl ObservedChannels {
    /// Puts channels and their observers together.
    pub fn new(
        channels: Channels,
        ctxsw_log: Option<CtxswLog>,
        switch_probe: Option<SwitchProbe>,
    ) -> Self {
        Self {
            channels: Mutex::new(channels),
            ctxsw_log: Mutex::new(ctxsw_log),
            switch_probe: Mutex::new(switch_probe),
        }
    }

    /// Locks the channels. They match the driver's state even if a thread panicked.
    pub fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the probe for context switches.
    pub fn switch_probe(&self) -> MutexGuard<'_, Option<SwitchProbe>> {
        self.switch_probe.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the context switch log.
    pub fn ctxsw_log(&self) -> MutexGuard<'_, Option<CtxswLog>> {
        self.ctxsw_log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current residency on the compute engine, as far as the driver logs it.
    pub fn residency(&self) -> Option<Residency> {
        let created_ns = self.channels().in_use_since(EngineKind::Compute);
        let mut log = self.ctxsw_log();
        let log = log.as_mut()?;
        log.read().ok()?;
        // After a channel reset, the end of a residency may be missing in the log. A residency from
        // before the creation of the group has therefore ended.
        let current = |since: &u64| created_ns.is_some_and(|created| *since >= created);
        let since_ns = log.engine_time.resident_since_ns.filter(current)?;
        let duration = Duration::from_nanos(log.now_ns()?.saturating_sub(since_ns));
        Some(Residency { since_ns, duration, switches: log.switches })
    }

    /// Asks for a context switch, unless `request` was made before. Returns the state of the
    /// request. None if the probe does not work.
    pub fn probe(&self, request: Option<Request>) -> Option<Probed> {
        let mut probe = self.switch_probe();
        let probe = probe.as_mut().filter(|probe| probe.works())?;
        let request = request.unwrap_or_else(|| probe.request());
        let requested_at = probe.requested_at();
        Some(Probed { request, requested_at, served: probe.is_served(request) })
    }

    /// Waits until the engine changes to the probe, or until the hang detector has reset the
    /// groups, if other vGPUs have work. Freeing a channel of a group waits for the kernel that
    /// runs, and blocks all clients of the driver meanwhile. Returns false after `limit`, and None
    /// if the probe does not work.
    pub fn await_switch(&self, limit: Duration) -> Option<bool> {
        let (started, mut request) = (Instant::now(), None);
        while self.channels().load.contended && self.residency().is_some() {
            let probed = self.probe(request)?;
            if probed.served {
                break;
            }
            if started.elapsed() >= limit {
                return Some(false);
            }
            request = Some(probed.request);
            std::thread::sleep(SWITCH_INTERVAL);
        }
        Some(true)
    }

    /// Opens or closes the gate. Engine time behind a closed gate is not charged.
    pub fn set_gate(&self, open: bool) -> Result<(), GpuError> {
        let done = self.channels().set_gate(open);
        let mut log = self.ctxsw_log();
        if let Some(log) = &mut *log
            && done.is_ok()
            && log.read().is_ok()
            && let Some(now) = log.now_ns()
        {
            log.gate(open, now);
        }
        done
    }

    /// Returns whether the vGPU is resident on the compute engine, and how often it was, as of the
    /// last time that the log was read, or as of now. None if the log does not tell the vGPU from
    /// the probe.
    pub fn residencies(&self, now: bool) -> Option<(bool, u64)> {
        let mut log = self.ctxsw_log();
        let log = log.as_mut()?;
        if now {
            log.read().ok()?;
        }
        if !log.knows_probe() {
            return None;
        }
        Some((log.engine_time.resident_since_ns.is_some(), log.engine_time.residencies))
    }

    /// Returns what the log shows about the compute engine. None if the log does not tell the vGPU
    /// from the probe.
    pub fn seen_in_log(&self) -> Option<Seen> {
        let mut log = self.ctxsw_log();
        let log = log.as_mut()?;
        log.read().ok()?;
        let now_ns = log.now_ns().filter(|_| log.knows_probe())?;
        let since = |at_ns: u64| Duration::from_nanos(now_ns.saturating_sub(at_ns));
        Some(Seen {
            resident: log.engine_time.resident_since_ns.is_some(),
            residencies: log.engine_time.residencies,
            since_resident: since(log.engine_time.last_resident_ns),
            since_switch: since(log.last_record_ns),
        })
    }

    /// Returns whether other processes repeatedly had the compute engine while this vGPU had not.
    pub fn is_passed_over(&self) -> bool {
        let absent = ABSENT.max(self.channels().load.round.saturating_mul(ABSENT_ROUNDS));
        let mut log = self.ctxsw_log();
        log.as_mut().is_some_and(|log| {
            let Ok(_) = log.read() else { return false };
            let last_ns = log.demand.absent_since_ns(log.engine_time.last_resident_ns);
            log.engine_time.resident_since_ns.is_none()
                && log.others.have_passed_over(PASSED_OVER)
                && log
                    .now_ns()
                    .is_some_and(|now| now.saturating_sub(last_ns) > absent.as_nanos() as u64)
        })
    }

    /// Notes that the vGPU has no work for the compute engine, whatever its rings contain.
    pub fn note_no_work(&self) {
        if let Some(log) = &mut *self.ctxsw_log() {
            log.demand.note_no_work();
        }
    }
}
