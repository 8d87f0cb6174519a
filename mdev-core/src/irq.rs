//! Interrupts: INTx and MSI, delivered by eventfd.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use vmm_sys_util::eventfd::EventFd;

use crate::abi::control::VECTORS;

/// VFIO's interrupt indexes of a PCI device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqIndex {
    /// The INTx pin.
    Intx,
    /// MSI vectors.
    Msi,
    /// MSI-X vectors: there are none.
    Msix,
    /// Error notification: there is none.
    Err,
    /// Device request: there is none.
    Req,
}

impl IrqIndex {
    /// The index with VFIO's number.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::Intx,
            1 => Self::Msi,
            2 => Self::Msix,
            3 => Self::Err,
            4 => Self::Req,
            _ => return None,
        })
    }
}

/// What a client learns about an interrupt index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// Interrupts of the index; 0 where there are none.
    pub count: u32,
    /// They are delivered by eventfd.
    pub eventfd: bool,
    /// They can be masked.
    pub maskable: bool,
    /// Delivery masks them until they are unmasked.
    pub automasked: bool,
    /// The set of vectors in use cannot grow without disabling the index first.
    pub no_resize: bool,
}

/// Why interrupts could not be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IrqError {
    /// Vectors beyond the index.
    #[error("No interrupts {start} to {end} of {index:?}")]
    OutOfRange {
        /// The index.
        index: IrqIndex,
        /// First vector asked for.
        start: u32,
        /// One past the last.
        end: u64,
    },
    /// The index does not have this action.
    #[error("{0:?} interrupts cannot be masked")]
    NotMaskable(IrqIndex),
}

/// The function's interrupts and the eventfds they are delivered by.
#[derive(Debug, Default)]
pub struct Interrupts {
    intx: Intx,
    msi: Msi,
}

/// INTx as VFIO delivers it: the line is a level; each delivery masks it until the client unmasks.
#[derive(Debug, Default)]
struct Intx {
    trigger: Option<EventFd>,
    unmask: Option<OwnedFd>,
    asserted: bool,
    masked: bool,
}

impl Intx {
    fn deliver(&mut self) {
        if let Some(trigger) = self.trigger.as_ref().filter(|_| self.asserted && !self.masked) {
            self.masked = true;
            signal(trigger);
        }
    }
}

#[derive(Debug, Default)]
struct Msi {
    events: [Option<EventFd>; VECTORS as usize],
    /// Vectors that the client has enabled; 0 where MSI is off.
    granted: u32,
}

impl Interrupts {
    /// What a client learns about an index.
    pub const fn info(index: IrqIndex) -> IrqInfo {
        let none = IrqInfo {
            count: 0,
            eventfd: false,
            maskable: false,
            automasked: false,
            no_resize: false,
        };
        match index {
            IrqIndex::Intx => {
                IrqInfo { count: 1, eventfd: true, maskable: true, automasked: true, ..none }
            }
            IrqIndex::Msi => IrqInfo { count: VECTORS, eventfd: true, no_resize: true, ..none },
            IrqIndex::Msix | IrqIndex::Err | IrqIndex::Req => none,
        }
    }

    /// Sets the eventfds of interrupts `start..`. They are made non-blocking: nobody waits for a client that does not
    /// read them.
    pub fn set_triggers(
        &mut self,
        index: IrqIndex,
        start: u32,
        events: Vec<Option<OwnedFd>>,
    ) -> Result<(), IrqError> {
        let range = check(index, start, events.len())?;
        let events = events.into_iter().map(|event| event.map(into_eventfd));
        match index {
            IrqIndex::Intx => {
                for event in events {
                    self.intx.trigger = event;
                    self.intx.masked = false;
                }
                self.intx.deliver();
            }
            IrqIndex::Msi => {
                self.msi.granted = self.msi.granted.max(range.end as u32);
                for (slot, event) in self.msi.events[range].iter_mut().zip(events) {
                    *slot = event;
                }
            }
            IrqIndex::Msix | IrqIndex::Err | IrqIndex::Req => {}
        }
        Ok(())
    }

    /// Drops all eventfds of an index.
    pub fn disable(&mut self, index: IrqIndex) {
        match index {
            IrqIndex::Intx => {
                let asserted = self.intx.asserted;
                self.intx = Intx { asserted, ..Intx::default() };
            }
            IrqIndex::Msi => self.msi = Msi::default(),
            IrqIndex::Msix | IrqIndex::Err | IrqIndex::Req => {}
        }
    }

