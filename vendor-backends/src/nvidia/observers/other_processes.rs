//! Residencies of other processes on the compute engine, as the context switch log shows them.

use std::collections::BTreeMap;

use nvidia_rm::ctxsw_record::{CtxswRecord, START};

/// Residencies of other processes, counted for each process.
#[derive(Clone, Debug, Default)]
pub struct OtherProcesses(BTreeMap<u64, u32>);

/// `NV_EVENT_BUFFER_HIDDEN_PID`: the process belongs to another user.
const HIDDEN: u64 = 0;

/// Number of processes of other users that may take turns.
const MAX_HIDDEN: u32 = 16;

/// Maximum number of processes that are counted.
const MAX_OTHERS: usize = 64;

impl OtherProcesses {
    /// Adds a record of the log. A residency of `process` itself clears the counts.
    pub fn add(&mut self, record: &CtxswRecord, process: u64) {
        if record.tag != START {
            return;
        }
        if record.process == process {
            self.0.clear();
        } else if self.0.len() < MAX_OTHERS || self.0.contains_key(&record.process) {
            *self.0.entry(record.process).or_default() += 1;
        }
    }

    /// Clears the counts.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns whether a process had a number of residencies. The driver hides the processes of
    /// other users: those had it if they had together what [`MAX_HIDDEN`] processes would have.
    pub fn have_passed_over(&self, residencies: u32) -> bool {
        let needed = |process| residencies * if process == HIDDEN { MAX_HIDDEN } else { 1 };
        self.0.iter().any(|(process, count)| *count >= needed(*process))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvidia_rm::ctxsw_record::END;

    fn record(tag: u8, process: u64) -> CtxswRecord {
        CtxswRecord { tag, number: 0, context: 1, process, at_ns: 0 }
    }

    #[test]
    fn residencies_of_others_count_since_the_last_own_residency() {
        let mut others = OtherProcesses::default();
        for process in [8, 9, 8, 9, 9] {
            others.add(&record(START, process), 7);
            others.add(&record(END, process), 7);
        }
        assert!(others.have_passed_over(3) && !others.have_passed_over(4));
        others.add(&record(END, 7), 7);
        assert!(others.have_passed_over(3));
        others.add(&record(START, 7), 7);
        assert!(!others.have_passed_over(1));
        (0..1000).for_each(|process| others.add(&record(START, process + 10), 7));
        assert!(others.have_passed_over(1) && !others.have_passed_over(2));
        assert_eq!(others.0.len(), MAX_OTHERS);
        others.clear();
        (0..63).for_each(|_| others.add(&record(START, HIDDEN), 7));
        assert!(!others.have_passed_over(4), "16 others may have had fewer than 4 each");
        others.add(&record(START, HIDDEN), 7);
        assert!(others.have_passed_over(4));
    }
}
