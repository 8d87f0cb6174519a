//! Control requests of the manager and the worker.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use foreign_fds::ForeignFd;
use ipc::mem::Mapping;
use mdev_core::abi::{notifier, userd};
use mdev_core::gpu::{Backing, ChannelHandle, ChannelSpec, ChannelStatus, MapRequest, Quotas};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId, Token};
use mdev_core::memory_file::MemoryFile;
use mdev_core::sched::Budget;
use mdev_core::units::{PAGE_SIZE, is_aligned};

use super::state::VgpuState;
use super::{RenewedFds, Vgpu, doorbell_page, nanoseconds};
use crate::mediator::emulation::address_space::first_touch::ImportedFile;
use crate::mediator::emulation::address_space::memory::Memory;
use crate::mediator::emulation::channel::{Channel, Userd};
use crate::mediator::emulation::clock::now_ns;
use crate::mediator::emulation::token_bucket::TokenBucket;
use crate::mediator::fault::Fault;
use crate::mediator::hardware::PartitionMemory;
use crate::mediator::wire::Refusal;

impl Vgpu {
    /// Imports guest memory.
    pub fn import(
        &self,
        fd: &OwnedFd,
        offset: u64,
        len: u64,
        writable: bool,
    ) -> Result<MemoryId, Refusal> {
        if len == 0 || !is_aligned(offset, PAGE_SIZE) || !is_aligned(len, PAGE_SIZE) {
            return Err(Refusal::Alignment);
        }
        let file = MemoryFile::new(fd.as_fd()).map_err(|_| Refusal::Descriptor)?;
        if offset.checked_add(len).is_none_or(|end| file.len().is_ok_and(|size| end > size)) {
            return Err(Refusal::Backing);
        }
        self.lock()?.check_import(len)?;
        let mapping = Mapping::of_guest(&file, offset, len, writable)?;
        let imported = ImportedFile::new(fd.try_clone().map_err(Refusal::from)?, len)?;
        // Without the lock, because pinning memory for a device is slow.
        let attachment = self.hardware.attach(self.spec.vgpu, &mapping)?;
        let mut state = self.lock()?;
        state.check_import(len)?;
        let id = state.spaces.import(Memory { attachment, mapping, file: Some(imported) })?;
        self.counters.imported_bytes.store(state.spaces.imported_bytes(), Ordering::Relaxed);
        Ok(id)
    }

    /// Removes imported memory. Channels with their USERD in this memory fault.
    pub fn release(&self, memory: MemoryId) -> Result<(), Refusal> {
        let mut state = self.lock()?;
        let released = state.spaces.release(memory)?;
        self.counters.imported_bytes.store(state.spaces.imported_bytes(), Ordering::Relaxed);
        let fault = Fault::mmu(0);
        self.fail_channels(&mut state, fault, |channel| channel.uses_userd_in(memory));
        drop(state);
        // Without the lock, because unmapping gigabytes is slow.
        drop(released);
        Ok(())
    }

    /// Creates an address space.
    pub fn create_space(&self) -> Result<SpaceId, Refusal> {
        self.lock()?.spaces.create()
    }

    /// Destroys a created address space, its mappings, and the channels in it.
    pub fn destroy_space(&self, space: SpaceId) -> Result<(), Refusal> {
        let mut state = self.lock()?;
        let tables = state.spaces.destroy(space)?;
        let (gone, kept) = std::mem::take(&mut state.channels)
            .into_iter()
            .partition::<BTreeMap<_, _>, _>(|(_, channel)| channel.spec().space == space);
        state.channels = kept;
        self.counters.channels.store(state.channels.len() as u32, Ordering::Relaxed);
        drop(state);
        // Without the lock, because freeing many page tables is slow.
        drop((gone, tables));
        Ok(())
    }

    /// Maps memory.
    pub fn map(&self, request: &MapRequest) -> Result<(), Refusal> {
        self.lock()?.spaces.map(request)
    }

    /// Unmaps memory.
    pub fn unmap(&self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), Refusal> {
        self.lock()?.spaces.unmap(space, va, len)
    }

    /// Checks the specification of a new channel. Returns its USERD.
    pub(super) fn check_channel(
        &self,
        state: &VgpuState,
        spec: &ChannelSpec,
    ) -> Result<Userd, Refusal> {
        spec.check(self.hardware.describe().capabilities)?;
        if state.spaces.poisoned() {
            return Err(Refusal::Backing);
        }
        let max_channels = state.quotas.max_channels.unwrap_or(u32::MAX).min(self.max_channels);
        if state.channels.len() as u64 >= u64::from(max_channels) {
            return Err(Refusal::ChannelLimit);
        }
        if state.spaces.get(spec.space).is_none() {
            return Err(Refusal::NoSpace);
        }
        state.check_group(spec)?;
        let memory = match spec.userd {
            Backing::Vram { .. } | Backing::Allocated { .. } => None,
            Backing::Guest { memory, .. } => Some(memory),
        };
        let (mapping, offset) = state.spaces.locate(spec.userd)?;
        let inside = offset.checked_add(userd::BYTES).is_some_and(|end| end <= mapping.len());
        if !inside || !mapping.writable() {
            return Err(Refusal::Userd);
        }
        Ok(Userd { mapping: Arc::clone(mapping), offset, memory })
    }

