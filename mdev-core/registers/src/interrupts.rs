//! Interrupts: INTx and MSI, delivered by eventfd.

mod journal;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use foreign_fds::ForeignFd;
use foreign_fds::eventfd::{self, Signaller};

pub use journal::{InterruptState, IrqEvent};

/// Line of INTx at the [`Signaller`]; MSI vectors have the lines after it.
const INTX_LINE: usize = 0;

/// Interrupt index of a PCI device in VFIO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqIndex {
    /// INTx.
    Intx,
    /// MSI vectors.
    Msi,
    /// MSI-X vectors; not offered.
    Msix,
    /// Error notification; not offered.
    Err,
    /// Device release request; not offered.
    Req,
}

impl IrqIndex {
    /// Returns the index with a VFIO number.
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

/// Properties of an interrupt index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IrqInfo {
    /// Number of interrupts.
    pub count: u32,
    /// True if interrupts are delivered by eventfd.
    pub eventfd: bool,
    /// True if interrupts can be masked.
    pub maskable: bool,
    /// True if a delivery masks the interrupt until the client unmasks it.
    pub automasked: bool,
    /// True if the index must be disabled before more vectors are enabled.
    pub no_resize: bool,
}

/// Reason for refusing an interrupt command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IrqError {
    /// The command is for interrupts that the index does not have.
    #[error("{index:?} has no interrupts {start}..{end}")]
    OutOfRange {
        /// Interrupt index.
        index: IrqIndex,
        /// First interrupt of the command.
        start: u32,
        /// End of the command's range, exclusive.
        end: u64,
    },
    /// The interrupts of the index cannot be masked.
    #[error("{0:?} interrupts cannot be masked")]
    NotMaskable(IrqIndex),
    /// The thread that signals eventfds cannot be started.
    #[error("No thread can be started to signal interrupts")]
    NoThread,
}

/// Interrupts of a function, with the client's eventfds.
#[derive(Debug)]
pub struct Interrupts {
    has_intx: bool,
    intx: Intx,
    msi: Msi,
    /// Started with the first eventfd.
    signaller: Option<Signaller>,
}

/// INTx with VFIO's semantics: a level, masked by each delivery until the client unmasks it.
#[derive(Debug, Default)]
struct Intx {
    trigger: Option<Arc<ForeignFd>>,
    unmask: Option<ForeignFd>,
    asserted: bool,
    masked: bool,
}

/// MSI vectors.
#[derive(Debug)]
struct Msi {
    /// Eventfd of each vector.
    events: Vec<Option<Arc<ForeignFd>>>,
    /// Number of vectors that the client has enabled; 0 if MSI is disabled.
    granted: u32,
}

impl Interrupts {
    /// Returns the interrupts of a function with `vectors` MSI vectors, without eventfds.
    pub fn new(has_intx: bool, vectors: u32) -> Self {
        let mut events = Vec::new();
        events.resize_with(vectors as usize, || None);
        let msi = Msi { events, granted: 0 };
        Self { has_intx, intx: Intx::default(), msi, signaller: None }
    }

    /// Drops all eventfds and returns to the power-on state.
    pub fn reset(&mut self) {
        self.disable(IrqIndex::Msi);
        self.disable(IrqIndex::Intx);
        self.intx = Intx::default();
    }

    /// Returns the properties of an index.
    pub fn info(&self, index: IrqIndex) -> IrqInfo {
        let none = IrqInfo {
            count: 0,
            eventfd: false,
            maskable: false,
            automasked: false,
            no_resize: false,
        };
        match index {
            IrqIndex::Intx if self.has_intx => {
                IrqInfo { count: 1, eventfd: true, maskable: true, automasked: true, ..none }
            }
            IrqIndex::Msi if !self.msi.events.is_empty() => IrqInfo {
                count: self.msi.events.len() as u32,
                eventfd: true,
                no_resize: true,
                ..none
            },
            IrqIndex::Intx | IrqIndex::Msi | IrqIndex::Msix | IrqIndex::Err | IrqIndex::Req => none,
        }
    }

    /// Sets the eventfds of interrupts from `start` on. A client that fills an eventfd and makes it
    /// block cannot block the device.
    pub fn set_triggers(
        &mut self,
        index: IrqIndex,
        start: u32,
        events: Vec<Option<ForeignFd>>,
    ) -> Result<(), IrqError> {
        let range = self.check(index, start, events.len())?;
        if self.signaller.is_none() && events.iter().any(Option::is_some) {
            self.signaller = Some(Signaller::new("irq").map_err(|_| IrqError::NoThread)?);
        }
        let events = events.into_iter().map(|event| event.map(Arc::new));
        match index {
            IrqIndex::Intx => {
                for event in events {
                    self.intx.trigger.clone_from(&event);
                    self.intx.masked = false;
                    self.set_line(INTX_LINE, event);
                }
                self.deliver_intx();
            }
            IrqIndex::Msi => {
                self.msi.granted = self.msi.granted.max(range.end as u32);
                for (vector, event) in range.zip(events) {
                    self.msi.events[vector].clone_from(&event);
                    self.set_line(msi_line(vector), event);
                }
            }
            IrqIndex::Msix | IrqIndex::Err | IrqIndex::Req => {}
        }
        Ok(())
    }

