//! The copy class: linear and pitched copies, constant fills, a semaphore and an interrupt at the end.

use mdev_core::abi::copy::{self as abi, launch, remap};

use super::address_space::Access;
use super::clock::now_ns;
use super::fault::{Context, Fault, Payload, Progress, release};
use crate::mediator::hardware::Pace;
use crate::mem::STREAMING_BYTES;

/// Bytes of a pattern that a fill repeats.
const PATTERN: usize = 12 << 10;

/// The registers of the class.
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyClass {
    semaphore: u64,
    payload: u32,
    source: u64,
    target: u64,
    pitch_in: u32,
    pitch_out: u32,
    line_length: u32,
    line_count: u32,
    constants: [u32; 2],
    components: u32,
}

impl CopyClass {
    /// Executes a method; a launch returns the work to be done.
    pub fn method(&mut self, method: u32, data: u32) -> Result<Option<Transfer>, Fault> {
        match method {
            // Physical mode may be set, and is refused when a launch uses it.
            abi::NOP | abi::SET_SRC_PHYS_MODE | abi::SET_DST_PHYS_MODE => {}
            abi::SET_SEMAPHORE_A => set_upper(&mut self.semaphore, data),
            abi::SET_SEMAPHORE_B => set_lower(&mut self.semaphore, data),
            abi::SET_SEMAPHORE_PAYLOAD => self.payload = data,
            abi::OFFSET_IN_UPPER => set_upper(&mut self.source, data),
            abi::OFFSET_IN_LOWER => set_lower(&mut self.source, data),
            abi::OFFSET_OUT_UPPER => set_upper(&mut self.target, data),
            abi::OFFSET_OUT_LOWER => set_lower(&mut self.target, data),
            abi::PITCH_IN => self.pitch_in = data,
            abi::PITCH_OUT => self.pitch_out = data,
            abi::LINE_LENGTH_IN => self.line_length = data,
            abi::LINE_COUNT => self.line_count = data,
            abi::SET_REMAP_CONST_A => self.constants[0] = data,
            abi::SET_REMAP_CONST_B => self.constants[1] = data,
            abi::SET_REMAP_COMPONENTS => self.components = data,
            abi::LAUNCH_DMA => return self.launch(data).map(Some),
            _ => return Err(Fault::class(method)),
        }
        Ok(None)
    }

    fn launch(&self, flags: u32) -> Result<Transfer, Fault> {
        let refused = Fault::class(abi::LAUNCH_DMA);
        let semaphore = match flags & launch::SEMAPHORE_MASK {
            0 => None,
            launch::SEMAPHORE_ONE_WORD => Some(Semaphore { stamped: false, ..self.semaphore() }),
            launch::SEMAPHORE_TIMESTAMP => Some(self.semaphore()),
            _ => return Err(refused),
        };
        let mut transfer = Transfer {
            semaphore,
            interrupt: flags & launch::INTERRUPT_MASK != 0,
            source: self.source,
            target: self.target,
            pitch_in: pitch(self.pitch_in),
            pitch_out: pitch(self.pitch_out),
            line: 0,
            lines: 0,
            done: 0,
            work: Work::Copy,
        };
        if flags & launch::TRANSFER_MASK == 0 {
            return Ok(transfer);
        }
        let physical = launch::SRC_PHYSICAL | launch::DST_PHYSICAL;
        let pitched = launch::SRC_PITCH | launch::DST_PITCH;
        if flags & physical != 0 || flags & pitched != pitched {
            return Err(refused);
        }
        transfer.line = u64::from(self.line_length);
        if flags & launch::REMAP != 0 {
            let fill = Fill::new(self.components, self.constants).ok_or(refused)?;
            transfer.line *= fill.element() as u64;
            transfer.work = Work::Fill(Box::new(fill));
        }
        let lines = if flags & launch::MULTI_LINE != 0 { self.line_count } else { 1 };
        transfer.lines = if transfer.line == 0 { 0 } else { lines };
        Ok(transfer)
    }

    fn semaphore(&self) -> Semaphore {
        Semaphore { va: self.semaphore, payload: self.payload, stamped: true }
    }
}

fn set_upper(address: &mut u64, data: u32) {
    *address = *address & 0xffff_ffff | u64::from(data & 0x1ff_ffff) << 32;
}

fn set_lower(address: &mut u64, data: u32) {
    *address = *address & !0xffff_ffff | u64::from(data);
}

/// A pitch is signed; added to an address it wraps.
fn pitch(data: u32) -> u64 {
    i64::from(data.cast_signed()).cast_unsigned()
}

