//! Copies of data in the pushbuffer to memory.

use mdev_core::abi::compute::{self as abi, inline_copy as flag};
use serde::{Deserialize, Serialize};

use super::{set_lower, set_upper};
use crate::mediator::emulation::context::Context;
use crate::mediator::emulation::semaphore::{Payload, Release};
use crate::mediator::fault::Fault;

/// Registers, and the copy in progress.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct InlineCopy {
    line_length: u32,
    line_count: u32,
    target: u64,
    semaphore: u64,
    payload: u32,
    /// `LAUNCH_DMA` of the copy in progress.
    flags: u32,
    next: u64,
    left: u32,
}

impl InlineCopy {
    /// Executes a method. Returns false if it is none of an inline copy.
    pub fn method(&mut self, cx: Context<'_>, method: u32, data: u32) -> Result<bool, Fault> {
        match method {
            abi::LOAD_INLINE_DATA => self.load(cx, data)?,
            abi::LINE_LENGTH_IN => self.line_length = data,
            abi::LINE_COUNT => self.line_count = data,
            abi::OFFSET_OUT_UPPER => set_upper(&mut self.target, data),
            abi::OFFSET_OUT => set_lower(&mut self.target, data),
            abi::PITCH_OUT => {}
            abi::SET_I2M_SEMAPHORE_A => set_upper(&mut self.semaphore, data),
            abi::SET_I2M_SEMAPHORE_B => set_lower(&mut self.semaphore, data),
            abi::SET_I2M_SEMAPHORE_C => self.payload = data,
            abi::LAUNCH_DMA => self.launch(cx, data)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn launch(&mut self, cx: Context<'_>, flags: u32) -> Result<(), Fault> {
        let supported = flags & flag::PITCH != 0
            && flags & flag::REDUCTION == 0
            && self.line_count <= 1
            && flags & flag::COMPLETION_MASK <= flag::COMPLETION_SEMAPHORE;
        if !supported || self.left > 0 {
            return Err(Fault::class(abi::LAUNCH_DMA));
        }
        self.flags = flags;
        self.next = self.target;
        self.left = if self.line_count == 0 { 0 } else { self.line_length };
        if self.left == 0 { self.complete(cx) } else { Ok(()) }
    }

    /// Writes the next word. The last one may be written in part.
    fn load(&mut self, cx: Context<'_>, data: u32) -> Result<(), Fault> {
        if self.left == 0 {
            return Err(Fault::class(abi::LOAD_INLINE_DATA));
        }
        let len = self.left.min(4);
        cx.space.write(self.next, &data.to_le_bytes()[..len as usize])?;
        self.next = self.next.wrapping_add(len.into());
        self.left -= len;
        if self.left == 0 { self.complete(cx) } else { Ok(()) }
    }

    fn complete(&self, cx: Context<'_>) -> Result<(), Fault> {
        if self.flags & flag::COMPLETION_MASK == flag::COMPLETION_SEMAPHORE {
            let (payload, timestamp) =
                (Payload::Word(self.payload), self.flags & flag::ONE_WORD == 0);
            let release = Release { va: self.semaphore, payload, timestamp, reduction: None };
            release.run(cx.space)?;
        }
        if self.flags & flag::INTERRUPT != 0 {
            cx.raise_interrupt();
        }
        Ok(())
    }
}
