//! Saved channels, and channels that are made again from them. A saved channel is untrusted input.
//!
//! A new channel begins at the start of its ring and without the state that methods have set.
//! Before it continues, it executes the driver's preamble and empty entries up to where the saved
//! one was. They are in the ring for that time, in place of the guest's entries.

use std::sync::Arc;

use ipc::mem::Mapping;
use ipc::seqpacket::{decode, encode};
use mdev_core::abi::host::{GP_ENTRY_BYTES, GpEntry};
use mdev_core::abi::userd;
use mdev_core::gpu::{ChannelSpec, GpuError, Preamble, SavedChannel};
use mdev_core::ids::{ChannelId, GpuVa, SpaceId, Token};
use nvidia_rm::rm_client::AddressSpace;
use serde::{Deserialize, Serialize};

use super::channel::Channel;
use super::pause::{Pause, Place, Resumption};
use super::{Channels, Running};
use crate::nvidia::memory::MemoryLocation;

/// Version of [`State`]. Incremented with every change of it.
const VERSION: u32 = 1;
/// Error of a state that this version does not read.
const DAMAGED: GpuError = GpuError::Invalid("the state of a channel");

/// State of a channel.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    version: u32,
    origin: Origin,
    token: Token,
    preamble: Option<Preamble>,
    place: Place,
    error: u32,
    error_info: u64,
}

/// GPU and driver that a channel's work is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Name of the GPU's model.
    pub gpu: String,
    /// Version of the driver.
    pub driver: String,
}

/// Returns guest memory at an address of an address space, and the offset in it.
pub type Lookup<'a> = &'a dyn Fn(SpaceId, GpuVa) -> Option<(Arc<Mapping>, u64)>;

/// Entries of a guest's ring in whose place others are executed.
#[derive(Debug, Default)]
pub struct Replaced(Vec<(Arc<Mapping>, u64, u64)>);

impl Channels {
    /// Returns the channels, which are stopped.
    pub fn save(&self, origin: &Origin) -> Result<Vec<SavedChannel>, GpuError> {
        let save = |(id, channel): (&ChannelId, &Channel)| {
            let state = State {
                version: VERSION,
                origin: origin.clone(),
                token: channel.token,
                preamble: channel.spec.preamble,
                place: channel.place(),
                error: channel.error,
                error_info: channel.error_info,
            };
            Ok(SavedChannel { id: *id, spec: channel.spec, state: encode(&state)? })
        };
        self.by_id.iter().map(save).collect()
    }

    /// Makes a saved channel again, which is stopped.
    pub fn restore(
        &mut self,
        saved: &SavedChannel,
        origin: &Origin,
        userd: MemoryLocation,
        space: &AddressSpace,
        lookup: Lookup<'_>,
    ) -> Result<(), GpuError> {
        let state: State = decode(&saved.state).map_err(|_| DAMAGED)?;
        let State { place, preamble, .. } = state;
        let entries = saved.spec.gpfifo_entries;
        let preamble = preamble.and_then(|it| Preamble::new(it.va, it.dwords));
        let places = place.get < entries && place.put < entries;
        let numbers = (1..u32::MAX).contains(&saved.id.0) && !self.by_id.contains_key(&saved.id);
        let continues = state.error == 0;
        if state.version != VERSION
            || !places
            || !numbers
            || saved.spec.group.is_some()
            || continues && preamble.is_none()
        {
            return Err(DAMAGED);
        }
        if state.origin != *origin {
            let Origin { gpu, driver } = &state.origin;
            let driver: String = driver.chars().filter(char::is_ascii_graphic).take(32).collect();
            let why = if origin.gpu == *gpu {
                format!("it was saved with the NVIDIA driver {driver}; load that one")
            } else {
                "it was saved on another model of GPU".to_owned()
            };
            return Err(GpuError::Io(std::io::Error::other(why)));
        }
        let spec = ChannelSpec { preamble, ..saved.spec };
        if continues && slots(&spec, lookup).is_none() {
            return Err(GpuError::Unsupported("a ring outside of guest memory"));
        }
        self.create_with(saved.id, &spec, userd, space, Some(state.token))?;
        if let Some(channel) = self.by_id.get_mut(&saved.id) {
            channel.resumption = Some(Resumption::Restart(place));
        }
        if !continues {
            self.fail(saved.id, state.error, state.error_info);
        }
        self.next_id = self.next_id.max(saved.id.0 + 1);
        Ok(())
    }

    /// Tears a restored channel down.
    fn fail(&mut self, id: ChannelId, error: u32, error_info: u64) {
        if let Some(channel) = self.by_id.get_mut(&id) {
            channel.tear_down();
            (channel.error, channel.error_info, channel.resumption) = (error, error_info, None);
        }
        self.drop_empty_groups();
    }

