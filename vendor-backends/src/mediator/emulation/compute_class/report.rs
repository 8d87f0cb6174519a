//! Semaphores of the compute class, in both forms that the class has.

use mdev_core::abi::compute::{self as abi, report, report_d};
use serde::{Deserialize, Serialize};

use super::{set_lower, set_upper};
use crate::mediator::emulation::context::Context;
use crate::mediator::emulation::reduction::Reduction;
use crate::mediator::emulation::semaphore::{Payload, Release};
use crate::mediator::fault::Fault;

/// Registers of both forms.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct ReportSemaphore {
    address: u64,
    payload: u64,
    /// Registers of the form with four methods, A to D.
    short_address: u64,
    short_payload: u32,
}

impl ReportSemaphore {
    /// Executes a method. Returns false if it is none of a semaphore.
    pub fn method(&mut self, cx: Context<'_>, method: u32, data: u32) -> Result<bool, Fault> {
        match method {
            abi::SET_REPORT_SEMAPHORE_A => set_upper(&mut self.short_address, data),
            abi::SET_REPORT_SEMAPHORE_B => set_lower(&mut self.short_address, data),
            abi::SET_REPORT_SEMAPHORE_C => self.short_payload = data,
            abi::SET_REPORT_SEMAPHORE_D => self.execute_short(cx, data)?,
            abi::SET_REPORT_SEMAPHORE_ADDRESS_UPPER => set_upper(&mut self.address, data),
            abi::SET_REPORT_SEMAPHORE_ADDRESS_LOWER => set_lower(&mut self.address, data),
            abi::SET_REPORT_SEMAPHORE_PAYLOAD_UPPER => {
                self.payload = self.payload & 0xffff_ffff | u64::from(data) << 32;
            }
            abi::SET_REPORT_SEMAPHORE_PAYLOAD_LOWER => set_lower(&mut self.payload, data),
            abi::REPORT_SEMAPHORE_EXECUTE => self.execute(cx, data)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn execute_short(&self, cx: Context<'_>, data: u32) -> Result<(), Fault> {
        match data & report_d::OPERATION_MASK {
            0 => {}
            report_d::TRAP => {
                cx.raise_interrupt();
                return Ok(());
            }
            _ => return Err(Fault::class(abi::SET_REPORT_SEMAPHORE_D)),
        }
        let number = data >> report_d::REDUCTION_SHIFT;
        let reduction = (data & report_d::REDUCTION != 0)
            .then(|| Reduction::of_compute(number, data & report_d::REDUCTION_SIGNED != 0));
        let (va, payload) = (self.short_address, Payload::Word(self.short_payload));
        let timestamp = data & report_d::ONE_WORD == 0;
        Release { va, payload, timestamp, reduction }.run(cx.space)?;
        if data & report_d::INTERRUPT_MASK != 0 {
            cx.raise_interrupt();
        }
        Ok(())
    }

    fn execute(&self, cx: Context<'_>, data: u32) -> Result<(), Fault> {
        match data & report::OPERATION_MASK {
            0 => {}
            report::TRAP => {
                cx.raise_interrupt();
                return Ok(());
            }
            _ => return Err(Fault::class(abi::REPORT_SEMAPHORE_EXECUTE)),
        }
        let number = data >> report::REDUCTION_SHIFT;
        let reduction = (data & report::REDUCTION != 0)
            .then(|| Reduction::of_compute(number, data & report::REDUCTION_SIGNED != 0));
        let payload = Payload::new(self.payload, data & report::PAYLOAD_64 != 0);
        let timestamp = data & report::SIZE_MASK == 0;
        Release { va: self.address, payload, timestamp, reduction }.run(cx.space)?;
        if data & (report::AWAKEN | report::TRAP_MASK) != 0 {
            cx.raise_interrupt();
        }
        Ok(())
    }
}
