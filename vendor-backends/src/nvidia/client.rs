//! Worker's side of an NVIDIA GPU: one unprivileged client of the resource manager.
//!
//! * `open`: opening a vGPU
//! * `saved`: saving and restoring a vGPU
//! * `adoption`: recording a vGPU's state, and adopting the vGPU of an earlier process

mod adoption;
mod open;
mod saved;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use foreign_fds::ForeignFd;
use ipc::mem::SharedMemory;
use ipc::seqpacket::{SeqPacket, encode};
use mdev_core::gpu::{
    Adoption, AnchoredDescriptor, Aperture, Apertures, ChannelHandle, ChannelSpec, ChannelStatus,
    Client, ClientSpec, DoorbellWatch, ErrorStates, Exception, GpuDescription, GpuError, GuestRam,
    MapRequest, Pending, Programs, SavedChannel, SavedClient, Saving, StagedCopy, Usage,
    WrittenPages,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId, Token};
use nvidia_rm::rm_client::{AddressSpace, Object};

use self::adoption::Position;
pub(super) use self::open::driver_layout;
use self::open::{DOORBELL_BYTES, vram_aperture};
use super::adoption::descriptors;
use super::adoption::state::FixedObjects;
use super::channels::Teardown;
use super::device::Device;
use super::manager_thread::ManagerThread;
use super::memory::Memory;
use super::observed_channels::MAX_SWITCH_WAIT;
use super::vgpu_state::VgpuState;
use super::vram_copier::VramCopier;
use super::wire::{FromWorker, Grant};
use super::{driver_queries, interrupt_thread};

/// Inputs of the backend's threads, until the threads start.
#[derive(Debug)]
struct ThreadInputs {
    manager: SeqPacket,
    fault_event: OwnedFd,
    interrupt_event: OwnedFd,
    exception_event: Arc<OwnedFd>,
    /// Eventfds of interrupt vectors, by number.
    vectors: Vec<(u32, OwnedFd)>,
    /// The gate is to be closed.
    closing: bool,
}

/// Worker's handle of a vGPU on an NVIDIA GPU.
#[derive(Debug)]
pub struct NvidiaClient {
    grant: Grant,
    /// Version of the driver.
    driver: String,
    /// Process that made the driver's client.
    process: u32,
    apertures: Apertures,
    memory: Memory,
    state: Arc<VgpuState>,
    threads: Vec<JoinHandle<()>>,
    thread_inputs: Option<ThreadInputs>,
    position: Position,
    /// Exceptions were taken since the last record.
    took_exceptions: bool,
    /// Copier of video memory, in a pause.
    copier: Option<VramCopier>,
    // Dropped in this order, after the objects that depend on them.
    fixed: FixedObjects,
    _events: [Arc<Object>; 2],
    _usermode: Arc<Object>,
    /// The default address space.
    _space: Arc<AddressSpace>,
    device: Arc<Device>,
}

impl NvidiaClient {
    /// Ends the client as the end of its process does: the driver frees nothing, since another
    /// process has the files.
    #[cfg(feature = "test-util")]
    pub fn end(self) {
        self.device.rm_client.disown();
    }