#[derive(Clone, Copy, Debug)]
struct Semaphore {
    va: u64,
    payload: u32,
    stamped: bool,
}

#[derive(Debug)]
enum Work {
    Copy,
    Fill(Box<Fill>),
}

/// A launched transfer, and how far it is.
#[derive(Debug)]
pub struct Transfer {
    semaphore: Option<Semaphore>,
    interrupt: bool,
    /// Address of the line in work.
    source: u64,
    /// Address of the line in work.
    target: u64,
    pitch_in: u64,
    pitch_out: u64,
    /// Bytes of a line.
    line: u64,
    /// Lines left, with the one in work.
    lines: u32,
    /// Bytes done of the line in work.
    done: u64,
    work: Work,
}

impl Transfer {
    /// Works until it is done or the turn is over.
    pub fn run(&mut self, cx: Context<'_>) -> Result<Progress, Fault> {
        let streaming = self.line.saturating_mul(u64::from(self.lines)) >= STREAMING_BYTES;
        let Pace { chunk, piece, .. } = cx.hardware.pace();
        let mut since_check = 0;
        while self.lines > 0 {
            if self.done == self.line {
                self.source = self.source.wrapping_add(self.pitch_in);
                self.target = self.target.wrapping_add(self.pitch_out);
                self.done = 0;
                self.lines -= 1;
                continue;
            }
            if since_check >= chunk {
                if cx.turn.expired() {
                    return Ok(Progress::More);
                }
                since_check = 0;
            }
            let at_most = (self.line - self.done).min(chunk);
            let target = self.target.wrapping_add(self.done);
            let moved = match &self.work {
                Work::Copy => {
                    let source = self.source.wrapping_add(self.done);
                    copy_piece(cx, source, target, at_most, streaming)?
                }
                Work::Fill(fill) => fill.piece(cx, target, self.done, at_most)?,
            };
            self.done += moved;
            since_check += moved + piece;
        }
        if let Some(Semaphore { va, payload, stamped }) = self.semaphore {
            release(cx.space, va, Payload::Word(payload), stamped.then(now_ns))?;
        }
        if self.interrupt {
            cx.interrupt();
        }
        Ok(Progress::Done)
    }
}

fn copy_piece(
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

/// Elements made of constants, over and over.
#[derive(Debug)]
struct Fill {
    /// Whole elements, repeated.
    pattern: Vec<u8>,
    /// Which bytes of an element are written, where not all are.
    mask: Option<Vec<bool>>,
    element: usize,
}

impl Fill {
    /// `None` where a component would come from a source: only fills are remapped.
    fn new(components: u32, constants: [u32; 2]) -> Option<Self> {
        let size = (components >> remap::COMPONENT_SIZE_SHIFT & 3) as usize + 1;
        let count = (components >> remap::NUM_DST_SHIFT & 3) as usize + 1;
        let (mut element, mut mask) = (Vec::new(), Vec::new());
        for shift in &remap::DST_SHIFTS[..count] {
            let constant = match components >> shift & 7 {
                remap::CONST_A => Some(constants[0]),
                remap::CONST_B => Some(constants[1]),
                remap::NO_WRITE => None,
                _ => return None,
            };
            element.extend_from_slice(&constant.unwrap_or_default().to_le_bytes()[..size]);
            mask.extend(std::iter::repeat_n(constant.is_some(), size));
        }
        let pattern = element.repeat(PATTERN / element.len());
        let mask = mask.iter().any(|written| !written).then_some(mask);
        Some(Self { pattern, mask, element: element.len() })
    }

    fn element(&self) -> usize {
        self.element
    }

    /// Fills at most `at_most` bytes of a line, from `done` bytes into it.
    fn piece(&self, cx: Context<'_>, va: u64, done: u64, at_most: u64) -> Result<u64, Fault> {
        let phase = (done % self.pattern.len() as u64) as usize;
        let Some(mask) = &self.mask else {
            let bytes = &self.pattern[phase..];
            let to = cx.space.resolve(va, at_most.min(bytes.len() as u64), Access::Write)?;
            cx.hardware.write(cx.vgpu, to, &bytes[..to.len as usize])?;
            return Ok(to.len);
        };
        // Bytes that are not written must not even be read and put back: the guest may be writing them.
        for (index, written) in mask.iter().enumerate() {
            if *written {
                let at = va.wrapping_add(index as u64);
                let to = cx.space.resolve(at, 1, Access::Write)?;
                cx.hardware.write(cx.vgpu, to, &self.pattern[index..=index])?;
            }
        }
        Ok(self.element as u64)
    }
}
