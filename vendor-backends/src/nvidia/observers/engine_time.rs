//! Engine time of a process, by the records of the context switch log.

use serde::{Deserialize, Serialize};

use nvidia_rm::ctxsw_record::{CtxswRecord, END, ENGINE_RESET, START};

/// Engine time of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineTime {
    /// Engine time of completed residencies, in nanoseconds.
    pub completed_ns: u64,
    /// Start of the current residency.
    pub resident_since_ns: Option<u64>,
    /// Start or end of the last residency, or the opening of the gate.
    pub last_resident_ns: u64,
    /// Part of the current residency in which the context had no work.
    idle_ns: u64,
    /// Number of completed residencies.
    pub residencies: u64,
    /// End of the time that counts. A context without work stays resident until another context
    /// needs the engine.
    pub counts_until_ns: u64,
    /// The process was resident when its gate closed.
    resident_at_gate: bool,
}

impl EngineTime {
    /// Records that the gate has opened or closed. Behind a closed gate no time counts.
    pub fn gate(&mut self, open: bool, now_ns: u64) {
        if open {
            self.last_resident_ns = self.last_resident_ns.max(now_ns);
        }
        if !open {
            self.resident_at_gate |= self.resident_since_ns.is_some();
            self.end_residency(now_ns);
        } else if std::mem::take(&mut self.resident_at_gate) && self.resident_since_ns.is_none() {
            // The engine was idle meanwhile, so the log has no record of the adoption.
            self.resident_since_ns = Some(now_ns);
        }
    }

    /// Adds a record of the log.
    pub fn add(&mut self, record: &CtxswRecord, process: u64) {
        self.resident_at_gate &= !matches!(record.tag, START | ENGINE_RESET)
            && (record.tag != END || record.process != process);
        match record.tag {
            START if record.process == process => {
                self.end_residency(record.at_ns);
                self.resident_since_ns = Some(record.at_ns);
                self.last_resident_ns = record.at_ns;
            }
            END if record.process == process => self.end_residency(record.at_ns),
            // Another context has the engine.
            START | ENGINE_RESET => self.end_residency(record.at_ns),
            _ => {}
        }
    }

    /// Lets the first `ns` nanoseconds of the current residency not count.
    pub(super) fn begin_without_work(&mut self, ns: u64) {
        self.idle_ns = ns;
    }

    fn end_residency(&mut self, at_ns: u64) {
        if let Some(since) = self.resident_since_ns.take() {
            self.completed_ns += self.counted_ns(since, at_ns);
            self.residencies += 1;
            self.last_resident_ns = at_ns;
            self.idle_ns = 0;
        }
    }

    /// Returns the part of a residency that counts.
    fn counted_ns(&self, since_ns: u64, until_ns: u64) -> u64 {
        until_ns.min(self.counts_until_ns).saturating_sub(since_ns + self.idle_ns)
    }

    /// Takes time that was not used off what counts. No more than has been counted.
    pub(super) fn withhold(&mut self, ns: u64, now_ns: u64) {
        let of_this =
            self.resident_since_ns.map_or(0, |since| self.counted_ns(since, now_ns)).min(ns);
        self.idle_ns += of_this;
        self.completed_ns = self.completed_ns.saturating_sub(ns - of_this);
    }

    /// Lets the time until `until_ns` count. If no time counted lately, the work began at
    /// `work_ns` at the earliest: the context was resident without work before.
    pub fn count_until(&mut self, work_ns: u64, until_ns: u64) {
        if let Some(since) = self.resident_since_ns {
            self.idle_ns += work_ns.saturating_sub(self.counts_until_ns.max(since));
        }
        self.counts_until_ns = self.counts_until_ns.max(until_ns);
    }

    /// Notes that the process had work until `at_ns`, when it lost the engine, whether or not that
    /// was known in time: a turn of one of many vGPUs may begin and end between two looks at its
    /// rings.
    pub fn works_until(&mut self, at_ns: u64) {
        self.counts_until_ns = self.counts_until_ns.max(at_ns);
    }

