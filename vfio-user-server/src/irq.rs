//! Interrupts as a client sees and configures them.

use std::os::fd::BorrowedFd;

use nix::sys::stat::{SFlag, fstat};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_AUTOMASKED, VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_INFO_MASKABLE, VFIO_IRQ_INFO_NORESIZE,
};

use crate::fds::Fds;

/// The interrupts of one index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Irq {
    /// How many there are.
    pub count: u32,
    /// `VFIO_IRQ_INFO_*`.
    pub flags: u32,
}

impl Irq {
    /// There are none.
    pub const NONE: Self = Self { count: 0, flags: 0 };
    /// The interrupt pin: level-triggered, so it masks itself until the client has unmasked it.
    pub const INTX: Self = Self {
        count: 1,
        flags: VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_MASKABLE | VFIO_IRQ_INFO_AUTOMASKED,
    };

    /// `count` message signalled interrupts, enabled as a set.
    pub const fn messages(count: u32) -> Self {
        Self { count, flags: VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_NORESIZE }
    }

    /// A plain notification of the client, such as "error" or "release request".
    pub const fn notification() -> Self {
        Self { count: 1, flags: VFIO_IRQ_INFO_EVENTFD }
    }
}

/// What happens to an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IrqAction {
    /// It is held back.
    Mask,
    /// It is let through.
    Unmask,
    /// It is raised.
    Trigger,
}

/// What a client wants of the interrupts of one index.
#[derive(Debug)]
pub enum IrqCommand<'a> {
    /// Turn all of them off, and drop their eventfds.
    Disable,
    /// Take eventfds for consecutive interrupts from `start` on.
    ///
    /// With [`IrqAction::Trigger`] the device writes to them to raise the interrupt. With mask and unmask the client
    /// writes to them: the device watches them.
    Assign {
        /// Which event they stand for.
        action: IrqAction,
        /// The first interrupt.
        start: u32,
        /// One for each interrupt.
        eventfds: Fds,
    },
    /// Drop the eventfds of these interrupts.
    Unassign {
        /// Which event they stood for.
        action: IrqAction,
        /// The first interrupt.
        start: u32,
        /// How many.
        count: u32,
    },
    /// Do it now, as if the event had happened.
    Perform {
        /// What.
        action: IrqAction,
        /// To which.
        lines: IrqLines<'a>,
    },
}

/// A choice of interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqLines<'a> {
    /// The first.
    pub start: u32,
    /// How many.
    pub count: u32,
    /// Nonzero for each that is meant, or `None` where all are.
    pub chosen: Option<&'a [u8]>,
}

impl IrqLines<'_> {
    /// The interrupts that are meant.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.count)
            .filter(|&line| self.chosen.is_none_or(|chosen| chosen.get(line as usize) > Some(&0)))
            .map(|line| self.start + line)
    }
}

/// Whether a descriptor can be an eventfd: neither a file, nor a pipe, socket or terminal whose writer might wait or
/// whose reader might be someone else. (An anonymous file of another kind refuses eight bytes at once.)
pub(crate) fn is_eventfd(fd: BorrowedFd<'_>) -> bool {
    fstat(fd).is_ok_and(|stat| stat.st_mode & SFlag::S_IFMT.bits() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_chosen_by_nonzero_bytes() {
        let all = IrqLines { start: 3, count: 3, chosen: None };
        assert_eq!(all.iter().collect::<Vec<_>>(), [3, 4, 5]);
        let some = IrqLines { chosen: Some(&[1, 0, 255]), ..all };
        assert_eq!(some.iter().collect::<Vec<_>>(), [3, 5]);
    }
}
