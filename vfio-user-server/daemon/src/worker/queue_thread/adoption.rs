//! Adoption of an earlier worker's control queue.

use anyhow::{Context, Result};
use mdev_core::abi::queue::{self, State};
use mdev_core::gpu::SharedClient;
use mdev_core::ids::Token;
use mdev_core::mem::SharedGuestMemory;
use programs::control_queue::ControlQueue;
use programs::front_end::FrontEndSpec;

use super::{Orders, QueueRecords, lock};
use crate::worker::front_end;
use crate::worker::journal::{JournaledQueue, QueueRecorder};

impl QueueRecords {
    /// Records what the thread does from now on.
    pub fn begin(&self, recorder: QueueRecorder) {
        lock(&self.served).recorder = Some(recorder);
    }

    /// Adopts the orders of an earlier worker, and with its queue if one runs. The thread
    /// works from [`Self::begin_work`] on.
    ///
    /// # Errors
    ///
    /// Fails if the recorded state is damaged.
    pub fn adopt(
        &mut self,
        orders: Orders,
        continued: Option<JournaledQueue>,
        spec: &FrontEndSpec,
        client: &SharedClient,
        memory: &SharedGuestMemory,
    ) -> Result<()> {
        self.gate.hold();
        let Some(JournaledQueue { done, status, queue, is_held, .. }) = continued else {
            self.signals.adopt(orders.adopt(0), State::Off as u32);
            return Ok(());
        };
        self.is_held = is_held;
        let mut served = lock(&self.served);
        served.done = done;
        if let Some((state, changes)) = queue {
            let front_end = front_end::create(spec)?;
            let adopted = ControlQueue::adopt(front_end, &changes, state, memory.clone());
            served.queue = Some(adopted.context("The control queue cannot continue")?);
            served.repeats = status == queue::status(State::Running, None);
            let mut client = client.lock();
            served.start_watch(&self.signals, &mut **client);
            // The worker before may have seen a ring, and not have passed it on.
            if let Err(error) = client.wake(Token(0)) {
                log::debug!("The GPU refused a wake-up: {error}");
            }
        }
        drop(served);
        self.signals.adopt(orders.adopt(done), status);
        Ok(())
    }

    /// Lets the thread work: at once, or after the next message of the VM if an earlier worker has
    /// died in a message that held the thread off.
    pub fn begin_work(&mut self, has_message: bool) {
        if self.is_held && !has_message {
            self.release();
        } else if !self.is_held && self.gate.is_held() {
            self.gate.reserve();
            self.gate.release();
        }
        self.notify();
    }
}