    fn set_line(&self, line: usize, event: Option<Arc<ForeignFd>>) {
        if let Some(signaller) = &self.signaller {
            signaller.set(line, event);
        }
    }

    fn signal(&self, line: usize) {
        if let Some(signaller) = &self.signaller {
            signaller.signal(line);
        }
    }

    /// Signals and masks INTx if it is asserted and not masked.
    fn deliver_intx(&mut self) {
        let Intx { ref trigger, asserted, masked, .. } = self.intx;
        if trigger.is_some() && asserted && !masked {
            self.intx.masked = true;
            self.signal(INTX_LINE);
        }
    }

    /// Drops all eventfds of an index.
    pub fn disable(&mut self, index: IrqIndex) {
        match index {
            IrqIndex::Intx => {
                let asserted = self.intx.asserted;
                self.intx = Intx { asserted, ..Intx::default() };
                self.set_line(INTX_LINE, None);
            }
            IrqIndex::Msi => {
                self.msi.events.fill(None);
                self.msi.granted = 0;
                (0..self.msi.events.len()).for_each(|vector| self.set_line(msi_line(vector), None));
            }
            IrqIndex::Msix | IrqIndex::Err | IrqIndex::Req => {}
        }
    }

    /// Signals the unmasked interrupts from `start` on whose flag is set.
    pub fn trigger(
        &mut self,
        index: IrqIndex,
        start: u32,
        selected: &[bool],
    ) -> Result<(), IrqError> {
        let range = self.check(index, start, selected.len())?;
        for (vector, _) in range.zip(selected).filter(|(_, selected)| **selected) {
            match index {
                IrqIndex::Intx if self.intx.masked => {}
                IrqIndex::Intx => self.signal(INTX_LINE),
                IrqIndex::Msi => self.signal(msi_line(vector)),
                IrqIndex::Msix | IrqIndex::Err | IrqIndex::Req => {}
            }
        }
        Ok(())
    }

    /// Masks or unmasks INTx. Unmasking an asserted INTx delivers it again.
    pub fn mask(
        &mut self,
        index: IrqIndex,
        start: u32,
        selected: &[bool],
        masked: bool,
    ) -> Result<(), IrqError> {
        if index != IrqIndex::Intx {
            return Err(IrqError::NotMaskable(index));
        }
        self.check(index, start, selected.len())?;
        if selected.contains(&true) {
            self.intx.masked = masked;
            self.deliver_intx();
        }
        Ok(())
    }

    /// Sets the eventfd with which the client unmasks INTx.
    pub fn set_unmask_event(
        &mut self,
        index: IrqIndex,
        event: Option<ForeignFd>,
    ) -> Result<(), IrqError> {
        if index != IrqIndex::Intx {
            return Err(IrqError::NotMaskable(index));
        }
        self.intx.unmask = event;
        Ok(())
    }

    /// Returns the eventfd with which the client unmasks INTx.
    pub fn unmask_event(&self) -> Option<BorrowedFd<'_>> {
        self.intx.unmask.as_ref().map(AsFd::as_fd)
    }

    /// Consumes the client's signal of [`Self::unmask_event`] and unmasks INTx. Does nothing if the
    /// eventfd is not signalled.
    ///
    /// # Errors
    ///
    /// Fails if the descriptor is not an eventfd.
    pub fn on_unmask(&mut self) -> io::Result<()> {
        let Some(event) = &self.intx.unmask else { return Ok(()) };
        if eventfd::take(event.as_fd())? {
            self.intx.masked = false;
            self.deliver_intx();
        }
        Ok(())
    }

    /// Sets the level of INTx, and signals the client if necessary.
    pub fn set_level(&mut self, asserted: bool) {
        self.intx.asserted = asserted;
        self.deliver_intx();
    }

    /// Returns the number of MSI vectors that the client has enabled; 0 if MSI is disabled.
    pub fn msi_granted(&self) -> u32 {
        self.msi.granted
    }

    /// Returns the eventfd of a vector of the device. If the client enabled fewer vectors, vectors
    /// share eventfds by remainder.
    pub fn msi_event(&self, vector: u32) -> Option<BorrowedFd<'_>> {
        let vector = self.msi_vector(vector)?;
        self.msi.events[vector].as_ref().map(|event| event.as_fd())
    }

    /// Signals a vector of the device, if the client has assigned an eventfd.
    pub fn msi_signal(&self, vector: u32) {
        if let Some(vector) = self.msi_vector(vector) {
            self.signal(msi_line(vector));
        }
    }

    /// Returns the range of interrupts of a command, if the index has them.
    fn check(&self, index: IrqIndex, start: u32, count: usize) -> Result<Range<usize>, IrqError> {
        let end = u64::from(start) + count as u64;
        if end > u64::from(self.info(index).count) {
            return Err(IrqError::OutOfRange { index, start, end });
        }
        Ok(start as usize..end as usize)
    }

    /// Returns the enabled vector of a vector of the device, if it has an eventfd.
    fn msi_vector(&self, vector: u32) -> Option<usize> {
        let vector = vector.checked_rem(self.msi.granted)? as usize;
        self.msi.events.get(vector)?.as_ref().map(|_| vector)
    }
}