    /// Signals those of the interrupts `start..` whose flag is set and which are not masked.
    pub fn fire(&mut self, index: IrqIndex, start: u32, fire: &[bool]) -> Result<(), IrqError> {
        let range = check(index, start, fire.len())?;
        for (vector, _) in range.zip(fire).filter(|(_, fire)| **fire) {
            match index {
                IrqIndex::Intx if self.intx.masked => {}
                IrqIndex::Intx => self.intx.trigger.iter().for_each(signal),
                IrqIndex::Msi => self.msi.events[vector].iter().for_each(signal),
                IrqIndex::Msix | IrqIndex::Err | IrqIndex::Req => {}
            }
        }
        Ok(())
    }

    /// Masks or unmasks; only INTx can be. Unmasking a line that is still asserted delivers again.
    pub fn mask(
        &mut self,
        index: IrqIndex,
        start: u32,
        which: &[bool],
        masked: bool,
    ) -> Result<(), IrqError> {
        if index != IrqIndex::Intx {
            return Err(IrqError::NotMaskable(index));
        }
        check(index, start, which.len())?;
        if which.contains(&true) {
            self.intx.masked = masked;
            self.intx.deliver();
        }
        Ok(())
    }

    /// Sets the eventfd through which the client unmasks INTx.
    pub fn set_unmask_event(
        &mut self,
        index: IrqIndex,
        event: Option<OwnedFd>,
    ) -> Result<(), IrqError> {
        if index != IrqIndex::Intx {
            return Err(IrqError::NotMaskable(index));
        }
        self.intx.unmask = event.inspect(set_nonblocking);
        Ok(())
    }

    /// The eventfd through which the client unmasks INTx.
    pub fn unmask_event(&self) -> Option<BorrowedFd<'_>> {
        self.intx.unmask.as_ref().map(AsFd::as_fd)
    }

    /// The client has signalled [`Self::unmask_event`]: takes the signal and unmasks. An error where it is no eventfd; a
    /// signal that the client has taken back is none.
    pub fn on_unmask(&mut self) -> io::Result<()> {
        let Some(event) = &self.intx.unmask else { return Ok(()) };
        let mut count = [0u8; 8];
        // SAFETY: reads at most 8 bytes into a buffer of 8.
        let read = unsafe { libc::read(event.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        if read == count.len().cast_signed() {
            self.intx.masked = false;
            self.intx.deliver();
            return Ok(());
        }
        let error =
            if read < 0 { io::Error::last_os_error() } else { io::ErrorKind::InvalidData.into() };
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
            _ => Err(error),
        }
    }

    /// Sets the level of the INTx line. Returns after the client was told, if it has to be.
    pub fn set_level(&mut self, asserted: bool) {
        self.intx.asserted = asserted;
        self.intx.deliver();
    }

    /// Vectors that the client has enabled; 0 means INTx.
    pub fn msi_granted(&self) -> u32 {
        self.msi.granted
    }

    /// The eventfd that stands for vector `vector` of the device: with fewer vectors granted, the remainder decides.
    pub fn msi_event(&self, vector: u32) -> Option<BorrowedFd<'_>> {
        self.msi_slot(vector).map(|event| {
            // SAFETY: the descriptor is owned by self, which the result borrows.
            unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
        })
    }

    /// Signals vector `vector` of the device, if the client has given it an eventfd.
    pub fn msi_signal(&self, vector: u32) {
        self.msi_slot(vector).into_iter().for_each(signal);
    }

    fn msi_slot(&self, vector: u32) -> Option<&EventFd> {
        let granted = vector.checked_rem(self.msi.granted)?;
        self.msi.events.get(granted as usize)?.as_ref()
    }
}

/// Vectors that a request names, if the index has them.
fn check(index: IrqIndex, start: u32, count: usize) -> Result<Range<usize>, IrqError> {
    let end = u64::from(start) + count as u64;
    if end > u64::from(Interrupts::info(index).count) {
        return Err(IrqError::OutOfRange { index, start, end });
    }
    Ok(start as usize..end as usize)
}

fn into_eventfd(fd: OwnedFd) -> EventFd {
    set_nonblocking(&fd);
    // SAFETY: the descriptor is owned, and ownership goes on to the EventFd.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}

fn set_nonblocking(fd: &OwnedFd) {
    // SAFETY: reads and sets the status flags of a descriptor that we own.
    unsafe {
        let flags = libc::fcntl(fd.as_raw_fd(), libc::F_GETFL);
        if flags >= 0 {
            libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK);
        }
    }
}

