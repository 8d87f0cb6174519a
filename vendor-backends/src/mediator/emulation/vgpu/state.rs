//! State of a vGPU that control requests change and the engine uses.

use std::collections::BTreeMap;

use mdev_core::gpu::{ChannelSpec, Quotas};

use super::fault_backoff::FaultBackoff;
use super::machine_code_log::MachineCodeLog;
use super::memory_watch::MemoryWatch;
use crate::mediator::emulation::address_space::AddressSpaces;
use crate::mediator::emulation::channel::Channel;
use crate::mediator::emulation::token_bucket::TokenBucket;
use crate::mediator::hardware::Reservation;
use crate::mediator::wire::Refusal;

/// State under the vGPU's lock.
#[derive(Debug)]
pub(super) struct VgpuState {
    pub spaces: AddressSpaces,
    pub channels: BTreeMap<u32, Channel>,
    pub next_id: u32,
    /// No channel runs, and nothing writes memory.
    pub paused: bool,
    /// Channel that ran last.
    pub last_run: u32,
    pub fault_backoff: FaultBackoff,
    pub memory_watch: MemoryWatch,
    pub machine_code_log: MachineCodeLog,
    pub quotas: Quotas,
    /// Limiter for the quota of submissions.
    pub submissions: Option<TokenBucket>,
    /// Reservation of the partition; `None` after the eviction.
    pub reservation: Option<Box<dyn Reservation>>,
}

impl VgpuState {
    /// Returns whether a GPFIFO entry may be fetched.
    pub fn may_submit(&mut self, now_ns: u64) -> bool {
        self.submissions.as_mut().is_none_or(|bucket| {
            bucket.refill(now_ns);
            bucket.has_token()
        })
    }

    /// Refuses an import beyond the quota or the granted size.
    pub fn check_import(&self, len: u64) -> Result<(), Refusal> {
        let quota = self.quotas.max_import_bytes.unwrap_or(u64::MAX);
        let room =
            quota.saturating_sub(self.spaces.imported_bytes()).min(self.spaces.import_room());
        if len > room { Err(Refusal::ImportLimit) } else { Ok(()) }
    }

    /// Refuses a channel in a group whose channels have another engine or address space.
    pub fn check_group(&self, spec: &ChannelSpec) -> Result<(), Refusal> {
        let fits = |other: &ChannelSpec| {
            spec.group.is_none()
                || other.group != spec.group
                || (other.engine, other.space) == (spec.engine, spec.space)
        };
        let all_fit = self.channels.values().all(|channel| fits(channel.spec()));
        if all_fit { Ok(()) } else { Err(Refusal::Group) }
    }

    /// Returns an unused channel id. Ids are reused late, so that a stale id names no channel.
    pub fn allocate_channel_id(&mut self) -> u32 {
        loop {
            let id = self.next_id;
            self.next_id = self.next_id % 0x7fff_ffff + 1;
            if !self.channels.contains_key(&id) {
                return id;
            }
        }
    }
}
