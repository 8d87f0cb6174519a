//! Record of engine time and activity, for the adopting process.

use std::time::Duration;

use mdev_core::ids::ChannelId;
use serde::{Deserialize, Serialize};

use crate::nvidia::adoption::moment::Moment;
use crate::nvidia::observers::ctxsw_log::LogPosition;

/// Engine time and activity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveAccounting {
    /// When this was recorded.
    pub at: Option<Moment>,
    /// Engine time, and the place in the context switch log up to which it counts.
    pub log: Option<LogPosition>,
    /// Total time with copies to do.
    pub copying: Duration,
    /// Total time with any work to do.
    pub had_work: Duration,
    /// The vGPU was copying, or had work, when this was recorded.
    pub was_copying: bool,
    /// As above.
    pub was_busy: bool,
    /// Channels for which was rung.
    pub used: Vec<ChannelId>,
    /// Rings for entries that polling found, and wakeups by the guest.
    pub rings: [u64; 2],
    /// The gate is to be closed.
    pub closing: bool,
}
