//! Interrupt indices and the client's interrupt commands.

use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_AUTOMASKED, VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_INFO_MASKABLE, VFIO_IRQ_INFO_NORESIZE,
};

use foreign_fds::ForeignFd;
use pci_registers::{Interrupts, IrqError, IrqIndex};

use crate::errno::Errno;
use crate::fds::Fds;

/// Interrupts of one index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Irq {
    /// Number of interrupts.
    pub count: u32,
    /// `VFIO_IRQ_INFO_*`.
    pub flags: u32,
}

impl Irq {
    /// No interrupts.
    pub const NONE: Self = Self { count: 0, flags: 0 };
    /// INTA: level-triggered, masked by each delivery until the client unmasks it.
    pub const INTX: Self = Self {
        count: 1,
        flags: VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_MASKABLE | VFIO_IRQ_INFO_AUTOMASKED,
    };

    /// Returns `count` MSI or MSI-X vectors, which the client enables as a set.
    pub const fn message_signaled(count: u32) -> Self {
        Self { count, flags: VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_NORESIZE }
    }

    /// Returns a notification of the client: a device error or a release request.
    pub const fn notification() -> Self {
        Self { count: 1, flags: VFIO_IRQ_INFO_EVENTFD }
    }
}

/// Action on an interrupt (`VFIO_IRQ_SET_ACTION_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IrqAction {
    /// Mask the interrupt.
    Mask,
    /// Unmask the interrupt.
    Unmask,
    /// Raise the interrupt.
    Trigger,
}

/// Command of a client for the interrupts of one index.
#[derive(Debug)]
pub enum IrqCommand<'a> {
    /// Disable all interrupts and drop their eventfds.
    Disable,
    /// Assign eventfds to consecutive interrupts.
    ///
    /// With [`IrqAction::Trigger`] the device signals the eventfds to raise interrupts. With mask
    /// and unmask the client signals them, and the device watches them.
    Assign {
        /// Action of the eventfds.
        action: IrqAction,
        /// First interrupt.
        start: u32,
        /// Eventfds, one per interrupt.
        eventfds: Fds,
    },
    /// Drop the eventfds of consecutive interrupts.
    Unassign {
        /// Action of the eventfds.
        action: IrqAction,
        /// First interrupt.
        start: u32,
        /// Number of interrupts.
        count: u32,
    },
    /// Perform the action now, as if an eventfd had been signalled.
    Perform {
        /// Action.
        action: IrqAction,
        /// Interrupts.
        lines: IrqLines<'a>,
    },
}

impl IrqCommand<'_> {
    /// Executes the command on the interrupts of a PCI function.
    ///
    /// # Errors
    ///
    /// `EINVAL` for missing interrupts, `ENOTTY` for actions that the index does not support.
    pub fn apply(self, index: u32, interrupts: &mut Interrupts) -> Result<(), Errno> {
        let index = IrqIndex::from_number(index).ok_or(Errno::EINVAL)?;
        let result = match self {
            Self::Disable => {
                interrupts.disable(index);
                Ok(())
            }
            Self::Assign { action: IrqAction::Trigger, start, eventfds } => {
                let events = eventfds.into_iter().map(ForeignFd::into_eventfd).collect();
                interrupts.set_triggers(index, start, events)
            }
            Self::Unassign { action: IrqAction::Trigger, start, count } => {
                let events = (0..count).map(|_| None).collect();
                interrupts.set_triggers(index, start, events)
            }
            Self::Assign { action: IrqAction::Unmask, start: 0, eventfds } => {
                let event = eventfds.into_iter().next().and_then(ForeignFd::into_eventfd);
                interrupts.set_unmask_event(index, event)
            }
            Self::Unassign { action: IrqAction::Unmask, .. } => {
                interrupts.set_unmask_event(index, None)
            }
            Self::Assign { .. } | Self::Unassign { .. } => return Err(Errno::ENOTTY),
            Self::Perform { action, lines } => {
                let selected = lines.flags();
                match action {
                    IrqAction::Trigger => interrupts.trigger(index, lines.start, &selected),
                    IrqAction::Mask => interrupts.mask(index, lines.start, &selected, true),
                    IrqAction::Unmask => interrupts.mask(index, lines.start, &selected, false),
                }
            }
        };
        result.map_err(errno_of)
    }
}

/// Returns the error number for an interrupt error.
fn errno_of(error: IrqError) -> Errno {
    match error {
        IrqError::OutOfRange { .. } => Errno::EINVAL,
        IrqError::NotMaskable(_) => Errno::ENOTTY,
        IrqError::NoThread => Errno::ENOMEM,
    }
}

/// Selected interrupts of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqLines<'a> {
    /// First interrupt of the range.
    pub start: u32,
    /// Number of interrupts in the range.
    pub count: u32,
    /// A byte per interrupt, nonzero for the selected ones; `None` selects all.
    pub selected: Option<&'a [u8]>,
}

impl IrqLines<'_> {
    /// Returns a flag per interrupt of the range, true for the selected ones.
    pub fn flags(&self) -> Vec<bool> {
        (0..self.count).map(|line| self.is_selected(line)).collect()
    }

    /// Iterates over the selected interrupts.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.count).filter(|&line| self.is_selected(line)).map(|line| self.start + line)
    }

    fn is_selected(&self, line: u32) -> bool {
        self.selected.is_none_or(|selected| selected.get(line as usize) > Some(&0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonzero_bytes_select_interrupts() {
        let all = IrqLines { start: 3, count: 3, selected: None };
        assert_eq!(all.iter().collect::<Vec<_>>(), [3, 4, 5]);
        let some = IrqLines { selected: Some(&[1, 0, 255]), ..all };
        assert_eq!(some.iter().collect::<Vec<_>>(), [3, 5]);
    }
}
