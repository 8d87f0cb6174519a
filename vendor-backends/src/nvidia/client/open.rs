//! Opening a vGPU: everything that needs a device node, before the sandbox hides the filesystem.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ipc::mem::{Mapping, SharedMemory};
use ipc::seqpacket::{MAX_PACKET, SeqPacket, decode, encode};
use mdev_core::gpu::{Aperture, Apertures, GpuCapabilities, GpuDescription, GpuError};
use mdev_core::units::PAGE_SIZE;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nvidia_rm::numbers::event;
use nvidia_rm::rm::Rm;
use nvidia_rm::rm_client::Object;
use nvidia_rm::version::Layout;

use super::adoption::Position;
use super::{NvidiaClient, ThreadInputs};
use crate::nvidia::adoption::descriptors;
use crate::nvidia::adoption::journal::Journal;
use crate::nvidia::adoption::state::FixedObjects;
use crate::nvidia::channels::{self, Channels};
use crate::nvidia::device::Device;
use crate::nvidia::doorbell_poller::DoorbellPoller;
use crate::nvidia::memory::Memory;
use crate::nvidia::observers::ctxsw_log::CtxswLog;
use crate::nvidia::observers::switch_probe::SwitchProbe;
use crate::nvidia::privilege;
use crate::nvidia::vgpu_state::VgpuState;
use crate::nvidia::wire::{self, FromManager, FromWorker, Grant, MAX_CHANNELS};

/// Timeout of receiving the grant. The manager sends it before it starts the worker.
const GRANT_TIMEOUT: Duration = Duration::from_secs(4);

/// Part of the usermode region that a guest may map: the doorbell and the clock.
pub(super) const DOORBELL_BYTES: u64 = PAGE_SIZE;

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
        let own_file = aperture()?;
        let own = descriptors::map(&own_file, bytes, true)?;
        device.to_keep.keep(descriptors::DOORBELL, own_file);
        device.to_keep.keep_copy(descriptors::GUEST_DOORBELL, guest.as_fd())?;
        Ok(Self { usermode, guest, watched, own })
    }
}

/// Returns the aperture of the partition (BAR 4), if VMMs may map it.
pub(super) fn vram_aperture(
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
        let grant = *receive_grant(&manager)?;
        let (spec, options) = (&grant.spec, grant.options);
        privilege::refuse_sys_admin(options.allow_sys_admin)?;
        let (driver, layout) = driver_layout(&*rm)?;
        let device = Arc::new(Device::open(rm, layout, &grant.card)?);
        let space = Arc::new(device.address_space()?);
        let doorbells = Doorbells::open(&device, options.direct_doorbell)?;
        let vram_bytes = spec.vram_bytes;
        let vram = device.video_memory(vram_bytes)?;
        let vram_aperture = vram_aperture(&device, &grant.gpu, &vram, vram_bytes)?;
        let exception_event = Arc::new(device.rm_client.exception_file()?);
        let (journal, journal_file) = Journal::create()?;
        let journal = Arc::new(journal);
        device.rm_client.record_handles(journal.clone());
        let channel_options = channels::Options {
            copy_engines: device.copy_engines()?,
            preempt_blocks: options.preempt_blocks,
            max_channels: spec.max_channels.min(MAX_CHANNELS),
            exception_event: exception_event.clone(),
            journal,
        };
        let copy_engines = channel_options.copy_engines.clone();
        let events = Events::open(&device, exception_event)?;
        let state =
            Arc::new(vgpu_state(&device, doorbells.own, options.direct_doorbell, channel_options)?);
        if let (Some(poller), Some(page)) = (&state.poller, doorbells.watched) {
            poller.set_program_page(page);
        }
        state.record_accounting(false);
        keep_files(&device, journal_file, &events)?;
        manager.try_send(&encode(&FromWorker::Ready)?, &[])?;
        let fixed = fixed_objects(&device, &doorbells.usermode, &events, copy_engines, &state);
        let max_import_bytes = spec.max_import_bytes;
        Ok(Self {
            memory: Memory::new(device.clone(), space.clone(), vram, vram_bytes, max_import_bytes),
            apertures: Apertures {
                vram: vram_aperture,
                doorbell: Some(Aperture { fd: doorbells.guest, offset: 0, len: DOORBELL_BYTES }),
                framebuffer: None,
            },
            grant,
            driver,
            process: std::process::id(),
            state,
            threads: Vec::new(),
            thread_inputs: Some(ThreadInputs {
                manager,
                fault_event: events.fault,
                interrupt_event: events.interrupt,
                exception_event: events.exception,
                vectors: Vec::new(),
                closing: false,
            }),
            position: Position::default(),
            took_exceptions: false,
            copier: None,
            fixed,
            _events: events.objects,
            _usermode: doorbells.usermode,
            _space: space,
            device,
        })
    }
}

/// Events of the driver, and their descriptors.
#[derive(Debug)]
struct Events {
    /// For faults, and for interrupts.
    objects: [Arc<Object>; 2],
    fault: OwnedFd,
    interrupt: OwnedFd,
    exception: Arc<OwnedFd>,
}

impl Events {
    fn open(device: &Device, exception: Arc<OwnedFd>) -> Result<Self, GpuError> {
        let rm_client = &device.rm_client;
        let fault = event::RC_ERROR | event::WITHOUT_DATA;
        let (fault_object, fault) = rm_client.event(&device.subdevice, fault)?;
        let non_stall = event::FIFO_EVENT_METHOD | event::NON_STALL | event::WITHOUT_DATA;
        let (interrupt_object, interrupt) = rm_client.event(&device.subdevice, non_stall)?;
        Ok(Self { objects: [fault_object, interrupt_object], fault, interrupt, exception })
    }
}

/// Keeps the files that each process of the vGPU needs.
fn keep_files(device: &Device, journal: OwnedFd, events: &Events) -> std::io::Result<()> {
    let to_keep = &device.to_keep;
    let [control, gpu] = device.rm_client.files();
    let Events { fault, interrupt, exception, .. } = events;
    to_keep.keep(descriptors::JOURNAL, journal);
    for (number, fd) in [
        (descriptors::CONTROL, control),
        (descriptors::GPU, gpu),
        (descriptors::FAULT_EVENT, fault.as_fd()),
        (descriptors::INTERRUPT_EVENT, interrupt.as_fd()),
        (descriptors::EXCEPTION_EVENT, exception.as_fd()),
    ] {
        to_keep.keep_copy(number, fd)?;
    }
    Ok(())
}

fn fixed_objects(
    device: &Device,
    usermode: &Object,
    events: &Events,
    copy_engines: Vec<u32>,
    state: &VgpuState,
) -> FixedObjects {
    let probe = state.observed.switch_probe().as_ref().map(SwitchProbe::objects);
    FixedObjects {
        device: device.device.handle(),
        subdevice: device.subdevice.handle(),
        usermode: usermode.handle(),
        events: events.objects.each_ref().map(|object| object.handle()),
        copy_engines,
        notifiers: state.channels().notifiers().to_vec(),
        log: state.observed.ctxsw_log().as_ref().map(CtxswLog::objects),
        probe,
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
    let journal = options.journal.clone();
    let channels = Channels::new(device.clone(), doorbell, poller.clone(), options)?;
    Ok(VgpuState::new(channels, poller, ctxsw_log, switch_probe, journal)?)
}

/// Returns the version of the driver that runs, and its layout.
pub(in crate::nvidia) fn driver_layout(rm: &dyn Rm) -> Result<(String, Layout), GpuError> {
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