/// A full or broken eventfd is the client's own loss.
fn signal(event: &EventFd) {
    let _ = event.write(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> (EventFd, OwnedFd) {
        let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let copy = event.try_clone().unwrap();
        // SAFETY: the copy's descriptor is taken out of it.
        (event, unsafe { OwnedFd::from_raw_fd(copy.into_raw_fd()) })
    }

    fn taken(event: &EventFd) -> u64 {
        event.read().unwrap_or(0)
    }

    #[test]
    fn intx_is_delivered_once_until_it_is_unmasked() {
        let mut irq = Interrupts::default();
        let (trigger, fd) = event();
        irq.set_triggers(IrqIndex::Intx, 0, vec![Some(fd)]).unwrap();
        irq.set_level(true);
        irq.set_level(true);
        assert_eq!(taken(&trigger), 1);
        irq.mask(IrqIndex::Intx, 0, &[true], false).unwrap();
        assert_eq!(taken(&trigger), 1, "the level still holds");
        irq.set_level(false);
        irq.mask(IrqIndex::Intx, 0, &[true], false).unwrap();
        assert_eq!(taken(&trigger), 0);

        irq.mask(IrqIndex::Intx, 0, &[true], true).unwrap();
        irq.set_level(true);
        assert_eq!(taken(&trigger), 0, "masked");
        irq.fire(IrqIndex::Intx, 0, &[true]).unwrap();
        assert_eq!(taken(&trigger), 0, "for the client's own, too");
        let (unmask, fd) = event();
        irq.set_unmask_event(IrqIndex::Intx, Some(fd)).unwrap();
        irq.on_unmask().unwrap();
        assert_eq!(taken(&trigger), 0, "nothing was signalled");
        unmask.write(1).unwrap();
        irq.on_unmask().unwrap();
        assert_eq!(taken(&trigger), 1);
        irq.disable(IrqIndex::Intx);
        irq.fire(IrqIndex::Intx, 0, &[true]).unwrap();
        assert_eq!(taken(&trigger), 0);
        assert!(irq.unmask_event().is_none());
    }

    #[test]
    fn a_level_that_holds_is_delivered_when_the_trigger_comes() {
        let mut irq = Interrupts::default();
        irq.set_level(true);
        let (trigger, fd) = event();
        irq.set_triggers(IrqIndex::Intx, 0, vec![Some(fd)]).unwrap();
        assert_eq!(taken(&trigger), 1);
    }

    #[test]
    fn fewer_msi_vectors_are_shared_by_remainder() {
        let mut irq = Interrupts::default();
        let (events, fds): (Vec<_>, Vec<_>) = (0..2).map(|_| event()).unzip();
        irq.set_triggers(IrqIndex::Msi, 0, fds.into_iter().map(Some).collect()).unwrap();
        assert_eq!(irq.msi_granted(), 2);
        for vector in 0..4 {
            irq.msi_signal(vector);
        }
        assert_eq!((taken(&events[0]), taken(&events[1])), (2, 2));
        irq.fire(IrqIndex::Msi, 1, &[true]).unwrap();
        assert_eq!((taken(&events[0]), taken(&events[1])), (0, 1));
        irq.set_triggers(IrqIndex::Msi, 1, vec![None]).unwrap();
        assert!(irq.msi_event(3).is_none() && irq.msi_event(2).is_some());
        irq.disable(IrqIndex::Msi);
        assert_eq!(irq.msi_granted(), 0);
        irq.msi_signal(0);
    }

    #[test]
    fn vectors_that_are_not_there_are_refused() {
        let mut irq = Interrupts::default();
        for (index, start, count) in [
            (IrqIndex::Intx, 0, 2),
            (IrqIndex::Intx, 1, 1),
            (IrqIndex::Msi, 3, 2),
            (IrqIndex::Msi, u32::MAX, 1),
            (IrqIndex::Msix, 0, 1),
            (IrqIndex::Err, 0, 1),
        ] {
            let events = (0..count).map(|_| None).collect();
            assert!(irq.set_triggers(index, start, events).is_err());
            assert!(irq.fire(index, start, &vec![true; count]).is_err());
        }
        assert!(irq.mask(IrqIndex::Msi, 0, &[true], true).is_err());
        assert!(irq.set_triggers(IrqIndex::Err, 0, Vec::new()).is_ok());
    }

    #[test]
    fn a_full_eventfd_makes_nobody_wait() {
        let mut irq = Interrupts::default();
        let blocking = EventFd::new(0).unwrap();
        blocking.write(u64::MAX - 1).unwrap();
        // SAFETY: the copy's descriptor is taken out of it.
        let fd = unsafe { OwnedFd::from_raw_fd(blocking.try_clone().unwrap().into_raw_fd()) };
        irq.set_triggers(IrqIndex::Msi, 0, vec![Some(fd)]).unwrap();
        irq.msi_signal(0);
    }
}
