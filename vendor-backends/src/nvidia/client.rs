//! Worker's side of an NVIDIA GPU: one unprivileged client of the resource manager.
//!
//! [`NvidiaClient::open`] opens everything that needs a device node before the sandbox hides the
//! filesystem: the client's two descriptors, a descriptor for each aperture and each event, and an
//! error notifier for each possible channel.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use mdev_core::gpu::{
    Aperture, Apertures, ChannelHandle, ChannelSpec, ChannelStatus, Client, ClientSpec,
    DoorbellWatch, ErrorStates, Exception, GpuCapabilities, GpuDescription, GpuError, GuestRam,
    MapRequest, Pending, Usage,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId, Token};
use mdev_core::units::PAGE_SIZE;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::channels::{self, Channels, Teardown};
use super::ctxsw_log::CtxswLog;
use super::device::Device;
use super::doorbell_poller::DoorbellPoller;
use super::manager_thread::ManagerThread;
use super::memory::Memory;
use super::rm::Rm;
use super::rm_client::{AddressSpace, Object};
use super::signals::Signals;
use super::switch_probe::SwitchProbe;
use super::sys::numbers::event;
use super::version::Layout;
use super::vgpu_state::{MAX_SWITCH_WAIT, VgpuState};
use super::wire::{self, FromManager, FromWorker, Grant};
use super::{driver_queries, interrupt_thread, privilege};
use crate::mem::{Mapping, SharedMemory};
use crate::seqpacket::{MAX_PACKET, SeqPacket, decode, encode};

/// Timeout of receiving the grant. The manager sends it before it starts the worker.
const GRANT_TIMEOUT: Duration = Duration::from_secs(4);

/// Part of the usermode region that a guest may map: the doorbell and the clock.
const DOORBELL_BYTES: u64 = PAGE_SIZE;

/// Inputs of the backend's threads, until the threads start.
#[derive(Debug)]
struct ThreadInputs {
    manager: SeqPacket,
    fault_event: OwnedFd,
    interrupt_event: OwnedFd,
    exception_event: Arc<OwnedFd>,
    hang_limit: Option<Duration>,
}

/// Worker's handle of a vGPU on an NVIDIA GPU.
#[derive(Debug)]
pub struct NvidiaClient {
    gpu: GpuDescription,
    /// Version of the driver.
    driver: String,
    spec: ClientSpec,
    apertures: Apertures,
    memory: Memory,
    state: Arc<VgpuState>,
    threads: Vec<JoinHandle<()>>,
    thread_inputs: Option<ThreadInputs>,
    // Dropped in this order, after the objects that depend on them.
    _events: [Arc<Object>; 2],
    _usermode: Arc<Object>,
    _space: Arc<AddressSpace>,
    device: Arc<Device>,
}

/// Doorbell pages of a vGPU.
#[derive(Debug)]
struct Doorbells {
    usermode: Arc<Object>,
    /// The page that the guest maps: the GPU's, or ordinary memory.
    guest: OwnedFd,
    /// Mapping of ordinary memory.
    watched: Option<Arc<Mapping>>,
    /// The GPU's page.
    own: Arc<Mapping>,
}

impl Doorbells {
    fn open(device: &Device, direct: bool) -> Result<Self, GpuError> {
        let usermode = device.usermode()?;
        let rm_client = &device.rm_client;
        let (node, bytes) = (rm_client.gpu_node(), DOORBELL_BYTES);
        let aperture = || rm_client.aperture(&device.device, &usermode, node, bytes, 0);
        // The guest's page first: a test compares the driver calls with a recording.
        let (guest, watched) = if direct {
            (aperture()?, None)
        } else {
            let SharedMemory { fd, mapping } = SharedMemory::new(c"doorbell", bytes)?;
            (fd, Some(mapping))
        };
        let own = Mapping::new(aperture()?.as_fd(), 0, bytes, true)?;
        Ok(Self { usermode, guest, watched, own })
    }
}

/// Returns the aperture of the partition (BAR 4), if VMMs may map it.
fn vram_aperture(
    device: &Device,
    gpu: &GpuDescription,
    vram: &Arc<Object>,
    bytes: u64,
) -> Result<Option<Aperture>, GpuError> {
    if !gpu.capabilities.contains(GpuCapabilities::VRAM_APERTURE) {
        return Ok(None);
    }
    let rm_client = &device.rm_client;
    let fd = rm_client.aperture(&device.device, vram, rm_client.gpu_node(), bytes, 0)?;
    Ok(Some(Aperture { fd, offset: 0, len: bytes }))
}

