//! Saving and restoring a device's state, and logging what it writes: capabilities that a device may have.
//!
//! A device that can be saved implements [`Migration`]; the session keeps its state machine, so that only the steps
//! that exist reach the device, and data only while they are wanted. One that can say which memory it has written
//! implements [`DmaLogging`].

use crate::errno::Errno;

/// What a device does as far as migration is concerned (`VFIO_DEVICE_STATE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MigrationState {
    /// It has failed and must be reset.
    Error = 0,
    /// It changes neither its own state nor memory, and raises no interrupt.
    Stop = 1,
    /// It works.
    Running = 2,
    /// It has stopped, and its state is read.
    StopCopy = 3,
    /// It has stopped, and a state is written.
    Resuming = 4,
    /// It works, and its state is read already.
    PreCopy = 6,
}

impl MigrationState {
    /// Every state.
    pub const ALL: [Self; 6] =
        [Self::Error, Self::Stop, Self::Running, Self::StopCopy, Self::Resuming, Self::PreCopy];

    /// The state with this number.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as u32 == raw)
    }

    /// Whether the device's state can be read.
    pub const fn is_saving(self) -> bool {
        matches!(self, Self::StopCopy | Self::PreCopy)
    }

    /// The next step on the way to `target`, which is another state: the shortest way that has no saving state in its
    /// middle. An error where there is none.
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

/// A device whose state can be saved, and restored into another of its kind.
pub trait Migration {
    /// Whether [`MigrationState::PreCopy`] is supported.
    fn pre_copy(&self) -> bool {
        false
    }

    /// Takes one step between neighbouring states. Where it fails the device is as before, except from
    /// [`MigrationState::Resuming`], where what was written may be bad: then it waits for a reset.
    fn step(&mut self, from: MigrationState, to: MigrationState) -> Result<(), Errno>;

    /// Reads the next bytes of the state. Less than `data` has room for means that there are no more for now.
    fn read(&mut self, data: &mut [u8]) -> Result<usize, Errno>;

    /// Takes the next bytes of a state. They are untrusted input.
    fn write(&mut self, data: &[u8]) -> Result<(), Errno>;
}

/// A range of memory as the device sees it; its end does not overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaRange {
    /// Where it begins.
    pub address: u64,
    /// Bytes, more than none.
    pub size: u64,
}

/// A device that can say which memory it has written.
pub trait DmaLogging {
    /// Begins to log writes to these ranges, or all where there are none. Answers the page size that it logs in, which
    /// need not be the `page_size` (a power of two) that the client would like.
    fn start(&mut self, page_size: u64, ranges: &[DmaRange]) -> Result<u64, Errno>;

    /// Ends it.
    fn stop(&mut self);

    /// Marks the pages of a range that were written since they were last reported.
    fn report(&mut self, range: DmaRange, pages: &mut DirtyPages<'_>) -> Result<(), Errno>;
}

/// A bitmap of the pages of a range.
#[derive(Debug)]
pub struct DirtyPages<'a> {
    address: u64,
    page_size: u64,
    pages: u64,
    bitmap: &'a mut [u8],
}

impl<'a> DirtyPages<'a> {
    /// Bytes of the bitmap for a range, in whole words of 64 bits.
    pub const fn bytes(size: u64, page_size: u64) -> u64 {
        size.div_ceil(page_size).div_ceil(64) * 8
    }

    /// None of the range's pages is marked. `bitmap` is zero and has [`Self::bytes`].
    pub(crate) fn new(range: DmaRange, page_size: u64, bitmap: &'a mut [u8]) -> Self {
        let pages = range.size.div_ceil(page_size);
        Self { address: range.address, page_size, pages, bitmap }
    }

    /// Marks every page that `size` bytes at `address` touch; what is outside of the range is left out.
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
            // Words are in the host's byte order.
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

    fn way(
        from: MigrationState,
        to: MigrationState,
        pre_copy: bool,
    ) -> Option<Vec<MigrationState>> {
        let mut way = vec![from];
        while way.last() != Some(&to) {
            way.push(way.last()?.step_to(to, pre_copy).ok()?);
            assert!(way.len() < 6, "{way:?} goes on for ever");
        }
        Some(way)
    }

    #[test]
    fn the_ways_are_those_of_the_specification() {
        let ways = [
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
        for (from, to, expected) in ways {
            assert_eq!(way(from, to, true), expected, "{from:?} to {to:?}");
        }
        assert_eq!(way(Running, PreCopy, false), None);
    }

    #[test]
    fn every_way_ends_and_has_no_saving_state_in_its_middle() {
        for pre_copy in [false, true] {
            for from in MigrationState::ALL {
                for to in MigrationState::ALL {
                    let Some(way) = way(from, to, pre_copy) else { continue };
                    if let [_, middle @ .., _] = &way[..] {
                        assert!(!middle.iter().any(|state| state.is_saving()), "{way:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn marks_touched_pages_of_the_range_only() {
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
