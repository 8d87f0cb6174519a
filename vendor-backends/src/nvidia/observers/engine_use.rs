//! Use of a vGPU's time on the compute engine: what of the residencies that the log shows was work.

use super::engine_time::EngineTime;
use super::used_time::{Reading, UsedTime};
use super::utilization::Utilization;
use crate::nvidia::device::Device;
use nvidia_rm::ctxsw_record::{CtxswRecord, END, ENGINE_RESET, START};

/// Process in place of this one, for the context of the probe.
pub const PROBE: u64 = u64::MAX;

/// Longest time between two residencies in which the engine changes contexts, the probe's included.
const LONGEST_SWITCH_NS: u64 = 1_000_000;

/// Residencies on the compute engine, with and without work, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Residencies {
    /// Start of the current one, and whether it is one of this process.
    current: Option<(u64, bool)>,
    /// Total times of this process and of all processes.
    total_ns: [u64; 2],
    /// End of the last one, and the total time of changes from one to the next.
    ended_ns: u64,
    switching_ns: u64,
}

impl Residencies {
    fn add(&mut self, record: &CtxswRecord, process: u64) {
        if matches!(record.tag, START | END | ENGINE_RESET) {
            self.total_ns = self.until(record.at_ns);
            if self.current.take().is_some() {
                self.ended_ns = record.at_ns;
            }
            if record.tag == START && record.process != PROBE {
                self.current = Some((record.at_ns, record.process == process));
                let gap_ns = record.at_ns.saturating_sub(self.ended_ns);
                self.switching_ns += if gap_ns < LONGEST_SWITCH_NS { gap_ns } else { 0 };
            }
        }
    }

    /// Returns the total times until `at_ns`.
    fn until(&self, at_ns: u64) -> [u64; 2] {
        let [mut own, mut all] = self.total_ns;
        if let Some((since, is_own)) = self.current {
            let ns = at_ns.saturating_sub(since);
            all += ns;
            own += if is_own { ns } else { 0 };
        }
        [own, all]
    }
}

/// Part of the time, one in so many, for which the work of a vGPU that competes waits, at least.
/// Brief work waits for less.
const COMPETING_PART: u64 = 4;

/// Time between two looks at the GPU's utilization, and while the engine is in use all the time.
const SAMPLE_INTERVAL_NS: u64 = 400_000_000;
const SATURATED_INTERVAL_NS: u64 = 2_000_000_000;

/// Use of a vGPU's time on the engine.
#[derive(Debug)]
pub struct EngineUse {
    utilization: Utilization,
    used: UsedTime,
    residencies: Residencies,
    /// Engine time without what was not used, and its total.
    counted_ns: u64,
    charged_ns: u64,
    /// Time of the last reading, and the total time that work had waited then.
    read_ns: u64,
    waited_ns: u64,
    sampled_ns: u64,
    saturated: bool,
}

impl EngineUse {
    /// Starts with the engine time that was counted before.
    pub fn new(device: &Device, counted_ns: u64) -> Self {
        Self {
            utilization: Utilization::new(&device.subdevice),
            used: UsedTime::default(),
            residencies: Residencies::default(),
            counted_ns,
            charged_ns: 0,
            read_ns: 0,
            waited_ns: 0,
            sampled_ns: 0,
            saturated: false,
        }
    }

    /// Notes that the engine time begins anew.
    pub fn restart(&mut self) {
        self.counted_ns = 0;
    }

    /// Adds a record of the log. `process` is the worker's own.
    pub fn add(&mut self, record: &CtxswRecord, process: u64) {
        self.residencies.add(record, process);
    }

    /// Takes the time that was not used off the engine time until `now_ns`. `waited_ns` is the
    /// total time that work has waited; `contended` says that other vGPUs have work.
    pub fn withhold_unused(
        &mut self,
        engine_time: &mut EngineTime,
        waited_ns: u64,
        now_ns: u64,
        contended: bool,
    ) {
        let competes = self.competes(now_ns, waited_ns) || contended;
        self.charged_ns += engine_time.total_ns(now_ns).saturating_sub(self.counted_ns);
        let reading = Reading {
            at_ns: now_ns,
            charged_ns: self.charged_ns,
            resident: self.residencies.until(now_ns),
            switching_ns: self.residencies.switching_ns,
        };
        engine_time.withhold(self.used.advance(reading, competes), now_ns);
        self.counted_ns = engine_time.total_ns(now_ns);
        if self.wants_samples(now_ns, competes) {
            self.sampled_ns = now_ns;
            for sample in self.utilization.read() {
                self.saturated = self.used.sample(&sample);
            }
        }
    }

    /// Returns whether the vGPU competes for the engine: its work waited for much of the time since
    /// the last reading.
    fn competes(&mut self, now_ns: u64, waited_ns: u64) -> bool {
        let passed_ns = now_ns.saturating_sub(std::mem::replace(&mut self.read_ns, now_ns));
        let before_ns = std::mem::replace(&mut self.waited_ns, waited_ns);
        waited_ns.saturating_sub(before_ns) > passed_ns / COMPETING_PART
    }

    /// Returns whether the utilization is to be read.
    fn wants_samples(&self, now_ns: u64, competes: bool) -> bool {
        let interval_ns = if self.saturated { SATURATED_INTERVAL_NS } else { SAMPLE_INTERVAL_NS };
        self.utilization.is_supported()
            && !competes
            && now_ns.saturating_sub(self.sampled_ns) >= interval_ns
            && self.used.charged_since_ns(self.sampled_ns) > 0
    }
}