    /// Creates a channel. Refused while the guest's memory is truncated.
    pub fn create_channel(&self, spec: &ChannelSpec) -> Result<ChannelHandle, Refusal> {
        let mut state = self.lock()?;
        let userd = self.check_channel(&state, spec)?;
        let id = state.allocate_channel_id();
        let run_after_ns = state.fault_backoff.run_after_ns();
        state.channels.insert(id, Channel::new(*spec, userd, run_after_ns));
        self.counters.channels.store(state.channels.len() as u32, Ordering::Relaxed);
        drop(state);
        self.waker.wake();
        Ok(ChannelHandle { id: ChannelId(id), token: Token(id) })
    }

    /// Destroys a channel.
    pub fn destroy_channel(&self, id: ChannelId) -> Result<(), Refusal> {
        let mut state = self.lock()?;
        state.channels.remove(&id.0).ok_or(Refusal::NoChannel)?;
        self.counters.channels.store(state.channels.len() as u32, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the status of a channel.
    pub fn query_channel(&self, id: ChannelId) -> Result<ChannelStatus, Refusal> {
        self.lock()?.channels.get(&id.0).map(Channel::status).ok_or(Refusal::NoChannel)
    }

    /// Sets or clears the eventfd of an interrupt vector.
    pub fn set_interrupt(&self, vector: u32, event: Option<ForeignFd>) -> Result<(), Refusal> {
        self.interrupts.set_vector(vector, event)
    }

    /// Destroys all channels, mappings and created address spaces.
    pub fn reset(&self) -> Result<(), Refusal> {
        let mut state = self.lock()?;
        state.paused = false;
        let channels = std::mem::take(&mut state.channels);
        let tables = state.spaces.clear();
        self.counters.channels.store(0, Ordering::Relaxed);
        drop(state);
        // Without the lock, because freeing many page tables is slow.
        drop((channels, tables));
        Ok(())
    }

    /// Destroys all channels and mappings, and replaces everything that a guest can map or signal:
    /// a VMM may keep its descriptors after it disconnects.
    pub fn renew(&self) -> Result<RenewedFds, Refusal> {
        self.reset()?;
        let mut renewed = RenewedFds {
            vram: None,
            doorbell: doorbell_page()?,
            event: self.wakeups.renew_event()?,
        };
        if let Some(PartitionMemory { mapping, fd, offset }) = self.hardware.renew(&self.spec)? {
            let former = self.lock()?.spaces.replace_vram(mapping);
            drop(former);
            renewed.vram = Some((fd, offset));
        }
        Ok(renewed)
    }

    /// Faults all channels.
    pub fn reset_channels(&self) -> Result<(), Refusal> {
        let mut state = self.lock_for_manager()?;
        let fault = Fault { code: notifier::RESET_CHANNEL, info: 0 };
        self.fail_channels(&mut state, fault, |_| true);
        Ok(())
    }

    /// Sets the time slice.
    pub fn set_timeslice(&self, slice: Duration) {
        self.slice_ns.store(nanoseconds(slice), Ordering::Relaxed);
    }

    /// Sets or removes the budget of engine time.
    pub fn set_budget(&self, budget: Option<Budget>) {
        *self.budget.lock().unwrap_or_else(PoisonError::into_inner) = budget;
        self.waker.wake();
    }

    /// Sets the quotas.
    pub fn set_quotas(&self, quotas: &Quotas) -> Result<(), Refusal> {
        let mut state = self.lock_for_manager()?;
        if quotas.submissions_per_second != state.quotas.submissions_per_second {
            let now = now_ns();
            state.submissions =
                quotas.submissions_per_second.map(|rate| TokenBucket::new(rate, now));
        }
        state.quotas = *quotas;
        drop(state);
        self.waker.wake();
        Ok(())
    }

    /// Opens or closes the gate.
    pub fn set_gate(&self, open: bool) {
        if !open && self.gate_open() {
            self.gate_closed_ns.store(now_ns(), Ordering::SeqCst);
        }
        self.gate_open.store(open, Ordering::SeqCst);
        self.waker.wake();
    }
}
