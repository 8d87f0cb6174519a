//! A worker's side of an NVIDIA GPU: one unprivileged client of the driver.
//!
//! Whatever needs a device node is opened by [`NvidiaClient::open`], before the worker closes the filesystem to itself:
//! the driver's two descriptors, one fresh descriptor for each aperture, those of the events, and a page for the error
//! of each channel that there may be.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use mdev_core::gpu::{
    Aperture, Apertures, Backing, ChannelHandle, ChannelSpec, ChannelStatus, Client, ClientSpec,
    GpuCapabilities, GpuDescription, GpuError, GuestRam, Pending, Usage,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, Token};
use mdev_core::units::PAGE_SIZE;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::bells::Bells;
use super::channels::{self, Channels};
use super::device::Device;
use super::memory::Memory;
use super::privilege;
use super::rm::Rm;
use super::service::{self, Shared};
use super::session::{AddressSpace, Object};
use super::signals::Signals;
use super::sys::numbers::event;
use super::trace::Trace;
use super::version::Layout;
use super::wire::{self, FromManager, FromWorker, Grant};
use crate::mem::{Mapping, SharedMemory};
use crate::seqpacket::{MAX_PACKET, SeqPacket, decode, encode};

/// How long the grant may take: the manager has sent it before it starts the worker.
const PATIENCE: Duration = Duration::from_secs(4);

/// What a guest may map of the GPU's usermode region: the doorbell and the clock.
const DOORBELL_BYTES: u64 = PAGE_SIZE;

/// What the backend's threads listen to.
#[derive(Debug)]
struct Connections {
    manager: SeqPacket,
    faults: OwnedFd,
    interrupts: OwnedFd,
    hang: Option<Duration>,
}

/// One vGPU's world on an NVIDIA GPU.
#[derive(Debug)]
pub struct NvidiaClient {
    gpu: GpuDescription,
    spec: ClientSpec,
    apertures: Apertures,
    memory: Memory,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// What the threads are started with.
    waiting: Option<Connections>,
    // In the order in which they are let go of, after all that is theirs.
    _events: [Arc<Object>; 2],
    _usermode: Arc<Object>,
    _space: Arc<AddressSpace>,
    device: Arc<Device>,
}

impl NvidiaClient {
    /// Opens the client that an [`mdev_core::gpu::Admission`] carries the connection of.
    pub fn open(rm: Arc<dyn Rm>, fd: OwnedFd) -> Result<Self, GpuError> {
        let manager = SeqPacket::from(fd);
        let grant = receive_grant(&manager)?;
        privilege::check(grant.options.allow_sys_admin)?;
        let layout = layout(&*rm)?;
        let device = Arc::new(Device::open(rm, layout, &grant.card)?);
        let space = Arc::new(device.address_space()?);
        let usermode = device.usermode()?;
        let session = &device.session;
        let bell = |flags| {
            session.aperture(&device.device, &usermode, session.gpu_node(), DOORBELL_BYTES, flags)
        };
        let direct = grant.options.direct_doorbell;
        // Before its own: what the driver is asked is compared with a recording.
        let bell_for_guest =
            if direct { bell(0)? } else { SharedMemory::new(c"doorbell", DOORBELL_BYTES)?.fd };
        let own_bell = bell(0)?;
        let doorbell = Mapping::new(own_bell.as_fd(), 0, DOORBELL_BYTES, true)?;
        let bytes = grant.spec.vram_bytes;
        let vram = device.video_memory(bytes)?;
        let node = session.gpu_node();
        let vram_fd = if grant.gpu.capabilities.contains(GpuCapabilities::VRAM_APERTURE) {
            Some(session.aperture(&device.device, &vram, node, bytes, 0)?)
        } else {
            None
        };
        let options = channels::Options {
            copy_engine: device.best_copy_engine()?,
            preempt_blocks: grant.options.preempt_blocks,
            max_channels: grant.spec.max_channels.min(super::device::MAX_CHANNELS),
        };
        let (rc_object, rc_event) =
            session.event(&device.subdevice, event::RC_ERROR | event::WITHOUT_DATA)?;
        let non_stall = event::FIFO_EVENT_METHOD | event::NON_STALL | event::WITHOUT_DATA;
        let (stall_object, stall_event) = session.event(&device.subdevice, non_stall)?;
        let trace = Trace::open(&device, doorbell.clone())
            .inspect_err(|error| {
                log::warn!("Engine time cannot be measured with this driver: {error}");
            })
            .ok();
        let bells = (!direct).then(|| Bells::new(doorbell.clone()));
        let channels =
            Channels::new(device.clone(), space.clone(), doorbell, bells.clone(), options)?;
        let shared = Arc::new(Shared {
            channels: Mutex::new(channels),
            bells,
            trace: Mutex::new(trace),
            activity: Mutex::default(),
            signals: Signals::new()?,
            next_manager: Mutex::default(),
            imported: AtomicU64::new(0),
        });
        manager.try_send(&encode(&FromWorker::Ready)?, &[])?;
        let Grant { gpu, spec, options: wire::Options { hang, .. }, .. } = *grant;
        Ok(Self {
            memory: Memory::new(device.clone(), space.clone(), vram, bytes, spec.max_import_bytes),
            apertures: Apertures {
                vram: vram_fd.map(|fd| Aperture { fd, offset: 0, len: bytes }),
                doorbell: Some(Aperture { fd: bell_for_guest, offset: 0, len: DOORBELL_BYTES }),
                framebuffer: None,
            },
            gpu,
            spec,
            shared,
            threads: Vec::new(),
            waiting: Some(Connections { manager, faults: rc_event, interrupts: stall_event, hang }),
            _events: [rc_object, stall_object],
            _usermode: usermode,
            _space: space,
            device,
        })
    }

