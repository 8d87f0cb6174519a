//! State of a client that also changes without a request of the guest: by faults, by the manager's
//! messages and by the passing of time.

use std::time::{Duration, Instant};

use mdev_core::ids::ChannelId;
use nix::time::ClockId;
use serde::{Deserialize, Serialize};

use crate::nvidia::channels::{Counters, Pause, Resumption};
use crate::nvidia::ctxsw_log::LogPosition;

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

/// Time of the monotonic clock in nanoseconds, which means the same in each process of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Moment(u64);

impl Moment {
    /// Returns the present.
    pub fn now() -> Self {
        let now = ClockId::CLOCK_MONOTONIC.now().map(Duration::from).unwrap_or_default();
        Self(now.as_nanos() as u64)
    }

    /// Returns the moment of an instant.
    pub fn of(instant: Instant) -> Self {
        let Self(now) = Self::now();
        let present = Instant::now();
        let ago = present.saturating_duration_since(instant).as_nanos() as u64;
        let ahead = instant.saturating_duration_since(present).as_nanos() as u64;
        Self(now.saturating_sub(ago).saturating_add(ahead))
    }

    /// Returns the instant. One that is too early or too late for this process is the present.
    pub fn instant(self) -> Instant {
        let (now, present) = (Self::now(), Instant::now());
        let moved = match self.0.checked_sub(now.0) {
            Some(ahead) => present.checked_add(Duration::from_nanos(ahead)),
            None => present.checked_sub(Duration::from_nanos(now.0 - self.0)),
        };
        moved.unwrap_or(present)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instant_keeps_its_place_in_time() {
        let now = Instant::now();
        for instant in
            [now, now.checked_sub(Duration::from_secs(3)).unwrap(), now + Duration::from_secs(7)]
        {
            let same = Moment::of(instant).instant();
            let apart = same.max(instant).duration_since(same.min(instant));
            assert!(apart < Duration::from_millis(50), "{apart:?}");
        }
        let _ = Moment(u64::MAX).instant();
        let _ = Moment(0).instant();
    }
}
