//! The host class: semaphores, and methods that belong to no engine.

use mdev_core::abi::host::{self as abi, sem};
use serde::{Deserialize, Serialize};

use super::context::Context;
use super::reduction::Reduction;
use super::semaphore::{Acquire, Payload, Release};
use crate::mediator::fault::Fault;

/// Registers of the class.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct HostClass {
    address: u64,
    payload: u64,
}

/// Consequence of a method for its channel.
#[derive(Clone, Copy, Debug)]
pub enum Action {
    /// None.
    None,
    /// Binds this class to the subchannel.
    Bind(u32),
    /// Yields the engine.
    Yield,
    /// Waits for a semaphore.
    Acquire(Acquire),
}

impl HostClass {
    /// Executes a method below [`abi::FIRST_CLASS_METHOD`].
    pub fn method(&mut self, cx: Context<'_>, method: u32, data: u32) -> Result<Action, Fault> {
        match method {
            abi::SET_OBJECT => return Ok(Action::Bind(data & 0xffff)),
            // The channel runs methods in order, so all earlier work is complete.
            abi::NOP | abi::SET_REFERENCE | abi::WFI => {}
            abi::NON_STALL_INTERRUPT => cx.raise_interrupt(),
            abi::MEM_OP_A..abi::MEM_OP_D if method.is_multiple_of(4) => {}
            abi::MEM_OP_D if data >> 27 == abi::MEM_OP_D_MEMBAR => {
                std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            }
            abi::SEM_ADDR_LO => {
                self.address = self.address & !0xffff_ffff | u64::from(data & !3);
            }
            abi::SEM_ADDR_HI => {
                self.address = self.address & 0xffff_ffff | u64::from(data & 0x1ff_ffff) << 32;
            }
            abi::SEM_PAYLOAD_LO => self.payload = self.payload & !0xffff_ffff | u64::from(data),
            abi::SEM_PAYLOAD_HI => {
                self.payload = self.payload & 0xffff_ffff | u64::from(data) << 32;
            }
            abi::SEM_EXECUTE => return self.semaphore(cx, data),
            abi::YIELD if data & 3 == abi::YIELD_TSG => return Ok(Action::Yield),
            abi::YIELD => {}
            _ => return Err(Fault::host(method)),
        }
        Ok(Action::None)
    }

    fn semaphore(&self, cx: Context<'_>, data: u32) -> Result<Action, Fault> {
        let payload = Payload::new(self.payload, data & sem::PAYLOAD_64 != 0);
        let stamped = data & sem::RELEASE_TIMESTAMP != 0;
        let align = match payload {
            _ if stamped => 16,
            Payload::Double(_) => 8,
            Payload::Word(_) => 4,
        };
        let operation = data & sem::OPERATION_MASK;
        let reduction = if operation == sem::REDUCTION {
            let signed = data & sem::REDUCTION_UNSIGNED == 0;
            let number = data >> sem::REDUCTION_SHIFT & sem::REDUCTION_MASK;
            let known = Reduction::of_host(number, signed);
            Some(known.ok_or(Fault::host(abi::SEM_EXECUTE))?)
        } else {
            None
        };
        let releases = operation == sem::RELEASE || reduction.is_some();
        if !self.address.is_multiple_of(if releases { align } else { align.min(8) }) {
            return Err(Fault::host(self.address));
        }
        if releases {
            Release { va: self.address, payload, timestamp: stamped, reduction }.run(cx.space)?;
            return Ok(Action::None);
        }
        if !sem::ACQUIRES.contains(&operation) {
            return Err(Fault::host(abi::SEM_EXECUTE));
        }
        Ok(Action::Acquire(Acquire { va: self.address, payload, operation }))
    }
}
