//! Migration of a device's state and logging of its DMA writes.
//!
//! A device with migratable state implements [`Migration`]. The session runs the state machine:
//! only valid transitions reach the device, and data only in the states that transfer them. A
//! device that records its DMA writes implements [`DmaLogging`].

use crate::errno::Errno;

/// Migration state of a device (`VFIO_DEVICE_STATE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MigrationState {
    /// Failed; only a reset leaves this state.
    Error = 0,
    /// Stopped: no change of device state or memory, no interrupts.
    Stop = 1,
    /// Running.
    Running = 2,
    /// Stopped; the client reads the state.
    StopCopy = 3,
    /// Stopped; the client writes a state.
    Resuming = 4,
    /// Running; the client reads the state in advance.
    PreCopy = 6,
}

impl MigrationState {
    /// All states.
    pub const ALL: [Self; 6] =
        [Self::Error, Self::Stop, Self::Running, Self::StopCopy, Self::Resuming, Self::PreCopy];

    /// Returns the state with a number.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as u32 == raw)
    }

    /// Returns true if the client may read the device's state.
    pub const fn is_saving(self) -> bool {
        matches!(self, Self::StopCopy | Self::PreCopy)
    }

    /// Returns the next state on the shortest path to `target`, a different state. Paths have no
    /// saving state between their ends.
    ///
    /// # Errors
    ///
    /// `EINVAL` if no path exists.
    pub const fn step_to(self, target: Self, pre_copy: bool) -> Result<Self, Errno> {
        if !pre_copy && matches!(target, Self::PreCopy) {
            return Err(Errno::EINVAL);
        }
        Ok(match (self, target) {
            (_, Self::Error) | (Self::Error, _) | (Self::StopCopy, Self::PreCopy) => {
                return Err(Errno::EINVAL);
            }
            (Self::Running, Self::StopCopy | Self::Resuming)
            | (Self::StopCopy | Self::Resuming, _) => Self::Stop,
            (Self::Stop, Self::PreCopy) | (Self::PreCopy, Self::Stop | Self::Resuming) => {
                Self::Running
            }
            (Self::Running | Self::Stop | Self::PreCopy, _) => target,
        })
    }
}

/// A device with migratable state.
pub trait Migration {
    /// Returns true if the device supports [`MigrationState::PreCopy`].
    fn pre_copy(&self) -> bool {
        false
    }

    /// Moves the device between adjacent states.
    ///
    /// # Errors
    ///
    /// After an error the device is in the state before. From [`MigrationState::Resuming`], where
    /// the written state may be invalid, it waits for a reset.
    fn step(&mut self, from: MigrationState, to: MigrationState) -> Result<(), Errno>;

    /// Reads the next bytes of the state. A result shorter than `data` ends the data available now.
    fn read(&mut self, data: &mut [u8]) -> Result<usize, Errno>;

    /// Writes the next bytes of a state. The bytes are untrusted.
    fn write(&mut self, data: &[u8]) -> Result<(), Errno>;
}

/// Range of DMA addresses whose end does not overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaRange {
    /// First address.
    pub address: u64,
    /// Length in bytes, not 0.
    pub size: u64,
}

/// A device that logs its DMA writes.
pub trait DmaLogging {
    /// Starts logging writes to the ranges, or to all memory if there are none. Returns the page
    /// size of the log. The client proposes `page_size`, a power of two.
    fn start(&mut self, page_size: u64, ranges: &[DmaRange]) -> Result<u64, Errno>;

    /// Stops logging.
    fn stop(&mut self);

    /// Marks the pages of a range that were written since their last report.
    fn report(&mut self, range: DmaRange, pages: &mut DirtyPages<'_>) -> Result<(), Errno>;
}

/// Bitmap of the dirty pages of a range.
#[derive(Debug)]
pub struct DirtyPages<'a> {
    address: u64,
    page_size: u64,
    pages: u64,
    bitmap: &'a mut [u8],
}

impl<'a> DirtyPages<'a> {
    /// Returns the length of a range's bitmap in bytes, a multiple of 8.
    pub const fn bytes(size: u64, page_size: u64) -> u64 {
        size.div_ceil(page_size).div_ceil(64) * 8
    }

