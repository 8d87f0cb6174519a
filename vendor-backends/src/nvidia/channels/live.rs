//! Record of the state of channels that also changes without a request of the guest: by faults and
//! by the manager's messages.

use std::time::Duration;

use mdev_core::ids::ChannelId;
use serde::{Deserialize, Serialize};

use super::pause::{Pause, Resumption};
use crate::nvidia::adoption::moment::Moment;

/// Counters of a vGPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Number of channels that faulted or were reset.
    pub faults: u64,
    /// Number of resets because of a hang or on request of the manager.
    pub hang_resets: u64,
    /// Number of times that the gate was closed.
    pub gate_closings: u64,
}

/// State of the channels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveChannels {
    /// Whether the gate is open.
    pub gate_open: bool,
    /// Whether the channels are stopped for a save.
    pub pause: Pause,
    /// The driver may not have opened or closed the gate for all channels yet.
    pub gate_changes: bool,
    /// Time slice that the manager has set.
    pub timeslice: Option<Duration>,
    /// Engines without work.
    pub idle: [bool; 2],
    /// Number of groups of each engine among which the slice is divided.
    pub sharing: [u32; 2],
    /// The clocks are boosted until further notice.
    pub clocks_kept_up: bool,
    /// The client was freed by the manager's request.
    pub evicted: bool,
    /// Counters.
    pub counters: Counters,
    /// For each engine: faults in a row, and the time of the last one.
    pub faults: [(u32, Option<Moment>); 2],
    /// For each engine: when all teardowns are worked off.
    pub teardowns: [Option<Moment>; 2],
    /// Groups that are scheduled when the gate opens.
    pub unscheduled: Vec<u32>,
    /// Channels that have failed, or that the gate has disabled.
    pub channels: Vec<LiveChannel>,
}

/// State of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveChannel {
    /// Its id.
    pub id: ChannelId,
    /// Error, or 0.
    pub error: u32,
    /// Address of the error.
    pub error_info: u64,
    /// The gate or a pause has disabled the channel.
    pub disabled: bool,
    /// What is to be done before the channel continues.
    pub resumption: Option<Resumption>,
}
