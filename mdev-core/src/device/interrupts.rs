//! Interrupts of the virtual function: what a client sets, and what the GPU raises.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::function::VirtualFunction;
use crate::abi::control::VECTORS;
use crate::gpu::Pending;
use crate::irq::{Interrupts, IrqError, IrqIndex, IrqInfo};

/// How far conditions are delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// By INTx and MSI.
    All,
    /// Not by MSI for non-stall interrupts: the guest is just reading what is pending.
    Line,
}

impl VirtualFunction {
    /// What a client learns about an interrupt index; `None` beyond VFIO's five.
    pub fn irq_info(&self, index: u32) -> Option<IrqInfo> {
        IrqIndex::from_number(index).map(Interrupts::info)
    }

    /// Sets the eventfds that interrupts `start..` of an index signal; `None` leaves one without.
    pub fn irq_set_triggers(
        &mut self,
        index: IrqIndex,
        start: u32,
        events: Vec<Option<OwnedFd>>,
    ) -> Result<(), IrqError> {
        self.irq.set_triggers(index, start, events)?;
        self.rewire(index);
        Ok(())
    }

    /// Turns an index off: all its eventfds are dropped (a trigger with no data and count 0).
    pub fn irq_disable(&mut self, index: IrqIndex) {
        self.irq.disable(index);
        self.rewire(index);
    }

    /// Fires interrupts `start..` of an index whose flag is set, as if the device had raised them.
    pub fn irq_fire(&mut self, index: IrqIndex, start: u32, fire: &[bool]) -> Result<(), IrqError> {
        self.irq.fire(index, start, fire)
    }

    /// Masks (or unmasks) interrupts `start..` of an index whose flag is set.
    pub fn irq_mask(
        &mut self,
        index: IrqIndex,
        start: u32,
        which: &[bool],
        masked: bool,
    ) -> Result<(), IrqError> {
        self.irq.mask(index, start, which, masked)
    }

    /// Sets the eventfd through which the client unmasks INTx. The session watches [`Self::intx_unmask_event`].
    pub fn irq_set_unmask_event(
        &mut self,
        index: IrqIndex,
        event: Option<OwnedFd>,
    ) -> Result<(), IrqError> {
        self.irq.set_unmask_event(index, event)
    }

    /// The eventfd to watch for INTx unmasking; it changes with [`Self::irq_set_unmask_event`], by disabling INTx and
    /// by [`Self::detach`].
    pub fn intx_unmask_event(&self) -> Option<BorrowedFd<'_>> {
        self.irq.unmask_event()
    }

    /// The client has signalled [`Self::intx_unmask_event`]: takes the signal. An error where it is no eventfd.
    pub fn on_intx_unmask(&mut self) -> io::Result<()> {
        self.irq.on_unmask()
    }

    fn rewire(&mut self, index: IrqIndex) {
        if index == IrqIndex::Msi {
            self.wire();
            self.update_line();
        }
    }

    /// Lets the silicon signal the guest's MSI vectors itself while the guest wants non-stall interrupts.
    pub(super) fn wire(&mut self) {
        let wanted = self.irq.msi_granted() > 0
            && self.control.enabled().contains(Pending::NONSTALL)
            && !self.lost;
        if !wanted && !self.wired {
            return;
        }
        (self.wired, self.direct) = (wanted, wanted);
        for vector in 0..VECTORS {
            let event = if wanted { self.irq.msi_event(vector) } else { None };
            if let Err(error) = self.client.set_interrupt(vector, event) {
                log::debug!("The GPU does not signal vector {vector} itself: {error}");
                self.direct = false;
            }
        }
    }

    /// The eventfd to watch for [`Self::on_gpu_event`].
    pub fn gpu_event(&self) -> BorrowedFd<'_> {
        self.client.event()
    }

    /// The GPU has signalled [`Self::gpu_event`]: takes what is pending and interrupts the guest.
    pub fn on_gpu_event(&mut self) {
        self.collect(Delivery::All);
    }

    pub(super) fn collect(&mut self, delivery: Delivery) {
        let pending = self.client.take_pending();
        if pending.contains(Pending::DEVICE_LOST) {
            self.lose();
        }
        self.raise(pending, delivery);
    }

    pub(super) fn raise(&mut self, pending: Pending, delivery: Delivery) {
        if pending.is_empty() {
            return;
        }
        self.control.raise(pending);
        self.deliver(pending & self.control.enabled(), delivery);
        self.update_line();
    }

    /// Signals MSI vectors for conditions that have come up.
    pub(super) fn deliver(&mut self, pending: Pending, delivery: Delivery) {
        let granted = self.irq.msi_granted();
        if granted == 0 {
            return;
        }
        // Whose channel it was is not known here, so each vector is told.
        if pending.contains(Pending::NONSTALL) && !self.direct && delivery == Delivery::All {
            (0..granted).for_each(|vector| self.irq.msi_signal(vector));
        } else if pending.intersects(Pending::CHANNEL_ERROR | Pending::DEVICE_LOST) {
            self.irq.msi_signal(0);
        }
    }

    /// Interrupts follow the restored registers.
    pub(super) fn after_restore(&mut self) {
        self.wire();
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
