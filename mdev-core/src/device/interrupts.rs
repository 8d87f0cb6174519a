//! Interrupts of the virtual function: eventfds of the client, conditions of the GPU.

use std::io;
use std::os::fd::BorrowedFd;

use pci_registers::{Interrupts, IrqIndex, IrqInfo};

use super::function::VirtualFunction;
use crate::abi::control::VECTORS;
use crate::abi::queue::State;
use crate::gpu::Pending;

/// Interrupts by which conditions are delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// INTx and MSI.
    All,
    /// INTx, and MSI except for non-stall interrupts: the guest is reading the pending conditions.
    Line,
}

impl VirtualFunction {
    /// Returns the description of an interrupt index; `None` beyond VFIO's five.
    pub fn irq_info(&self, index: u32) -> Option<IrqInfo> {
        IrqIndex::from_number(index).map(|index| self.irq.info(index))
    }

    /// Changes the interrupts for the client: its eventfds and masks.
    pub fn change_interrupts<T>(&mut self, change: impl FnOnce(&mut Interrupts) -> T) -> T {
        let result = change(&mut self.irq);
        self.connect_msi_to_gpu();
        self.update_line();
        result
    }

    /// Returns the eventfd to poll for INTx unmasking. It changes with
    /// [`Self::change_interrupts`] and [`Self::detach`].
    pub fn intx_unmask_event(&self) -> Option<BorrowedFd<'_>> {
        self.irq.unmask_event()
    }

    /// Unmasks INTx after a signal of [`Self::intx_unmask_event`]. Fails if that is not an eventfd.
    pub fn on_intx_unmask(&mut self) -> io::Result<()> {
        self.irq.on_unmask()
    }

    /// Passes the eventfds of MSI vectors to the GPU while the guest enables non-stall interrupts,
    /// so that the GPU signals them without the worker. Programs that use the control queue wait
    /// for its events instead: while it runs, nothing changes, since its requests hold the client.
    pub(super) fn connect_msi_to_gpu(&mut self) {
        self.connect_msi_to_queue();
        if self.queue_runs() {
            return;
        }
        let wanted = self.irq.msi_granted() > 0
            && self.control.enabled().contains(Pending::NONSTALL)
            && !self.lost;
        if !wanted && !self.has_gpu_events {
            return;
        }
        (self.has_gpu_events, self.direct) = (wanted, wanted);
        for vector in 0..VECTORS {
            let event = if wanted { self.irq.msi_event(vector) } else { None };
            if let Err(error) = self.client.lock().set_interrupt(vector, event) {
                log::debug!("The GPU does not signal vector {vector} itself: {error}");
                self.direct = false;
            }
        }
    }

    /// Returns the descriptor to poll for [`Self::on_gpu_event`].
    pub fn gpu_event(&self) -> BorrowedFd<'_> {
        self.client.event()
    }

    /// Interrupts the guest for the GPU's pending conditions, after a signal of
    /// [`Self::gpu_event`]. Returns the conditions.
    pub fn on_gpu_event(&mut self) -> Pending {
        self.collect(Delivery::All)
    }

    pub(super) fn collect(&mut self, delivery: Delivery) -> Pending {
        let (pending, signal) = match &mut self.queue {
            // The queue's thread collects the client's conditions.
            Some(queue) if queue.status().0 != State::Off => queue.take_pending(),
            Some(queue) => {
                let (pending, signal) = queue.take_pending();
                let own = self.client.lock().take_pending();
                (pending | own, signal | own)
            }
            None => {
                let pending = self.client.lock().take_pending();
                (pending, pending)
            }
        };
        if pending.contains(Pending::DEVICE_LOST) {
            self.lose();
        }
        if !pending.is_empty() {
            self.raises += 1;
            self.control.raise(pending);
            self.deliver(signal & self.control.enabled(), delivery);
            self.update_line();
        }
        pending
    }

    pub(super) fn raise(&mut self, pending: Pending, delivery: Delivery) {
        if pending.is_empty() {
            return;
        }
        self.control.raise(pending);
        self.deliver(pending & self.control.enabled(), delivery);
        self.update_line();
    }

    /// Signals MSI vectors for new conditions.
    pub(super) fn deliver(&mut self, pending: Pending, delivery: Delivery) {
        let granted = self.irq.msi_granted();
        if granted == 0 {
            return;
        }
        // The channel is unknown here, so every vector is signalled.
        if pending.contains(Pending::NONSTALL) && !self.direct && delivery == Delivery::All {
            (0..granted).for_each(|vector| self.irq.msi_signal(vector));
        } else if pending.intersects(Pending::CHANNEL_ERROR | Pending::DEVICE_LOST | Pending::QUEUE)
        {
            self.irq.msi_signal(0);
        }
    }

    /// Applies the restored registers to the interrupts.
    pub(super) fn after_restore(&mut self) {
        self.connect_msi_to_gpu();
        self.deliver(self.control.interrupting(), Delivery::All);
        self.update_line();
    }

    pub(super) fn update_line(&mut self) {
        let asserted = self.irq.msi_granted() == 0
            && !self.config.intx_disabled()
            && !self.control.interrupting().is_empty();
        self.irq.set_level(asserted);
    }
}