    /// Wraps the bitmap of a range, of [`Self::bytes`] bytes.
    pub(crate) fn new(range: DmaRange, page_size: u64, bitmap: &'a mut [u8]) -> Self {
        let pages = range.size.div_ceil(page_size);
        Self { address: range.address, page_size, pages, bitmap }
    }

    /// Marks the pages of the range that `size` bytes at `address` touch.
    pub fn mark(&mut self, address: u64, size: u64) {
        let Some(last) = size.checked_sub(1).map(|span| address.saturating_add(span)) else {
            return;
        };
        if last < self.address {
            return;
        }
        let first = address.saturating_sub(self.address) / self.page_size;
        let last = ((last - self.address) / self.page_size).min(self.pages.saturating_sub(1));
        for page in first..=last {
            // The bitmap consists of 64-bit words in the host's byte order.
            let (word, bit) = ((page / 64) as usize * 8, page % 64);
            let byte = if cfg!(target_endian = "big") { 7 - bit / 8 } else { bit / 8 };
            if let Some(byte) = self.bitmap.get_mut(word + byte as usize) {
                *byte |= 1 << (bit % 8);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use MigrationState::{Error, PreCopy, Resuming, Running, Stop, StopCopy};

    use super::*;

    fn path(
        from: MigrationState,
        to: MigrationState,
        pre_copy: bool,
    ) -> Option<Vec<MigrationState>> {
        let mut path = vec![from];
        while path.last() != Some(&to) {
            path.push(path.last()?.step_to(to, pre_copy).ok()?);
            assert!(path.len() < 6, "{path:?} does not end");
        }
        Some(path)
    }

    #[test]
    fn paths_are_those_of_the_specification() {
        let paths = [
            (Running, StopCopy, Some(vec![Running, Stop, StopCopy])),
            (StopCopy, Running, Some(vec![StopCopy, Stop, Running])),
            (Running, Resuming, Some(vec![Running, Stop, Resuming])),
            (Resuming, Running, Some(vec![Resuming, Stop, Running])),
            (PreCopy, StopCopy, Some(vec![PreCopy, StopCopy])),
            (PreCopy, Stop, Some(vec![PreCopy, Running, Stop])),
            (Stop, PreCopy, Some(vec![Stop, Running, PreCopy])),
            (Resuming, PreCopy, Some(vec![Resuming, Stop, Running, PreCopy])),
            (StopCopy, PreCopy, None),
            (Running, Error, None),
            (Error, Running, None),
        ];
        for (from, to, expected) in paths {
            assert_eq!(path(from, to, true), expected, "{from:?} to {to:?}");
        }
        assert_eq!(path(Running, PreCopy, false), None);
    }

    #[test]
    fn paths_end_and_have_no_saving_state_between_their_ends() {
        for pre_copy in [false, true] {
            for from in MigrationState::ALL {
                for to in MigrationState::ALL {
                    let Some(path) = path(from, to, pre_copy) else { continue };
                    if let [_, middle @ .., _] = &path[..] {
                        assert!(!middle.iter().any(|state| state.is_saving()), "{path:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn marks_only_touched_pages_of_the_range() {
        let range = DmaRange { address: 0x1_0000, size: 70 * 0x1000 };
        assert_eq!(DirtyPages::bytes(range.size, 0x1000), 16);
        let mut bitmap = [0; 16];
        let mut pages = DirtyPages::new(range, 0x1000, &mut bitmap);
        pages.mark(0, 0x1_0000);
        pages.mark(0x1_0fff, 2);
        pages.mark(0x1_0000 + 69 * 0x1000, u64::MAX);
        pages.mark(0x1_0000 + 65 * 0x1000, 0);
        pages.mark(0x1_0000 + 64 * 0x1000, 1);
        let words = [0, 8].map(|at| u64::from_ne_bytes(bitmap[at..at + 8].try_into().unwrap()));
        assert_eq!(words, [0b11, 1 << 5 | 1]);
    }
}
