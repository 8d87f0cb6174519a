//! Exceptions of kernels, such as illegal instructions and failed assertions.

use serde::{Deserialize, Serialize};

use crate::ids::ChannelId;

/// Exception of a kernel, as the driver of an NVIDIA GPU tells the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exception {
    /// A channel of the kernel's group.
    pub channel: ChannelId,
    /// Number of the notifier of the channel's compute class.
    pub notifier: u32,
}

/// Errors of a GPU's multiprocessors, as the driver reads them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ErrorStates {
    /// `NV83DE_SM_ERROR_STATE_REGISTERS` of each multiprocessor, without addresses.
    pub states: Vec<u8>,
    /// Kind of the channel's first access that the memory management unit refused, if there was
    /// one.
    pub fault: Option<u32>,
}
