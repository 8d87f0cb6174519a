//! The host class: semaphores, and what does not belong to an engine.

use mdev_core::abi::host::{self as abi, sem};

use super::address_space::AddressSpace;
use super::clock::now_ns;
use super::fault::{Context, Fault, Payload, Progress, release};

/// The registers of the class.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostClass {
    address: u64,
    payload: u64,
}

/// What a method leads to.
#[derive(Clone, Copy, Debug)]
pub enum Action {
    /// Nothing more.
    None,
    /// The subchannel has this class now.
    Bind(u32),
    /// The turn is over.
    Yield,
    /// The channel waits.
    Acquire(Acquire),
}

impl HostClass {
    /// Executes a method below [`abi::FIRST_CLASS_METHOD`].
    pub fn method(&mut self, cx: Context<'_>, method: u32, data: u32) -> Result<Action, Fault> {
        match method {
            abi::SET_OBJECT => return Ok(Action::Bind(data & 0xffff)),
            // Work is done in order: when a method is reached the one before it has ended.
            abi::NOP | abi::SET_REFERENCE | abi::WFI => {}
            abi::NON_STALL_INTERRUPT => cx.interrupt(),
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
        let payload = if data & sem::PAYLOAD_64 != 0 {
            Payload::Double(self.payload)
        } else {
            Payload::Word(self.payload as u32)
        };
        let stamped = data & sem::RELEASE_TIMESTAMP != 0;
        let align = match payload {
            _ if stamped => 16,
            Payload::Double(_) => 8,
            Payload::Word(_) => 4,
        };
        let operation = data & sem::OPERATION_MASK;
        let releases = operation == sem::RELEASE;
        if !self.address.is_multiple_of(if releases { align } else { align.min(8) }) {
            return Err(Fault::host(self.address));
        }
        if releases {
            release(cx.space, self.address, payload, stamped.then(now_ns))?;
            return Ok(Action::None);
        }
        // Reductions are not offered.
        let known =
            [sem::ACQUIRE, sem::ACQ_STRICT_GEQ, sem::ACQ_CIRC_GEQ, sem::ACQ_AND, sem::ACQ_NOR];
        if !known.contains(&operation) {
            return Err(Fault::host(abi::SEM_EXECUTE));
        }
        Ok(Action::Acquire(Acquire { va: self.address, payload, operation }))
    }
}

/// A semaphore that a channel waits for. It gives the engine to others meanwhile, with or without
/// [`sem::ACQUIRE_SWITCH_TSG`].
#[derive(Clone, Copy, Debug)]
pub struct Acquire {
    va: u64,
    payload: Payload,
    operation: u32,
}

impl Acquire {
    /// Looks whether the wait is over.
    pub fn run(&self, space: &AddressSpace) -> Result<Progress, Fault> {
        let satisfied = match self.payload {
            Payload::Word(want) => {
                let have = space.load_u32(self.va)?;
                let ahead = have.wrapping_sub(want).cast_signed() >= 0;
                self.compare(have.into(), want.into(), ahead, !(have | want) != 0)
            }
            Payload::Double(want) => {
                let have = space.load_u64(self.va)?;
                let ahead = have.wrapping_sub(want).cast_signed() >= 0;
                self.compare(have, want, ahead, !(have | want) != 0)
            }
        };
        Ok(if satisfied { Progress::Done } else { Progress::Blocked })
    }

    /// `ahead` and `nor` depend on the width.
    fn compare(&self, have: u64, want: u64, ahead: bool, nor: bool) -> bool {
        match self.operation {
            sem::ACQUIRE => have == want,
            sem::ACQ_STRICT_GEQ => have >= want,
            sem::ACQ_CIRC_GEQ => ahead,
            sem::ACQ_AND => have & want != 0,
            _ => nor,
        }
    }
}