/// Returns the line of an MSI vector.
fn msi_line(vector: usize) -> usize {
    INTX_LINE + 1 + vector
}

#[cfg(test)]
mod tests {
    use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

    use vmm_sys_util::eventfd::EventFd;

    use super::*;

    fn event() -> (EventFd, ForeignFd) {
        let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let copy = event.try_clone().unwrap();
        // SAFETY: into_raw_fd gives up the copy's ownership.
        (event, unsafe { OwnedFd::from_raw_fd(copy.into_raw_fd()) }.into())
    }

    /// Returns and clears an eventfd's count.
    fn take_count(event: &EventFd) -> u64 {
        event.read().unwrap_or(0)
    }

    #[test]
    fn intx_is_delivered_once_until_unmasked() {
        let mut irq = Interrupts::new(true, 4);
        let (trigger, fd) = event();
        irq.set_triggers(IrqIndex::Intx, 0, vec![Some(fd)]).unwrap();
        irq.set_level(true);
        irq.set_level(true);
        assert_eq!(take_count(&trigger), 1);
        irq.mask(IrqIndex::Intx, 0, &[true], false).unwrap();
        assert_eq!(take_count(&trigger), 1, "still asserted");
        irq.set_level(false);
        irq.mask(IrqIndex::Intx, 0, &[true], false).unwrap();
        assert_eq!(take_count(&trigger), 0);

        irq.mask(IrqIndex::Intx, 0, &[true], true).unwrap();
        irq.set_level(true);
        assert_eq!(take_count(&trigger), 0, "masked");
        irq.trigger(IrqIndex::Intx, 0, &[true]).unwrap();
        assert_eq!(take_count(&trigger), 0, "a masked interrupt cannot be triggered");
        let (unmask, fd) = event();
        irq.set_unmask_event(IrqIndex::Intx, Some(fd)).unwrap();
        irq.on_unmask().unwrap();
        assert_eq!(take_count(&trigger), 0, "the eventfd was not signalled");
        unmask.write(1).unwrap();
        irq.on_unmask().unwrap();
        assert_eq!(take_count(&trigger), 1);
        irq.disable(IrqIndex::Intx);
        irq.trigger(IrqIndex::Intx, 0, &[true]).unwrap();
        assert_eq!(take_count(&trigger), 0);
        assert!(irq.unmask_event().is_none());
    }

    #[test]
    fn an_asserted_intx_is_delivered_when_the_eventfd_is_assigned() {
        let mut irq = Interrupts::new(true, 4);
        irq.set_level(true);
        let (trigger, fd) = event();
        irq.set_triggers(IrqIndex::Intx, 0, vec![Some(fd)]).unwrap();
        assert_eq!(take_count(&trigger), 1);
    }

    #[test]
    fn fewer_msi_vectors_are_shared_by_remainder() {
        let mut irq = Interrupts::new(true, 4);
        let (events, fds): (Vec<_>, Vec<_>) = (0..2).map(|_| event()).unzip();
        irq.set_triggers(IrqIndex::Msi, 0, fds.into_iter().map(Some).collect()).unwrap();
        assert_eq!(irq.msi_granted(), 2);
        for vector in 0..4 {
            irq.msi_signal(vector);
        }
        assert_eq!((take_count(&events[0]), take_count(&events[1])), (2, 2));
        irq.trigger(IrqIndex::Msi, 1, &[true]).unwrap();
        assert_eq!((take_count(&events[0]), take_count(&events[1])), (0, 1));
        irq.set_triggers(IrqIndex::Msi, 1, vec![None]).unwrap();
        assert!(irq.msi_event(3).is_none() && irq.msi_event(2).is_some());
        irq.disable(IrqIndex::Msi);
        assert_eq!(irq.msi_granted(), 0);
        irq.msi_signal(0);
    }

    #[test]
    fn missing_interrupts_are_refused() {
        let mut irq = Interrupts::new(true, 4);
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
            assert!(irq.trigger(index, start, &vec![true; count]).is_err());
        }
        assert!(irq.mask(IrqIndex::Msi, 0, &[true], true).is_err());
        assert!(irq.set_triggers(IrqIndex::Err, 0, Vec::new()).is_ok());
    }

    #[test]
    fn a_full_eventfd_does_not_block() {
        let mut irq = Interrupts::new(true, 4);
        let blocking = EventFd::new(0).unwrap();
        blocking.write(u64::MAX - 1).unwrap();
        // SAFETY: into_raw_fd gives up the copy's ownership.
        let fd = unsafe { OwnedFd::from_raw_fd(blocking.try_clone().unwrap().into_raw_fd()) };
        let fd = ForeignFd::from(fd);
        irq.set_triggers(IrqIndex::Msi, 0, vec![Some(fd)]).unwrap();
        irq.msi_signal(0);
    }
}
