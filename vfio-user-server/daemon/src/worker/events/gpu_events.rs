//! Events of the GPU and of the control queue in a worker's event loop.

use std::os::fd::AsRawFd;

use event_manager::{EventOps, EventSet, Events};

use super::{Worker, source};

impl Worker {
    pub(super) fn on_gpu(&mut self, ops: &mut EventOps) {
        let pending = self.function.inner_mut().on_gpu_event();
        if let Some(programs) = &mut self.programs {
            programs.on_gpu_event(&mut self.function, pending);
        }
        if self.gpu_watched && !self.function.inner().gpu_ok() {
            log::error!("The GPU {} is lost", self.spec.parent);
            let fd = self.function.inner().gpu_event().as_raw_fd();
            let _ = ops.remove(Events::empty_raw(fd));
            self.gpu_watched = false;
        }
    }

    /// Handles completions and changes of the control queue's state.
    pub(super) fn on_queue(&mut self, ops: &mut EventOps) {
        self.function.inner_mut().on_queue_event();
        self.watch_gpu(ops);
    }

    /// Watches the GPU's events while the control queue is off.
    pub(super) fn watch_gpu(&mut self, ops: &mut EventOps) {
        let runs = self.function.inner().queue_runs();
        if runs == self.queue_has_gpu || !self.gpu_watched {
            return;
        }
        self.queue_has_gpu = runs;
        let set = if runs { EventSet::empty() } else { EventSet::IN };
        let fd = self.function.inner().gpu_event().as_raw_fd();
        if let Err(error) = ops.modify(Events::with_data_raw(fd, source::GPU, set)) {
            log::error!("Cannot watch the GPU: {error}");
        }
    }
}