    fn publish_imported_bytes(&self) {
        self.state.imported_bytes.store(self.memory.imported_bytes(), Ordering::Release);
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(body)?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Client for NvidiaClient {
    fn programs(&mut self) -> Option<&mut dyn Programs> {
        Some(self)
    }

    fn saving(&mut self) -> Option<&mut dyn Saving> {
        Some(self)
    }

    fn adoption(&mut self) -> Option<&mut dyn Adoption> {
        Some(self)
    }

    fn start(&mut self) -> Result<(), GpuError> {
        let Some(inputs) = self.thread_inputs.take() else { return Ok(()) };
        let ThreadInputs { manager, fault_event, interrupt_event, exception_event, .. } = inputs;
        let (state, rm_client) = (self.state.clone(), self.device.rm_client.clone());
        let hang_limit = self.grant.options.hang_limit;
        let mut thread = ManagerThread::new(state, rm_client, manager, fault_event, hang_limit);
        if inputs.closing {
            thread.close_gate_later();
        }
        for (vector, event) in inputs.vectors {
            self.state.signals.set_vector(vector, Some(event.into()))?;
            // An interrupt may have come when no process waited for it.
            self.state.signals.signal(1 << vector);
        }
        self.spawn("gpu-manager", move || thread.run())?;
        let state = self.state.clone();
        self.spawn("gpu-interrupts", move || {
            interrupt_thread::run(&state, &interrupt_event, &exception_event);
        })?;
        if let Some(poller) = self.state.poller.clone() {
            self.spawn("gpu-doorbells", move || poller.run())?;
        }
        Ok(())
    }

    fn spec(&self) -> &ClientSpec {
        &self.grant.spec
    }

    fn gpu(&self) -> &GpuDescription {
        &self.grant.gpu
    }

    fn apertures(&self) -> &Apertures {
        &self.apertures
    }

    fn import(&mut self, ram: GuestRam<'_>) -> Result<MemoryId, GpuError> {
        self.position.touch();
        let memory = self.memory.import(&ram)?;
        self.publish_imported_bytes();
        Ok(memory)
    }

    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        self.position.touch();
        if self.memory.is_imported(memory) {
            let running = self.state.running_before(Teardown::Memory(memory));
            self.state.channels().leave_memory(memory, running);
        }
        self.memory.release(memory)?;
        self.publish_imported_bytes();
        Ok(())
    }

    fn create_space(&mut self) -> Result<SpaceId, GpuError> {
        self.position.touch();
        self.memory.create_space()
    }

    fn destroy_space(&mut self, space: SpaceId) -> Result<(), GpuError> {
        self.position.touch();
        let running = self.state.running_before(Teardown::Space(space));
        self.state.channels().leave_space(space, running)?;
        self.memory.destroy_space(space)
    }

    fn map(&mut self, request: &MapRequest) -> Result<(), GpuError> {
        self.position.touch();
        self.memory.map(request)
    }

    fn unmap(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError> {
        self.position.touch();
        self.memory.space(space)?.unmap(va, len)
    }

    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError> {
        self.position.touch();
        spec.check(self.grant.gpu.capabilities)?;
        let userd = self.memory.userd(spec.userd)?;
        let space = self.memory.space(spec.space)?.space().clone();
        self.state.note_errors();
        self.state.channels().create(spec, userd, &space)
    }

    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError> {
        self.position.touch();
        self.state.note_errors();
        let shares_group = self.state.channels().shares_compute_group(id);
        if shares_group {
            self.state.observed.await_switch(MAX_SWITCH_WAIT);
        }
        let running = self.state.running_before(Teardown::Channel(id));
        self.state.channels().destroy(id, running)
    }

    fn query_channel(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError> {
        self.state.note_errors();
        self.state.channels().query(id)
    }

    fn wake(&mut self, token: Token) -> Result<(), GpuError> {
        match &self.state.poller {
            Some(poller) => poller.wake(token),
            None => self.state.channels().ring_for(token),
        }
        Ok(())
    }

    fn doorbell_watch(&self) -> Option<Arc<dyn DoorbellWatch>> {
        Some(self.state.poller.clone()?)
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.state.signals.pending_event()
    }

    fn set_interrupt(
        &mut self,
        vector: u32,
        event: Option<BorrowedFd<'_>>,
    ) -> Result<(), GpuError> {
        self.position.touch();
        let copy = || event.map(|event| event.try_clone_to_owned()).transpose();
        let (event, to_keep) = (copy()?, copy()?);
        // Refuses what is no eventfd.
        self.state.signals.set_vector(vector, event.map(ForeignFd::from))?;
        match to_keep {
            Some(event) => self.device.to_keep.keep(descriptors::vector(vector), event),
            None => self.device.to_keep.forget(descriptors::vector(vector)),
        }
        Ok(())
    }

    fn take_pending(&mut self) -> Pending {
        self.state.signals.take()
    }

    fn scrub(&mut self) -> Result<(), GpuError> {
        self.clear_vram()
    }

    fn reset(&mut self) -> Result<(), GpuError> {
        self.position.touch();
        self.copier = None;
        let running = self.state.running_before(Teardown::All);
        self.state.channels().clear(running);
        self.memory.reset_spaces();
        Ok(())
    }

    /// The driver clears video memory when it is freed. The doorbell page stays if it is the GPU's.
    fn renew(&mut self) -> Result<bool, GpuError> {
        self.reset()?;
        self.state.channels().keep_clocks_up(false)?;
        self.apertures.vram = None;
        let vram = self.memory.renew_vram().map_err(|error| {
            GpuError::Lost(format!("its video memory could not be allocated again: {error}"))
        })?;
        let bytes = self.grant.spec.vram_bytes;
        self.apertures.vram = vram_aperture(&self.device, &self.grant.gpu, &vram, bytes)?;
        if let (Some(poller), Some(doorbell)) = (&self.state.poller, &mut self.apertures.doorbell) {
            let SharedMemory { fd, mapping } = SharedMemory::new(c"doorbell", DOORBELL_BYTES)?;
            self.device.to_keep.keep_copy(descriptors::GUEST_DOORBELL, fd.as_fd())?;
            doorbell.fd = fd;
            poller.set_program_page(mapping);
        }
        Ok(true)
    }

    fn usage(&mut self) -> Result<Usage, GpuError> {
        Ok(self.state.report().usage)
    }

    fn attach_manager(&mut self, fd: OwnedFd) -> Result<(), GpuError> {
        self.position.touch();
        self.device.to_keep.keep_copy(descriptors::MANAGER, fd.as_fd())?;
        let socket = SeqPacket::from(fd);
        socket.try_send(&encode(&FromWorker::Ready)?, &[])?;
        if let Ok(mut next) = self.state.next_manager.lock() {
            *next = Some(socket);
        }
        Ok(())
    }
}

impl Programs for NvidiaClient {
    fn driver(&self) -> &str {
        &self.driver
    }

    fn query_driver(&mut self, command: u32, params: &mut [u8]) -> Option<u32> {
        driver_queries::query(&self.device, command, params)
    }

    fn allocate(&mut self, len: u64) -> Result<MemoryId, GpuError> {
        self.position.touch();
        self.apertures.vram = None;
        self.memory.allocate(len)
    }

    fn map_launch_region(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError> {
        self.position.touch();
        self.memory.map_launch_region(space, va, len)
    }

    fn preempt_instructions(&mut self, id: ChannelId) -> Result<(), GpuError> {
        self.state.channels().preempt_instructions(id)
    }

    fn watch_exceptions(&mut self, id: ChannelId, mask: u32) -> Result<(), GpuError> {
        self.position.touch();
        self.state.channels().watch_exceptions(id, mask)
    }

    fn take_exceptions(&mut self) -> Vec<Exception> {
        let exceptions = self.state.channels().take_exceptions();
        self.took_exceptions |= !exceptions.is_empty();
        exceptions
    }

    fn error_states(
        &mut self,
        id: ChannelId,
        first: u32,
        count: u32,
    ) -> Result<ErrorStates, GpuError> {
        self.state.channels().error_states(id, first, count)
    }

    fn clear_error_states(&mut self, id: ChannelId, count: u32) -> Result<(), GpuError> {
        self.state.channels().clear_error_states(id, count)
    }

    fn boost_clocks(&mut self, boost: bool) -> Result<(), GpuError> {
        self.state.channels().keep_clocks_up(boost)
    }

    fn reset_channel(&mut self, id: ChannelId) -> Result<(), GpuError> {
        self.position.touch();
        let running = self.state.running_before(Teardown::Channel(id));
        self.state.channels().reset(id, running)?;
        self.state.signals.raise(Pending::CHANNEL_ERROR);
        Ok(())
    }
}

impl Saving for NvidiaClient {
    fn log_writes(
        &mut self,
        _memory: MemoryId,
        _len: u64,
    ) -> Result<Box<dyn WrittenPages>, GpuError> {
        Err(GpuError::Unsupported("recording its writes"))
    }

    fn end_log(&mut self, _memory: MemoryId) -> Result<(), GpuError> {
        Ok(())
    }

    fn check_save(&mut self) -> Result<(), GpuError> {
        self.check_saveable()
    }

    fn pause(&mut self) -> Result<(), GpuError> {
        self.stop()
    }

    fn resume(&mut self) -> Result<(), GpuError> {
        self.continue_work()
    }

    fn stages_memory(&self) -> bool {
        self.apertures.vram.is_none()
    }

    fn staging(&mut self) -> Result<Aperture, GpuError> {
        self.staging_memory()
    }

    fn copy_staged(&mut self, copy: StagedCopy) -> Result<(), GpuError> {
        self.copy_vram(copy)
    }

    fn save(&mut self) -> Result<SavedClient, GpuError> {
        self.saved_client()
    }

    fn restore_space(&mut self, space: SpaceId) -> Result<(), GpuError> {
        self.restore_saved_space(space)
    }

    fn restore_channel(&mut self, channel: &SavedChannel) -> Result<(), GpuError> {
        self.restore_saved_channel(channel)
    }
}

impl Adoption for NvidiaClient {
    fn position(&mut self) -> Option<u64> {
        self.recorded_position()
    }

    fn take_descriptors(&mut self) -> Vec<AnchoredDescriptor> {
        self.device.to_keep.take()
    }

    fn record(&mut self) {
        self.position.confirm();
        if std::mem::take(&mut self.took_exceptions) {
            self.state.channels().forget_taken();
        }
    }
}

impl Drop for NvidiaClient {
    fn drop(&mut self) {
        self.state.signals.stop();
        if let Some(poller) = &self.state.poller {
            poller.stop();
        }
        for thread in self.threads.drain(..) {
            // A panic was logged already.
            let _ = thread.join();
        }
        if !self.device.rm_client.frees_objects() {
            return;
        }
        let running = self.state.running_before(Teardown::All);
        self.state.channels().clear(running);
    }
}
