//! Control queue: its registers, and the thread behind them.

use std::fmt;
use std::os::fd::BorrowedFd;

use foreign_fds::ForeignFd;

use super::VirtualFunction;
use super::interrupts::Delivery;
use crate::abi::queue::State;
use crate::gpu::{Pending, SharedClient};
use crate::ids::GuestPa;
use crate::mem::SharedGuestMemory;

/// Thread that serves a control queue. No call waits, except for [`ControlQueue::reset`].
pub trait ControlQueue: Send + fmt::Debug {
    /// Starts to serve the queue at this address.
    fn start(&mut self, base: GuestPa, slots: u32);

    /// Stops to serve it.
    fn stop(&mut self);

    /// Notes that there are submissions.
    fn notify(&mut self);

    /// Notes that the guest has woken the engine. Wakes it later if `deferred`, since the client is
    /// in use.
    fn woken(&mut self, deferred: bool);

    /// Returns the state of the queue, and the value of `QUEUE_STATUS`.
    fn status(&self) -> (State, u32);

    /// Stops to serve the queue. On the return, nothing of it uses the client or guest memory.
    fn reset(&mut self);

    /// Sets the eventfd that is to be signalled for completions and changes of the state.
    fn set_interrupt(&mut self, event: Option<ForeignFd>);

    /// Returns a descriptor that polls readable while [`Self::take_pending`] has conditions that
    /// the thread could not signal itself.
    fn event(&self) -> BorrowedFd<'_>;

    /// Returns the conditions that were raised since the last call, and those of them that are not
    /// signalled yet. While the queue runs, the client's conditions are among them.
    fn take_pending(&mut self) -> (Pending, Pending);
}

impl VirtualFunction {
    /// Adds a control queue. Must be called before a VM attaches.
    pub fn add_queue(&mut self, queue: Box<dyn ControlQueue>) {
        self.queue = Some(queue);
        self.control.define_queue();
    }

    /// Returns the client and the guest memory, for the thread of the control queue.
    pub fn share(&self) -> (SharedClient, SharedGuestMemory) {
        (self.client.share(), self.memory.clone())
    }

    /// Returns the queue's descriptor to poll for [`Self::on_queue_event`].
    pub fn queue_event(&self) -> Option<BorrowedFd<'_>> {
        self.queue.as_ref().map(|queue| queue.event())
    }

    /// Interrupts the guest for pending conditions, after a signal of [`Self::queue_event`].
    pub fn on_queue_event(&mut self) {
        self.collect(Delivery::All);
        if !self.queue_runs() {
            self.connect_msi_to_gpu();
        }
    }

    /// Returns whether the queue is in use. Then its thread uses the client.
    pub fn queue_runs(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.status().0 != State::Off)
    }

    pub(super) fn queue_status(&self) -> u32 {
        self.queue.as_ref().map_or(0, |queue| queue.status().1)
    }

    pub(super) fn write_queue_control(&mut self, enable: bool) {
        let (base, slots) = self.control.queue();
        self.active = true;
        if let Some(queue) = &mut self.queue {
            if enable { queue.start(base, slots) } else { queue.stop() }
        }
    }

    pub(super) fn notify_queue(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.notify();
        }
    }

    pub(super) fn reset_queue(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.reset();
        }
    }

    /// Passes the eventfd of MSI vector 0 to the queue while the guest enables its interrupt.
    pub(super) fn connect_msi_to_queue(&mut self) {
        let wanted = self.irq.msi_granted() > 0 && self.control.enabled().contains(Pending::QUEUE);
        let event = self.irq.msi_event(0).filter(|_| wanted);
        let event = event.and_then(|event| event.try_clone_to_owned().ok());
        if let Some(queue) = &mut self.queue {
            queue.set_interrupt(event.map(ForeignFd::from));
        }
    }
}