    fn note_imported(&self) {
        self.shared.imported.store(self.memory.imported_bytes(), Ordering::Release);
    }
}

/// The layout of the driver that runs, or why it will not do.
pub(super) fn layout(rm: &dyn Rm) -> Result<Layout, GpuError> {
    let version = rm.version().map_err(|error| {
        GpuError::Io(std::io::Error::new(
            error.kind(),
            format!("NVIDIA's driver is not loaded: {error}"),
        ))
    })?;
    Layout::of(&version).map_err(|error| GpuError::Io(std::io::Error::other(error.to_string())))
}

fn receive_grant(manager: &SeqPacket) -> Result<Box<Grant>, GpuError> {
    let mut fds = [PollFd::new(manager.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX);
    poll(&mut fds, timeout).map_err(std::io::Error::from)?;
    let mut buffer = vec![0; MAX_PACKET];
    let packet = manager.try_recv(&mut buffer)?;
    let packet = packet.ok_or_else(|| GpuError::Lost("the manager has gone".into()))?;
    match decode::<FromManager>(&buffer[..packet.len])? {
        FromManager::Grant(grant) if grant.version == wire::VERSION => Ok(grant),
        _ => Err(GpuError::Invalid("the manager speaks another version")),
    }
}

impl Client for NvidiaClient {
    fn start(&mut self) -> Result<(), GpuError> {
        let Some(Connections { manager, faults, interrupts, hang }) = self.waiting.take() else {
            return Ok(());
        };
        let (shared, session) = (self.shared.clone(), self.device.session.clone());
        let obey = move || service::obey(&shared, &session, manager, &faults, hang);
        self.threads.push(std::thread::Builder::new().name("gpu-orders".into()).spawn(obey)?);
        let shared = self.shared.clone();
        let interrupt = move || service::interrupt(&shared, &interrupts);
        let thread = std::thread::Builder::new().name("gpu-interrupts".into());
        self.threads.push(thread.spawn(interrupt)?);
        if let Some(bells) = self.shared.bells.clone() {
            let thread = std::thread::Builder::new().name("gpu-doorbells".into());
            self.threads.push(thread.spawn(move || bells.run())?);
        }
        Ok(())
    }

    fn spec(&self) -> &ClientSpec {
        &self.spec
    }

    fn gpu(&self) -> &GpuDescription {
        &self.gpu
    }

    fn apertures(&self) -> &Apertures {
        &self.apertures
    }

    fn import(&mut self, ram: GuestRam<'_>) -> Result<MemoryId, GpuError> {
        let memory = self.memory.import(&ram)?;
        self.note_imported();
        Ok(memory)
    }

    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        if !self.memory.has(memory) {
            return Err(GpuError::NotFound("memory"));
        }
        self.shared.channels().leave(memory);
        self.memory.release(memory)?;
        self.note_imported();
        Ok(())
    }

    fn map(
        &mut self,
        va: GpuVa,
        len: u64,
        backing: Backing,
        writable: bool,
    ) -> Result<(), GpuError> {
        self.memory.map(va, len, backing, writable)
    }

    fn unmap(&mut self, va: GpuVa, len: u64) -> Result<(), GpuError> {
        self.memory.unmap(va, len)
    }

    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError> {
        let userd = self.memory.userd(spec.userd)?;
        self.shared.channels().create(spec, userd)
    }

    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError> {
        let running = self.shared.running();
        self.shared.channels().destroy(id, running)
    }

    fn query_channel(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError> {
        self.shared.note_errors();
        self.shared.channels().query(id)
    }

    fn wake(&mut self, token: Token) -> Result<(), GpuError> {
        match &self.shared.bells {
            Some(bells) => bells.wake(token),
            None => self.shared.channels().ring_for(token),
        }
        Ok(())
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.shared.signals.changed()
    }

    fn set_interrupt(
        &mut self,
        vector: u32,
        event: Option<BorrowedFd<'_>>,
    ) -> Result<(), GpuError> {
        let event = event.map(|event| event.try_clone_to_owned()).transpose()?;
        if self.shared.signals.set_vector(vector, event) {
            Ok(())
        } else {
            Err(GpuError::OutOfRange("interrupt vector"))
        }
    }

    fn take_pending(&mut self) -> Pending {
        self.shared.signals.take()
    }

    fn reset(&mut self) -> Result<(), GpuError> {
        let running = self.shared.running();
        self.shared.channels().clear(running);
        self.memory.unmap_all();
        Ok(())
    }

    fn usage(&mut self) -> Result<Usage, GpuError> {
        Ok(self.shared.report().usage)
    }

    fn attach_manager(&mut self, fd: OwnedFd) -> Result<(), GpuError> {
        let socket = SeqPacket::from(fd);
        socket.try_send(&encode(&FromWorker::Ready)?, &[])?;
        if let Ok(mut next) = self.shared.next_manager.lock() {
            *next = Some(socket);
        }
        Ok(())
    }
}

impl Drop for NvidiaClient {
    fn drop(&mut self) {
        self.shared.signals.stop();
        if let Some(bells) = &self.shared.bells {
            bells.stop();
        }
        for thread in self.threads.drain(..) {
            // One that panicked has said so already.
            let _ = thread.join();
        }
        let running = self.shared.running();
        self.shared.channels().clear(running);
    }
}