    /// Begins to bring restored channels to their places. Returns the guest's entries.
    pub fn begin_restart(&mut self, lookup: Lookup<'_>) -> Result<Replaced, GpuError> {
        let mut replaced = Replaced::default();
        for channel in self.by_id.values() {
            let Some((place, preamble)) = restart_of(channel) else { continue };
            for word in [userd::GP_GET, userd::GP_PUT] {
                channel.store_userd(word, 0);
            }
            channel.store_userd(userd::PROGRESS, place.progress);
            if !place.used {
                continue;
            }
            let slots = slots(&channel.spec, lookup).ok_or(DAMAGED)?;
            let all = usize::try_from(last_step(channel, place)).unwrap_or(usize::MAX);
            let first = GpEntry::Segment { va: preamble.va.0, dwords: preamble.dwords }.encode();
            for (number, (memory, at)) in slots.into_iter().take(all).enumerate() {
                replaced.0.push((memory.clone(), at, memory.load_u64(at).unwrap_or_default()));
                let _ = memory.store_u64(at, if number == 0 { first } else { 0 });
            }
            channel.store_userd(userd::GP_PUT, first_step(channel, place));
        }
        self.pause = Pause::Changing;
        self.record_live(false);
        let done = self.schedule_deferred().and_then(|()| self.apply_gate());
        self.ring_again();
        done.map(|()| replaced)
    }

    /// Returns whether all restored channels are at their places. Makes the last step of those that
    /// have executed all entries but one.
    pub fn are_restarted(&mut self) -> bool {
        self.note_errors();
        let mut done = true;
        for channel in self.by_id.values() {
            let Some((place, _)) = restart_of(channel).filter(|(place, _)| place.used) else {
                continue;
            };
            let (get, put) = (channel.load_userd(userd::GP_GET), channel.load_userd(userd::GP_PUT));
            let last = Some(place.get);
            done &= get == last && put == last;
            if get == put && put != last {
                channel.store_userd(userd::GP_PUT, place.get);
                self.ring(channel);
            }
        }
        done
    }

    /// Gives restored channels the guest's entries. Channels that are not at their places are lost.
    /// Returns whether there are any.
    pub fn finish_restart(&mut self, replaced: Replaced) -> bool {
        for (memory, at, entry) in replaced.0.into_iter().rev() {
            let _ = memory.store_u64(at, entry);
        }
        let mut lost = Vec::new();
        for (id, channel) in &mut self.by_id {
            let Some((place, _)) = restart_of(channel) else { continue };
            let words = [userd::GP_GET, userd::GP_PUT].map(|word| channel.load_userd(word));
            if place.used && words != [Some(place.get); 2] {
                lost.push(*id);
            }
            channel.store_userd(userd::GP_PUT, place.put);
            channel.resumption = None;
        }
        for id in &lost {
            // It may be executing the preamble.
            let _ = self.reset(*id, Running::default());
        }
        !lost.is_empty()
    }

    /// Returns whether there are restored channels that have not continued.
    pub fn must_restart(&self) -> bool {
        self.by_id.values().any(|channel| restart_of(channel).is_some())
    }
}

/// Returns the place of a channel that is to be brought there, and its preamble.
fn restart_of(channel: &Channel) -> Option<(Place, Preamble)> {
    match channel.resumption {
        Some(Resumption::Restart(place)) if channel.error == 0 => {
            Some((place, channel.spec.preamble?))
        }
        _ => None,
    }
}

/// Returns the number of entries that bring a channel to its place. A ring that is empty because it
/// has come round takes all.
fn last_step(channel: &Channel, place: Place) -> u32 {
    if place.get == 0 { channel.spec.gpfifo_entries } else { place.get }
}

/// Returns `GP_PUT` for as many of them as a ring can have at once.
fn first_step(channel: &Channel, place: Place) -> u32 {
    last_step(channel, place).min(channel.spec.gpfifo_entries - 1)
}

/// Returns where the entries of a ring are. `None` if one is not in guest memory.
fn slots(spec: &ChannelSpec, lookup: Lookup<'_>) -> Option<Vec<(Arc<Mapping>, u64)>> {
    let slot = |index: u32| {
        let va = spec.gpfifo.0.checked_add(u64::from(index) * GP_ENTRY_BYTES)?;
        let (memory, at) = lookup(spec.space, GpuVa(va))?;
        memory.load_u64(at).map(|_| (memory, at))
    };
    (0..spec.gpfifo_entries).map(slot).collect()
}
