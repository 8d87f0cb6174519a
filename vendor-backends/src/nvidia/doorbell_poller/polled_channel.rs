//! A polled channel, and its recent activity.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use ipc::mem::Mapping;
use mdev_core::abi::userd;
use mdev_core::gpu::EngineKind;
use mdev_core::ids::Token;

use crate::nvidia::usermode_page;

/// Time to spin after the last new entry. A guest that waits for each kernel before it submits the
/// next one gets the full polling rate for kernels of up to this length.
pub(super) const SPIN: Duration = Duration::from_millis(1);

/// Time without a fetched entry after which the GPU counts as backlogged. The next entry can then
/// wait for one [`BACKLOG_INTERVAL`], and the thread does not spin.
const BACKLOG_AFTER: Duration = Duration::from_micros(20);
/// Time without a fetched entry after which the GPU counts as backlogged for channels of programs:
/// those that wait for each kernel have kernels of some length.
const PROGRAMS_BACKLOG_AFTER: Duration = Duration::from_micros(100);

/// A polled channel.
#[derive(Debug)]
pub(super) struct Channel {
    pub engine: EngineKind,
    /// Token that the guest rings.
    pub token: Token,
    /// Token of the GPU.
    pub gpu_token: Token,
    /// The guest memory that holds the USERD.
    pub memory: Arc<Mapping>,
    pub userd_offset: u64,
    /// The guest knows [`userd::NEED_WAKEUP`].
    pub wakes: bool,
    /// Set before the final lock of `rung_put`: a poller that spins may never release the lock for
    /// long enough otherwise.
    pub removed: AtomicBool,
    /// Number of rings for this channel. Counted here and not in memory of the guest.
    pub rings: AtomicU64,
    /// Number of rings for new entries.
    pub submissions: AtomicU64,
    /// `GP_PUT` at the last ring. Locked while the USERD is accessed.
    pub rung_put: Mutex<u32>,
}

impl Channel {
    /// Calls `access` with the USERD locked. None if the channel is removed, or if another thread
    /// holds the lock.
    pub fn try_access<T>(&self, access: impl FnOnce(&mut u32) -> T) -> Option<T> {
        if self.removed.load(Ordering::Acquire) {
            return None;
        }
        match self.rung_put.try_lock() {
            Ok(mut rung_put) => Some(access(&mut rung_put)),
            Err(TryLockError::Poisoned(rung_put)) => Some(access(&mut rung_put.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub fn gp_put(&self) -> Option<u32> {
        self.memory.load_u32(self.userd_offset + userd::GP_PUT)
    }

    pub fn gp_get(&self) -> Option<u32> {
        self.memory.load_u32(self.userd_offset + userd::GP_GET)
    }

    pub fn has_new_entries(&self) -> bool {
        let new = |rung_put: &mut u32| self.gp_put().is_some_and(|put| put != *rung_put);
        self.try_access(new).unwrap_or(false)
    }

    pub fn ring(&self, doorbell: &Mapping) {
        self.rings.fetch_add(1, Ordering::Relaxed);
        usermode_page::ring(doorbell, self.gpu_token);
    }

    /// Tells the guest whether it has to wake the poller.
    pub fn set_need_wakeup(&self, need_wakeup: bool) {
        if self.wakes && !self.removed.load(Ordering::Acquire) {
            let _rung_put = self.rung_put.lock();
            let _ =
                self.memory.store_u32(self.userd_offset + userd::NEED_WAKEUP, need_wakeup.into());
        }
    }
}

/// Result of polling a channel once.
#[derive(Debug)]
pub(super) struct Poll {
    /// The channel had new entries.
    pub new_entries: bool,
    pub gp_get: Option<u32>,
    /// The GPU has not fetched all entries.
    pub queued: bool,
}

/// A channel and its recent activity.
#[derive(Debug)]
pub(super) struct ChannelActivity {
    pub channel: Arc<Channel>,
    /// The channel's.
    pub token: Token,
    /// When the channel last had new entries.
    pub new_entries_at: Instant,
    pub gp_get: Option<u32>,
    /// When `gp_get` last changed.
    pub fetched_at: Instant,
    /// The GPU has not fetched all entries.
    pub queued: bool,
}

impl ChannelActivity {
    pub fn new(channel: Arc<Channel>, now: Instant) -> Self {
        let token = channel.token;
        Self { channel, token, new_entries_at: now, gp_get: None, fetched_at: now, queued: false }
    }

    /// Records a poll. Returns whether the channel had new entries.
    pub fn record(&mut self, poll: &Poll, now: Instant) -> bool {
        if poll.new_entries {
            self.new_entries_at = now;
        }
        if poll.gp_get != self.gp_get {
            (self.gp_get, self.fetched_at) = (poll.gp_get, now);
        }
        self.queued = poll.queued;
        poll.new_entries
    }

    /// Returns whether the next entry is likely to arrive soon.
    pub fn is_active(&self, now: Instant) -> bool {
        now.duration_since(self.new_entries_at) < SPIN
    }

    /// Returns whether the next entry would wait for queued ones.
    pub fn is_backlogged(&self, now: Instant) -> bool {
        let after = if self.channel.wakes { BACKLOG_AFTER } else { PROGRAMS_BACKLOG_AFTER };
        self.queued && now.duration_since(self.fetched_at) > after
    }
}
