//! The copy class: linear and pitched copies, with or without rearranged components, and constant
//! fills, with a semaphore and an interrupt at the end.

use mdev_core::abi::copy::{self as abi, launch};
use serde::{Deserialize, Serialize};

use super::reduction::Reduction;
use super::remap::RemapRegisters;
use super::semaphore::{Payload, Release};
use super::transfer::{Transfer, Work};
use crate::mediator::fault::Fault;

/// Registers of the class.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct CopyClass {
    semaphore: u64,
    payload: u64,
    source: u64,
    target: u64,
    pitch_in: u32,
    pitch_out: u32,
    line_length: u32,
    line_count: u32,
    remap: RemapRegisters,
}

impl CopyClass {
    /// Executes a method. A launch returns the transfer to run.
    pub fn method(&mut self, method: u32, data: u32) -> Result<Option<Transfer>, Fault> {
        match method {
            // The physical modes may be set, but a launch that uses them is refused.
            abi::NOP | abi::SET_SRC_PHYS_MODE | abi::SET_DST_PHYS_MODE => {}
            abi::SET_SEMAPHORE_A => set_upper(&mut self.semaphore, data),
            abi::SET_SEMAPHORE_B => set_lower(&mut self.semaphore, data),
            abi::SET_SEMAPHORE_PAYLOAD => set_lower(&mut self.payload, data),
            abi::SET_SEMAPHORE_PAYLOAD_UPPER => {
                self.payload = self.payload & 0xffff_ffff | u64::from(data) << 32;
            }
            abi::OFFSET_IN_UPPER => set_upper(&mut self.source, data),
            abi::OFFSET_IN_LOWER => set_lower(&mut self.source, data),
            abi::OFFSET_OUT_UPPER => set_upper(&mut self.target, data),
            abi::OFFSET_OUT_LOWER => set_lower(&mut self.target, data),
            abi::PITCH_IN => self.pitch_in = data,
            abi::PITCH_OUT => self.pitch_out = data,
            abi::LINE_LENGTH_IN => self.line_length = data,
            abi::LINE_COUNT => self.line_count = data,
            abi::SET_REMAP_CONST_A => self.remap.constants[0] = data,
            abi::SET_REMAP_CONST_B => self.remap.constants[1] = data,
            abi::SET_REMAP_COMPONENTS => self.remap.components = data,
            abi::LAUNCH_DMA => return self.launch(data).map(Some),
            _ => return Err(Fault::class(method)),
        }
        Ok(None)
    }

    fn launch(&self, flags: u32) -> Result<Transfer, Fault> {
        let refused = Fault::class(abi::LAUNCH_DMA);
        let semaphore = match flags & launch::SEMAPHORE_MASK {
            0 => None,
            launch::SEMAPHORE_ONE_WORD => Some(self.semaphore(flags, false)?),
            launch::SEMAPHORE_TIMESTAMP => Some(self.semaphore(flags, true)?),
            _ => return Err(refused),
        };
        let mut transfer = Transfer {
            semaphore,
            interrupt: flags & launch::INTERRUPT_MASK != 0,
            source: self.source,
            target: self.target,
            pitch_in: pitch(self.pitch_in),
            pitch_out: pitch(self.pitch_out),
            line_bytes: 0,
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
        transfer.line_bytes = u64::from(self.line_length);
        if flags & launch::REMAP != 0 {
            transfer.work = Work::of_elements(self.remap).ok_or(refused)?;
            transfer.line_bytes *= transfer.work.element();
        }
        let lines = if flags & launch::MULTI_LINE != 0 { self.line_count } else { 1 };
        transfer.lines = if transfer.line_bytes == 0 { 0 } else { lines };
        Ok(transfer)
    }

    fn semaphore(&self, flags: u32, timestamp: bool) -> Result<Release, Fault> {
        let reduction = if flags & launch::SEMAPHORE_REDUCTION != 0 {
            let signed = flags & launch::SEMAPHORE_REDUCTION_UNSIGNED == 0;
            let number = flags >> launch::SEMAPHORE_REDUCTION_SHIFT & 0xf;
            // Those of floating point numbers are not supported.
            let known = Reduction::of_host(number, signed);
            Some(known.ok_or(Fault::class(abi::LAUNCH_DMA))?)
        } else {
            None
        };
        let payload = Payload::new(self.payload, flags & launch::SEMAPHORE_PAYLOAD_64 != 0);
        Ok(Release { va: self.semaphore, payload, timestamp, reduction })
    }
}

fn set_upper(address: &mut u64, data: u32) {
    *address = *address & 0xffff_ffff | u64::from(data & 0x1ff_ffff) << 32;
}

fn set_lower(address: &mut u64, data: u32) {
    *address = *address & !0xffff_ffff | u64::from(data);
}

/// Returns the signed pitch as a wrapping addend for addresses.
fn pitch(data: u32) -> u64 {
    i64::from(data.cast_signed()).cast_unsigned()
}
