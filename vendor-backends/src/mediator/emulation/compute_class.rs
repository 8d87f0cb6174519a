//! The compute class.
//!
//! * `launch`: checks a QMD and starts its grid; `grid`: a grid in progress
//! * `driver_kernels`: kernels of NVIDIA's libcuda that the software GPU knows
//! * `inline_copy`: copies of data in the pushbuffer
//! * `report`: semaphores

mod driver_kernels;
mod grid;
mod inline_copy;
mod launch;
mod report;
#[cfg(test)]
mod tests;

use mdev_core::abi::compute as abi;
use serde::{Deserialize, Serialize};

pub use self::grid::Grid;
use self::inline_copy::InlineCopy;
use self::report::ReportSemaphore;
use super::context::Context;
use crate::mediator::fault::Fault;

/// Registers of the class.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct ComputeClass {
    /// QMD address >> 8.
    qmd: u32,
    /// Window of shared memory. It hides the mappings of the address space.
    shared: Window,
    /// Window of local memory.
    local: Window,
    inline_copy: InlineCopy,
    report: ReportSemaphore,
    /// Address of a program that a launch was refused for, because it is machine code.
    machine_code: Option<u64>,
}

/// Window in which kernels see memory of their block or thread.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Window {
    base: u64,
    set: bool,
}

impl Window {
    /// Length if the base is a multiple of it.
    const LARGE: u64 = 1 << 32;
    /// Length of other windows, and alignment.
    const SMALL: u64 = 1 << 24;

    fn contains(self, va: u64) -> bool {
        let len = if self.base.is_multiple_of(Self::LARGE) { Self::LARGE } else { Self::SMALL };
        self.set && (self.base..self.base.saturating_add(len)).contains(&va)
    }

    fn set_upper(&mut self, data: u32) {
        set_upper(&mut self.base, data & 0x1_ffff);
        self.set = true;
    }

    fn set_lower(&mut self, method: u32, data: u32) -> Result<(), Fault> {
        if !u64::from(data).is_multiple_of(Self::SMALL) {
            return Err(Fault::class(method));
        }
        set_lower(&mut self.base, data);
        Ok(())
    }
}

impl ComputeClass {
    /// Executes a method. A launch returns the grid to run.
    pub fn method(
        &mut self,
        cx: Context<'_>,
        method: u32,
        data: u32,
    ) -> Result<Option<Grid>, Fault> {
        if self.inline_copy.method(cx, method, data)? || self.report.method(cx, method, data)? {
            return Ok(None);
        }
        match method {
            abi::SEND_PCAS_A => self.qmd = data,
            abi::SEND_SIGNALING_PCAS2_B => return self.schedule(cx, data),
            abi::SET_SHADER_SHARED_MEMORY_WINDOW_A => self.shared.set_upper(data),
            abi::SET_SHADER_SHARED_MEMORY_WINDOW_B => self.shared.set_lower(method, data)?,
            abi::SET_SHADER_LOCAL_MEMORY_WINDOW_A => self.local.set_upper(data),
            abi::SET_SHADER_LOCAL_MEMORY_WINDOW_B => self.local.set_lower(method, data)?,
            // One thread runs everything in order, without caches, and no machine code.
            _ if abi::is_set_up(method) => {}
            _ => return Err(Fault::class(method)),
        }
        Ok(None)
    }

    fn schedule(&mut self, cx: Context<'_>, action: u32) -> Result<Option<Grid>, Fault> {
        match action {
            abi::PCAS_INVALIDATE_COPY_SCHEDULE | abi::PCAS_INVALIDATE_PREFETCH_COPY_SCHEDULE => {
                self.launch(cx, u64::from(self.qmd) << 8)
            }
            _ => Err(Fault::class(abi::SEND_SIGNALING_PCAS2_B)),
        }
    }

    /// Returns the address of the machine code that the class has just refused to run.
    pub fn take_machine_code(&mut self) -> Option<u64> {
        self.machine_code.take()
    }
}

fn set_upper(value: &mut u64, data: u32) {
    *value = *value & 0xffff_ffff | u64::from(data & 0x1ff_ffff) << 32;
}

fn set_lower(value: &mut u64, data: u32) {
    *value = *value & !0xffff_ffff | u64::from(data);
}
