//! Usage counters and quotas of a vGPU.

use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Waits;
use crate::ids::VgpuId;

/// Counters of one vGPU since its admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Engine time, in nanoseconds.
    pub engine_ns: u64,
    /// Part of the engine time for copies and their methods, in nanoseconds.
    pub copy_ns: u64,
    /// Part of the engine time for kernels and their methods, in nanoseconds.
    pub compute_ns: u64,
    /// Time spent runnable without the engine, in nanoseconds.
    pub wait_ns: u64,
    /// Part of the wait with a closed gate or an exhausted [`Budget`], in nanoseconds.
    ///
    /// [`Budget`]: crate::sched::Budget
    pub gated_ns: u64,
    /// Number of times that a gate closed or a budget was exhausted while the group had work.
    pub gate_closings: u64,
    /// Engine time from such an event until the group released the engine, in nanoseconds: the cost
    /// of gates and budgets to other vGPUs.
    pub gate_cost_ns: u64,
    /// Completed GPFIFO entries.
    pub submissions: u64,
    /// Doorbells received by polling, without an exit of the VM.
    pub polled_doorbells: u64,
    /// Wake-ups by a trapped write.
    pub wakeups: u64,
    /// Number of times that the group was preempted with work left.
    pub preemptions: u64,
    /// Number of times that the group released the engine later than the end of its slice, gate or
    /// budget, beyond the granularity of preemption.
    pub slice_overruns: u64,
    /// Sum of these overruns, in nanoseconds.
    pub overrun_ns: u64,
    /// Time in which the host ran other processes on the engine's CPU during the group's slices, in
    /// nanoseconds. It is charged to no vGPU.
    pub stolen_ns: u64,
    /// Channel faults, including hangs.
    pub faults: u64,
    /// Channels that were reset after a hang.
    pub hang_resets: u64,
    /// Submissions that [`Quotas::submissions_per_second`] delayed.
    pub throttled: u64,
    /// True while the group has queued or running work.
    pub runnable: bool,
    /// Size of imported guest memory, in bytes.
    pub imported_bytes: u64,
    /// Number of channels.
    pub channels: u32,
    /// Number of channel groups with work, among which the vGPU's slice is divided. 0 and 1 are the
    /// same.
    pub busy_groups: u32,
    /// Waits for the engine.
    pub waits: Waits,
}

impl Usage {
    /// Returns the engine time for neither copies nor kernels: semaphores, and methods without a
    /// launch.
    pub fn host_ns(&self) -> u64 {
        self.engine_ns.saturating_sub(self.copy_ns).saturating_sub(self.compute_ns)
    }
}

/// Counters of all admitted vGPUs, read at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageReport {
    /// Time of the reading: `CLOCK_MONOTONIC` in nanoseconds.
    pub now_ns: u64,
    /// Counters of each vGPU.
    pub vgpus: Vec<(VgpuId, Usage)>,
}

/// Limits of a vGPU besides engine time. `None` is the limit of the admission, or no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quotas {
    /// GPFIFO entries per second, averaged over at least 50 ms. Further entries wait in the ring.
    pub submissions_per_second: Option<NonZeroU32>,
    /// Number of channels, at most [`ClientSpec::max_channels`]. Existing channels stay.
    ///
    /// [`ClientSpec::max_channels`]: super::ClientSpec::max_channels
    pub max_channels: Option<u32>,
    /// Size of imported guest memory in bytes, at most [`ClientSpec::max_import_bytes`]. Existing
    /// imports stay.
    ///
    /// [`ClientSpec::max_import_bytes`]: super::ClientSpec::max_import_bytes
    pub max_import_bytes: Option<u64>,
    /// Hang limit: engine time of one kernel or transfer after which its channel is reset. Since
    /// the limit is engine time and not wall time, other vGPUs' load does not count.
    pub hang_timeout: Option<Duration>,
    /// Wait for a semaphore after which the channel is reset as hung.
    pub acquire_timeout: Option<Duration>,
}

impl Quotas {
    /// Default hang limit.
    ///
    /// The software GPU preempts all work, so an endless kernel costs its own vGPU's share only.
    /// The limit exists so that the guest gets an error; it is far above the engine time of kernels
    /// that end.
    pub const DEFAULT_HANG_TIMEOUT: Duration = Duration::from_secs(60);
    /// Minimum of the timeouts.
    pub const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);
    /// Maximum of the timeouts.
    pub const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            submissions_per_second: None,
            max_channels: None,
            max_import_bytes: None,
            hang_timeout: Some(Self::DEFAULT_HANG_TIMEOUT),
            // A wait uses no engine time, and may be intended.
            acquire_timeout: None,
        }
    }
}
