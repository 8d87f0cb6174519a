//! Faults that end a channel.

use mdev_core::abi::notifier;
use serde::{Deserialize, Serialize};

/// Fault of a channel: an error notifier code ([`notifier`]), and the address, method or entry that
/// caused the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Error notifier code.
    pub code: u32,
    /// Address, method or entry.
    pub info: u64,
}

impl Fault {
    /// Fault of an engine class: an unknown method, or invalid data or QMD.
    pub fn class(info: impl Into<u64>) -> Self {
        Self { code: notifier::GR_ERROR, info: info.into() }
    }

    /// Fault of the host class: an invalid pushbuffer, GPFIFO entry or host method.
    pub fn host(info: impl Into<u64>) -> Self {
        Self { code: notifier::PBDMA_ERROR, info: info.into() }
    }

    /// MMU fault at an address.
    pub fn mmu(va: u64) -> Self {
        Self { code: notifier::MMU_FAULT, info: va }
    }
}
