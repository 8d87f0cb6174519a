//! Statistics of the VM's programs, for the event loop.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use programs::control_queue::ControlQueue;

use crate::worker_protocol::{MAX_PROCESSES, ProgramsStatus};

/// Interval of updates. Each looks at all objects of the programs.
const INTERVAL: Duration = Duration::from_millis(100);

/// Programs of the VM, as the queue's thread last saw them.
#[derive(Clone, Debug, Default)]
pub struct ProgramsInVm(Arc<Mutex<Option<ProgramsStatus>>>);

impl ProgramsInVm {
    /// Returns the processes and their memory, while there are any.
    pub fn status(&self) -> Option<ProgramsStatus> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that no program uses the vGPU.
    pub(super) fn clear(&self) {
        self.set(None);
    }

    fn set(&self, status: Option<ProgramsStatus>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }
}

/// Updates of [`ProgramsInVm`].
#[derive(Debug)]
pub(super) struct Updates {
    programs: ProgramsInVm,
    next: Instant,
    /// A request may have changed something since the last update.
    changed: bool,
}

impl Updates {
    pub fn new(programs: ProgramsInVm) -> Self {
        Self { programs, next: Instant::now(), changed: false }
    }

    /// Notes that a request was served.
    pub fn note_request(&mut self) {
        self.changed = true;
    }

    /// Updates the statistics if they are due. Returns the time until then.
    pub fn update(&mut self, queue: &ControlQueue, now: Instant) -> Option<Duration> {
        if !self.changed {
            return None;
        }
        if now < self.next {
            return Some(self.next - now);
        }
        (self.changed, self.next) = (false, now + INTERVAL);
        let found = queue.video_bytes();
        self.programs.set(found.map(|(vram_used_bytes, processes)| ProgramsStatus {
            vram_used_bytes,
            processes: processes.into_iter().take(MAX_PROCESSES).collect(),
            in_vm: true,
            with_managed: queue.process_with_managed(),
        }));
        None
    }

    /// Notes that no program uses the vGPU.
    pub fn clear(&mut self) {
        self.changed = false;
        self.programs.clear();
    }
}