impl NvidiaClient {
    /// Opens a vGPU over the connection of an [`mdev_core::gpu::Admission`].
    pub fn open(rm: Arc<dyn Rm>, fd: OwnedFd) -> Result<Self, GpuError> {
        let manager = SeqPacket::from(fd);
        let Grant { card, gpu, spec, options, .. } = *receive_grant(&manager)?;
        privilege::refuse_sys_admin(options.allow_sys_admin)?;
        let (driver, layout) = driver_layout(&*rm)?;
        let device = Arc::new(Device::open(rm, layout, &card)?);
        let space = Arc::new(device.address_space()?);
        let doorbells = Doorbells::open(&device, options.direct_doorbell)?;
        let vram_bytes = spec.vram_bytes;
        let vram = device.video_memory(vram_bytes)?;
        let vram_aperture = vram_aperture(&device, &gpu, &vram, vram_bytes)?;
        let exception_event = Arc::new(device.rm_client.event_descriptor()?);
        let channel_options = channels::Options {
            copy_engines: device.copy_engines()?,
            preempt_blocks: options.preempt_blocks,
            max_channels: spec.max_channels.min(super::device::MAX_CHANNELS),
            exception_event: exception_event.clone(),
        };
        let fault = event::RC_ERROR | event::WITHOUT_DATA;
        let (fault_object, fault_event) = device.rm_client.event(&device.subdevice, fault)?;
        let non_stall = event::FIFO_EVENT_METHOD | event::NON_STALL | event::WITHOUT_DATA;
        let (interrupt_object, interrupt_event) =
            device.rm_client.event(&device.subdevice, non_stall)?;
        let state =
            Arc::new(vgpu_state(&device, doorbells.own, options.direct_doorbell, channel_options)?);
        if let (Some(poller), Some(page)) = (&state.poller, doorbells.watched) {
            poller.set_program_page(page);
        }
        manager.try_send(&encode(&FromWorker::Ready)?, &[])?;
        let max_import_bytes = spec.max_import_bytes;
        Ok(Self {
            memory: Memory::new(device.clone(), space.clone(), vram, vram_bytes, max_import_bytes),
            apertures: Apertures {
                vram: vram_aperture,
                doorbell: Some(Aperture { fd: doorbells.guest, offset: 0, len: DOORBELL_BYTES }),
                framebuffer: None,
            },
            gpu,
            driver,
            spec,
            state,
            threads: Vec::new(),
            thread_inputs: Some(ThreadInputs {
                manager,
                fault_event,
                interrupt_event,
                exception_event,
                hang_limit: options.hang_limit,
            }),
            _events: [fault_object, interrupt_object],
            _usermode: doorbells.usermode,
            _space: space,
            device,
        })
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

/// Opens the context switch log, if the driver has one, and creates the shared state.
fn vgpu_state(
    device: &Arc<Device>,
    doorbell: Arc<Mapping>,
    direct_doorbell: bool,
    options: channels::Options,
) -> Result<VgpuState, GpuError> {
    let mut ctxsw_log = CtxswLog::open(device, doorbell.clone())
        .inspect_err(|error| {
            log::warn!("Cannot measure engine time with this NVIDIA driver: {error}");
        })
        .ok();
    let mut switch_probe = SwitchProbe::new(device, doorbell.clone())
        .inspect_err(|error| {
            log::warn!("Cannot check hangs with a channel of the worker's own: {error}");
        })
        .ok();
    if let (Some(probe), Some(log)) = (&mut switch_probe, &mut ctxsw_log) {
        log.find_probe(probe);
    }
    let poller = (!direct_doorbell).then(|| DoorbellPoller::new(doorbell.clone()));
    let channels = Channels::new(device.clone(), doorbell, poller.clone(), options)?;
    Ok(VgpuState {
        channels: Mutex::new(channels),
        poller,
        ctxsw_log: Mutex::new(ctxsw_log),
        switch_probe: Mutex::new(switch_probe),
        activity: Mutex::default(),
        signals: Signals::new()?,
        next_manager: Mutex::default(),
        imported_bytes: AtomicU64::new(0),
    })
}

/// Returns the version of the driver that runs, and its layout.
pub(super) fn driver_layout(rm: &dyn Rm) -> Result<(String, Layout), GpuError> {
    let version = rm.version().map_err(|error| {
        GpuError::Io(std::io::Error::new(
            error.kind(),
            format!("The NVIDIA driver is not loaded: {error}"),
        ))
    })?;
    let layout = Layout::of(&version);
    let layout = layout.map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok((version.trim().to_owned(), layout))
}

fn receive_grant(manager: &SeqPacket) -> Result<Box<Grant>, GpuError> {
    let mut fds = [PollFd::new(manager.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(GRANT_TIMEOUT).unwrap_or(PollTimeout::MAX);
    poll(&mut fds, timeout).map_err(std::io::Error::from)?;
    let mut buffer = vec![0; MAX_PACKET];
    let packet = manager.try_recv(&mut buffer)?;
    let packet = packet.ok_or_else(|| GpuError::Lost("the manager has exited".into()))?;
    match decode::<FromManager>(&buffer[..packet.len])? {
        FromManager::Grant(grant) if grant.version == wire::VERSION => Ok(grant),
        _ => Err(GpuError::Invalid("a grant of another version of the manager")),
    }
}

impl Client for NvidiaClient {
    fn start(&mut self) -> Result<(), GpuError> {
        let Some(inputs) = self.thread_inputs.take() else { return Ok(()) };
        let ThreadInputs { manager, fault_event, interrupt_event, exception_event, hang_limit } =
            inputs;
        let (state, rm_client) = (self.state.clone(), self.device.rm_client.clone());
        let mut thread = ManagerThread::new(state, rm_client, manager, fault_event, hang_limit);
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
        &self.spec
    }

    fn gpu(&self) -> &GpuDescription {
        &self.gpu
    }

    fn driver(&self) -> Option<&str> {
        Some(&self.driver)
    }

    fn query_driver(&mut self, command: u32, params: &mut [u8]) -> Option<u32> {
        driver_queries::query(&self.device, command, params)
    }

    fn apertures(&self) -> &Apertures {
        &self.apertures
    }

    fn import(&mut self, ram: GuestRam<'_>) -> Result<MemoryId, GpuError> {
        let memory = self.memory.import(&ram)?;
        self.publish_imported_bytes();
        Ok(memory)
    }

    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        if self.memory.is_imported(memory) {
            let running = self.state.running_before(Teardown::Memory(memory));
            self.state.channels().leave_memory(memory, running);
        }
        self.memory.release(memory)?;
        self.publish_imported_bytes();
        Ok(())
    }

    fn allocate(&mut self, len: u64) -> Result<MemoryId, GpuError> {
        self.apertures.vram = None;
        self.memory.allocate(len)
    }

    fn create_space(&mut self) -> Result<SpaceId, GpuError> {
        self.memory.create_space()
    }

    fn destroy_space(&mut self, space: SpaceId) -> Result<(), GpuError> {
        let running = self.state.running_before(Teardown::Space(space));
        self.state.channels().leave_space(space, running)?;
        self.memory.destroy_space(space)
    }

    fn map(&mut self, request: &MapRequest) -> Result<(), GpuError> {
        self.memory.map(request)
    }

    fn map_launch_region(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError> {
        self.memory.map_launch_region(space, va, len)
    }

    fn unmap(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError> {
        self.memory.space(space)?.unmap(va, len)
    }

    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError> {
        spec.check(self.gpu.capabilities)?;
        let userd = self.memory.userd(spec.userd)?;
        let space = self.memory.space(spec.space)?.space().clone();
        self.state.note_errors();
        self.state.channels().create(spec, userd, &space)
    }

    fn preempt_instructions(&mut self, id: ChannelId) -> Result<(), GpuError> {
        self.state.channels().preempt_instructions(id)
    }

    fn watch_exceptions(&mut self, id: ChannelId, mask: u32) -> Result<(), GpuError> {
        self.state.channels().watch_exceptions(id, mask)
    }

    fn take_exceptions(&mut self) -> Vec<Exception> {
        self.state.channels().take_exceptions()
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
        let running = self.state.running_before(Teardown::Channel(id));
        self.state.channels().reset(id, running)?;
        self.state.signals.raise(Pending::CHANNEL_ERROR);
        Ok(())
    }

    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError> {
        self.state.note_errors();
        let shares_group = self.state.channels().shares_compute_group(id);
        if shares_group {
            self.state.await_switch(MAX_SWITCH_WAIT);
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
        let event = event.map(|event| event.try_clone_to_owned()).transpose()?;
        self.state.signals.set_vector(vector, event)
    }

    fn take_pending(&mut self) -> Pending {
        self.state.signals.take()
    }

    fn reset(&mut self) -> Result<(), GpuError> {
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
        let bytes = self.spec.vram_bytes;
        self.apertures.vram = vram_aperture(&self.device, &self.gpu, &vram, bytes)?;
        if let (Some(poller), Some(doorbell)) = (&self.state.poller, &mut self.apertures.doorbell) {
            let SharedMemory { fd, mapping } = SharedMemory::new(c"doorbell", DOORBELL_BYTES)?;
            doorbell.fd = fd;
            poller.set_program_page(mapping);
        }
        Ok(true)
    }

    fn usage(&mut self) -> Result<Usage, GpuError> {
        Ok(self.state.report().usage)
    }

    fn attach_manager(&mut self, fd: OwnedFd) -> Result<(), GpuError> {
        let socket = SeqPacket::from(fd);
        socket.try_send(&encode(&FromWorker::Ready)?, &[])?;
        if let Ok(mut next) = self.state.next_manager.lock() {
            *next = Some(socket);
        }
        Ok(())
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
        let running = self.state.running_before(Teardown::All);
        self.state.channels().clear(running);
    }
}
