//! State of interrupts, for the process that adopts the function.

use std::os::fd::{AsFd, BorrowedFd};

use foreign_fds::ForeignFd;

use serde::{Deserialize, Serialize};

use super::{Interrupts, Intx, IrqError, IrqIndex};

/// State of interrupts without their eventfds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterruptState {
    has_trigger: bool,
    has_unmask: bool,
    asserted: bool,
    granted: u32,
    /// Bit for each MSI vector with an eventfd.
    vectors: u32,
}

/// An eventfd of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqEvent {
    /// Trigger of INTx.
    Intx,
    /// Signal of the client to unmask INTx.
    Unmask,
    /// Trigger of an MSI vector.
    Msi(u32),
}

impl Interrupts {
    /// Returns the state without the eventfds.
    pub fn state(&self) -> InterruptState {
        let Intx { ref trigger, ref unmask, asserted, .. } = self.intx;
        let set = self.msi.events.iter().enumerate().filter(|(_, event)| event.is_some());
        InterruptState {
            has_trigger: trigger.is_some(),
            has_unmask: unmask.is_some(),
            asserted,
            granted: self.msi.granted,
            vectors: set.fold(0, |bits, (vector, _)| bits | 1 << vector),
        }
    }

    /// Returns the client's eventfds.
    pub fn events(&self) -> impl Iterator<Item = (IrqEvent, BorrowedFd<'_>)> {
        let intx = self.intx.trigger.iter().map(|event| (IrqEvent::Intx, event.as_fd()));
        let unmask = self.intx.unmask.iter().map(|event| (IrqEvent::Unmask, event.as_fd()));
        let msi = (0..).zip(&self.msi.events);
        let msi = msi
            .filter_map(|(vector, event)| Some((IrqEvent::Msi(vector), event.as_ref()?.as_fd())));
        intx.chain(unmask).chain(msi)
    }

    /// Adopts a state of another process. `take` returns the eventfds. Signals that the other
    /// process may not have delivered are delivered again.
    pub fn adopt(
        &mut self,
        state: &InterruptState,
        mut take: impl FnMut(IrqEvent) -> Option<ForeignFd>,
    ) -> Result<(), IrqError> {
        self.reset();
        self.intx.asserted = state.asserted;
        let vectors = 0..self.msi.events.len() as u32;
        for vector in vectors.filter(|vector| state.vectors & 1 << vector != 0) {
            self.set_triggers(IrqIndex::Msi, vector, vec![take(IrqEvent::Msi(vector))])?;
        }
        self.msi.granted = state.granted.min(self.msi.events.len() as u32);
        (0..self.msi.granted).for_each(|vector| self.msi_signal(vector));
        if state.has_unmask {
            self.set_unmask_event(IrqIndex::Intx, take(IrqEvent::Unmask))?;
        }
        if state.has_trigger {
            // This delivers an asserted INTx, and unmasks any other: the client may not have been
            // signalled, and its signal to unmask may be lost. One signal too many does no harm.
            self.set_triggers(IrqIndex::Intx, 0, vec![take(IrqEvent::Intx)])?;
        }
        Ok(())
    }
}
