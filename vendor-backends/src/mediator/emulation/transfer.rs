//! Transfers of the copy class: copies and fills, line by line, preemptible between chunks.

use ipc::mem::STREAMING_BYTES;
use serde::{Deserialize, Serialize};

use super::address_space::Access;
use super::context::{Context, Progress};
use super::fill::Fill;
use super::remap::{Remap, RemapRegisters};
use super::semaphore::Release;
use crate::mediator::fault::Fault;
use crate::mediator::hardware::Pace;

/// Kind of a transfer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "Elements", into = "Elements")]
pub(super) enum Work {
    Copy,
    Fill(Box<Fill>),
    Remap(Remap),
}

impl Work {
    /// Returns the work on elements that remap registers describe: a fill if all components are
    /// constants. `None` if a component does not exist.
    pub fn of_elements(registers: RemapRegisters) -> Option<Self> {
        match Fill::new(registers) {
            Some(fill) => Some(Self::Fill(Box::new(fill))),
            None => Remap::new(registers).map(Self::Remap),
        }
    }

    /// Returns whether the work can stop within an element.
    fn stops_anywhere(&self) -> bool {
        match self {
            Self::Copy => true,
            Self::Fill(fill) => fill.writes_all(),
            Self::Remap(_) => false,
        }
    }

    /// Returns the length of an element of the target in bytes.
    pub fn element(&self) -> u64 {
        match self {
            Self::Copy => 1,
            Self::Fill(fill) => fill.element() as u64,
            Self::Remap(remap) => remap.element() as u64,
        }
    }
}

/// A launched transfer and its progress.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Transfer {
    /// Released at the end.
    pub(super) semaphore: Option<Release>,
    pub(super) interrupt: bool,
    /// Source address of the current line.
    pub(super) source: u64,
    /// Target address of the current line.
    pub(super) target: u64,
    pub(super) pitch_in: u64,
    pub(super) pitch_out: u64,
    /// Length of a line in bytes.
    pub(super) line_bytes: u64,
    /// Remaining lines, including the current one.
    pub(super) lines: u32,
    /// Bytes done of the current line.
    pub(super) done: u64,
    pub(super) work: Work,
}

impl Transfer {
    /// Runs until the transfer is complete or the run limit is reached.
    pub fn run(&mut self, cx: Context<'_>) -> Result<Progress, Fault> {
        let streaming = self.line_bytes.saturating_mul(u64::from(self.lines)) >= STREAMING_BYTES;
        let Pace { chunk_bytes, range_cost, .. } = cx.hardware.pace();
        let mut since_check = 0;
        while self.lines > 0 {
            if self.done == self.line_bytes {
                self.source = self.source.wrapping_add(self.pitch_in);
                self.target = self.target.wrapping_add(self.pitch_out);
                self.done = 0;
                self.lines -= 1;
                continue;
            }
            if since_check >= chunk_bytes {
                if cx.limit.reached() {
                    return Ok(Progress::More);
                }
                since_check = 0;
            }
            let at_most = (self.line_bytes - self.done).min(chunk_bytes);
            let target = self.target.wrapping_add(self.done);
            let moved = match &self.work {
                Work::Copy => {
                    let source = self.source.wrapping_add(self.done);
                    copy_range(cx, source, target, at_most, streaming)?
                }
                Work::Fill(fill) => fill.write_range(cx, target, self.done, at_most)?,
                Work::Remap(remap) => {
                    remap.copy_range(cx, self.source, self.target, self.done, at_most)?
                }
            };
            self.done += moved;
            since_check += match &self.work {
                Work::Remap(_) => chunk_bytes,
                Work::Copy | Work::Fill(_) => moved + range_cost,
            };
        }
        if let Some(semaphore) = self.semaphore {
            semaphore.run(cx.space)?;
        }
        if self.interrupt {
            cx.raise_interrupt();
        }
        Ok(Progress::Done)
    }
}

impl Transfer {
    /// Returns whether a launch can lead to the state.
    pub fn is_valid(&self) -> bool {
        let Self { line_bytes, done, lines, ref work, .. } = *self;
        let whole = |bytes: u64| work.stops_anywhere() || bytes.is_multiple_of(work.element());
        // Many empty lines would take time without a look at the run limit.
        let not_empty = line_bytes > 0 || lines == 0;
        done <= line_bytes && whole(line_bytes) && whole(done) && not_empty
    }
}

/// What is saved of the [`Work`]: the registers of a fill or a remapped copy.
type Elements = Option<RemapRegisters>;

impl From<Work> for Elements {
    fn from(work: Work) -> Self {
        match work {
            Work::Copy => None,
            Work::Fill(fill) => Some(fill.registers()),
            Work::Remap(remap) => Some(remap.registers()),
        }
    }
}

impl TryFrom<Elements> for Work {
    type Error = &'static str;

    fn try_from(elements: Elements) -> Result<Self, Self::Error> {
        match elements {
            None => Ok(Self::Copy),
            Some(registers) => Self::of_elements(registers).ok_or("no such component"),
        }
    }
}

fn copy_range(
    cx: Context<'_>,
    source: u64,
    target: u64,
    at_most: u64,
    streaming: bool,
) -> Result<u64, Fault> {
    let from = cx.space.resolve(source, at_most, Access::Read)?;
    let to = cx.space.resolve(target, from.len, Access::Write)?;
    cx.hardware.copy(cx.vgpu, from, to, streaming)?;
    Ok(to.len)
}

#[cfg(test)]
mod tests {
    use mdev_core::abi::copy::remap;

    use super::*;

    fn transfer(lines: u32, line_bytes: u64, done: u64, work: Work) -> Transfer {
        Transfer {
            semaphore: None,
            interrupt: false,
            source: 0,
            target: 0,
            pitch_in: 0,
            pitch_out: 0,
            line_bytes,
            lines,
            done,
            work,
        }
    }

    #[test]
    fn a_state_that_no_launch_leads_to_is_refused() {
        let copy = |lines, line_bytes, done| transfer(lines, line_bytes, done, Work::Copy);
        assert!(copy(1, 100, 100).is_valid() && copy(0, 0, 0).is_valid());
        assert!(!copy(1, 100, 101).is_valid(), "more than a line");
        assert!(!copy(u32::MAX, 0, 0).is_valid(), "empty lines without an end");
        // A remapped copy of pairs of bytes stops after a pair; a masked fill, too.
        let two = 1 << remap::NUM_DST_SHIFT | 1 << remap::NUM_SRC_SHIFT;
        let registers = |components| RemapRegisters { components, constants: [0; 2] };
        for components in [two | 1, two | remap::NO_WRITE << 4 | remap::CONST_A] {
            let work = Work::of_elements(registers(components)).unwrap();
            let with = |done| transfer(1, 100, done, work.clone());
            assert!(with(2).is_valid() && !with(3).is_valid(), "{components:x}");
        }
        assert!(Work::try_from(Some(registers(two | 3))).is_err(), "no component");
    }
}