    /// Returns the total engine time until `now_ns` of the GPU's clock, in nanoseconds.
    pub fn total_ns(&self, now_ns: u64) -> u64 {
        let current = self.resident_since_ns.map_or(0, |since| self.counted_ns(since, now_ns));
        self.completed_ns + current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(tag: u8, process: u64, at_ns: u64) -> CtxswRecord {
        CtxswRecord { tag, number: 0, context: 1, process, at_ns }
    }

    #[test]
    fn residencies_are_added_up() {
        let mut time = EngineTime { counts_until_ns: 1000, ..EngineTime::default() };
        for (tag, process, at) in [(START, 7, 100), (END, 7, 150), (START, 9, 160), (START, 7, 200)]
        {
            time.add(&record(tag, process, at), 7);
        }
        assert_eq!((time.completed_ns, time.residencies, time.total_ns(260)), (50, 1, 110));
        time.add(&record(START, 0, 230), 7);
        assert_eq!(time.total_ns(1000), 80, "another process has the engine");
        time.add(&record(END, 7, 5), 7);
        assert_eq!(time.total_ns(1000), 80, "an end without a start");
        time.add(&record(START, 7, 990), 7);
        time.add(&record(END, 7, 1990), 7);
        assert_eq!(time.total_ns(2000), 90, "no work after 1000");
    }

    #[test]
    fn idle_time_of_a_residency_does_not_count() {
        let mut time = EngineTime { counts_until_ns: 200, ..EngineTime::default() };
        time.add(&record(START, 7, 100), 7);
        assert_eq!(time.total_ns(900), 100);
        // New work, at 850 at the earliest.
        time.count_until(850, 1000);
        assert_eq!(time.total_ns(900), 150);
        time.count_until(900, 1100);
        assert_eq!(time.total_ns(1050), 300);
        time.add(&record(END, 7, 1050), 7);
        time.add(&record(START, 7, 1060), 7);
        time.count_until(1000, 1200);
        assert_eq!(time.total_ns(1070), 310);
    }

    #[test]
    fn a_turn_that_ends_with_work_left_counts() {
        let mut time = EngineTime { counts_until_ns: 100, ..EngineTime::default() };
        time.add(&record(START, 7, 500), 7);
        time.add(&record(END, 7, 900), 7);
        assert_eq!(time.total_ns(1000), 0, "it may have had no work");
        time.add(&record(START, 7, 1500), 7);
        time.works_until(1900);
        time.add(&record(END, 7, 1900), 7);
        assert_eq!(time.total_ns(2000), 400);
    }

    #[test]
    fn time_behind_a_closed_gate_does_not_count() {
        let mut time = EngineTime { counts_until_ns: 10_000, ..EngineTime::default() };
        time.add(&record(START, 7, 100), 7);
        time.gate(false, 300);
        assert_eq!(time.total_ns(5000), 200);
        // The gate opens, and no other process has used the engine.
        time.gate(true, 5000);
        assert_eq!(time.total_ns(5100), 300);
        // Another process has the engine when the gate opens. The next start is logged.
        time.gate(false, 5200);
        time.add(&record(START, 9, 5300), 7);
        time.gate(true, 6000);
        assert_eq!(time.total_ns(7000), 400);
        time.add(&record(START, 7, 7000), 7);
        assert_eq!(time.total_ns(7050), 450);
        // The end of the residency is logged after the gate has closed.
        time.gate(false, 7100);
        time.add(&record(END, 7, 7099), 7);
        time.gate(true, 8000);
        assert_eq!(time.total_ns(9000), 500);
        // A gate that was open already, or that closes between two residencies, changes nothing.
        time.gate(true, 9000);
        time.gate(false, 9100);
        time.gate(true, 9200);
        assert_eq!(time.total_ns(9900), 500);
    }
}
