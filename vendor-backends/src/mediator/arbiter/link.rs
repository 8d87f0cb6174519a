//! Messages of the arbiter to a context. A context answers none of them.

use mdev_core::gpu::Quotas;
use serde::{Deserialize, Serialize};

/// Orders of the arbiter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Comes first. Attached: the page of turns, and the eventfd that has the arbiter look at it.
    Hello {
        /// Version of the protocol, [`VERSION`](crate::mediator::wire::VERSION).
        version: u32,
    },
    /// Sets the quotas.
    SetQuotas(Quotas),
    /// Faults all channels.
    Reset,
    /// Ends the vGPU.
    End,
}

/// File descriptors of [`Order::Hello`].
pub const HELLO_FDS: usize = 2;
