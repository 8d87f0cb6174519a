//! Probe for context switches: a channel of the worker's own that asks for the compute engine.
//!
//! Whether a guest's kernels end cannot be read in memory that the guest can write. The GPU shows
//! it: when another context asks for the engine, the engine changes to that context at the end of
//! the slice, or with the kernel that runs then. So the worker asks for the engine itself. Work
//! that keeps the engine although the probe waits is one long kernel. Work that lets the probe
//! through consists of kernels that end, however long it takes in all.
//!
//! The probe's memory and address space are not accessible to the guest. It consists of an ordinary
//! channel with an ordinary ring: the driver is not asked for anything unusual.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ipc::mem::Mapping;
use mdev_core::abi::host::{GP_ENTRY_BYTES, GpEntry, MethodHeader, SEM_ADDR_LO, SET_OBJECT, SecOp};
use mdev_core::abi::host::{SUBCHANNEL_COMPUTE, sem};
use mdev_core::abi::{compute, userd};
use mdev_core::gpu::GpuError;
use mdev_core::ids::Token;
use mdev_core::units::PAGE_SIZE;
use nvidia_rm::abi;
use nvidia_rm::numbers::{class, control, engine, flag};
use nvidia_rm::rm::Node;
use nvidia_rm::rm_client::{AddressSpace, Object};
use zerocopy::IntoBytes;

use crate::nvidia::adoption::descriptors::{self, Descriptors};
use crate::nvidia::adoption::state::ProbeObjects;
use crate::nvidia::device::Device;
use crate::nvidia::error_notifier::Notifier;
use crate::nvidia::usermode_page;

/// Address of the memory in the probe's address space.
const VA: u64 = 1 << 36;
/// Number of entries of the ring.
const ENTRIES: u32 = 16;
/// Offsets in the memory: ring, USERD, pushbuffers and semaphore, each in a page of its own.
const USERD: u64 = PAGE_SIZE;
const PUSHBUFFERS: u64 = 2 * PAGE_SIZE;
const SEMAPHORE: u64 = 3 * PAGE_SIZE;
const MEMORY_BYTES: u64 = 4 * PAGE_SIZE;
/// Size of a pushbuffer.
const PUSHBUFFER_BYTES: u64 = 64;
/// Shortest time slice, in microseconds: the probe has next to no work.
const TIMESLICE_US: u64 = 50;

/// Attempts to allocate the class, and the pause between them. The driver may be out of page tables
/// for a moment while many vGPUs start at once.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(20);

/// Number of a request to a [`SwitchProbe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request(pub(in crate::nvidia) u32);

/// State of a request to the probe.
#[derive(Clone, Copy, Debug)]
pub struct Probed {
    /// The request.
    pub request: Request,
    /// When the request was made.
    pub requested_at: Instant,
    /// The engine has served the request.
    pub served: bool,
}

/// Channel that asks for the compute engine.
#[derive(Debug)]
pub struct SwitchProbe {
    // Freed in this order.
    class: Arc<Object>,
    /// Number of that class.
    compute: u32,
    channel: Arc<Object>,
    group: Arc<Object>,
    notifier: Notifier,
    memory: ProbeMemory,
    mapping: Arc<Mapping>,
    doorbell: Arc<Mapping>,
    token: Token,
    /// Number of requests so far.
    requests: u32,
    requested_at: Instant,
}

/// The probe's memory, mapped into its address space.
#[derive(Debug)]
struct ProbeMemory {
    device: Arc<Device>,
    space: AddressSpace,
    object: Arc<Object>,
}

impl ProbeMemory {
    fn new(device: &Arc<Device>) -> Result<Self, GpuError> {
        let space = device.address_space()?;
        let object = device.system_memory(MEMORY_BYTES, false)?;
        let flags = flag::PAGE_4K | flag::SNOOP;
        device.rm_client.map_dma(&space, &object, 0, MEMORY_BYTES, VA, flags)?;
        Ok(Self { device: device.clone(), space, object })
    }
}

impl Drop for ProbeMemory {
    fn drop(&mut self) {
        if !self.device.rm_client.frees_objects() {
            return;
        }
        let unmapped = self.device.rm_client.unmap_dma(&self.space, self.object.handle(), VA, 0);
        if let Err(error) = unmapped {
            log::debug!("{error}");
        }
    }
}

fn alloc_class(device: &Device, channel: &Arc<Object>) -> Result<Arc<Object>, GpuError> {
    let (rm_client, compute) = (&device.rm_client, device.generation.compute);
    let mut others = 1..ATTEMPTS;
    loop {
        match rm_client.alloc(Some(channel), compute, None, "probe's class") {
            Err(error) if error.is_out_of_memory() && others.next().is_some() => {
                thread::sleep(PAUSE);
            }
            result => return Ok(result?),
        }
    }
}

impl SwitchProbe {
    /// Creates the probe. `doorbell` is the GPU's doorbell page.
    pub fn new(device: &Arc<Device>, doorbell: Arc<Mapping>) -> Result<Self, GpuError> {
        let rm_client = &device.rm_client;
        let memory = ProbeMemory::new(device)?;
        let object = &memory.object;
        let fd = rm_client.aperture(&device.device, object, Node::Control, MEMORY_BYTES, 0)?;
        let mapping = descriptors::map(&fd, MEMORY_BYTES, true)?;
        device.to_keep.keep(descriptors::PROBE, fd);
        for at in (0..MEMORY_BYTES).step_by(8) {
            let _ = mapping.store_u64(at, 0);
        }
        let notifier = Notifier::new(device, descriptors::PROBE_NOTIFIER)?;
        notifier.clear();
        let mut params = abi::GroupParams {
            va_space: memory.space.space.handle(),
            engine: engine::GRAPHICS,
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        let group = rm_client.alloc(Some(&device.device), class::GROUP, params, "probe's group")?;
        let mut params = abi::ChannelParams {
            error: notifier.memory.handle(),
            gpfifo: VA,
            gpfifo_entries: ENTRIES,
            flags: flag::CHANNEL,
            engine: engine::GRAPHICS,
            ..Default::default()
        };
        params.userd_memory[0] = object.handle();
        params.userd_offset[0] = USERD;
        let params = &mut params.as_mut_bytes()[..rm_client.layout().channel];
        let generation = device.generation;
        let channel =
            rm_client.alloc(Some(&group), generation.channel, Some(params), "probe's channel")?;
        let class = alloc_class(device, &channel)?;
        let mut token = u32::MAX;
        channel.control(control::TOKEN, &mut token)?;
        let mut timeslice_us = TIMESLICE_US;
        group.control(control::SET_TIMESLICE, &mut timeslice_us)?;
        device.schedule(&group)?;
        Ok(Self {
            class,
            compute: generation.compute,
            channel,
            group,
            notifier,
            memory,
            mapping,
            doorbell,
            token: Token(token),
            requests: 0,
            requested_at: Instant::now(),
        })
    }

    /// Adopts the probe of an earlier process.
    pub fn adopt(
        device: &Arc<Device>,
        doorbell: Arc<Mapping>,
        objects: &ProbeObjects,
        files: &mut Descriptors<'_>,
    ) -> Result<Self, GpuError> {
        let rm_client = &device.rm_client;
        let mapping = descriptors::map(&files.take(descriptors::PROBE)?, MEMORY_BYTES, true)?;
        let group = device.adopt_object(objects.group);
        let channel = rm_client.adopt_object(Some(&group), objects.channel);
        // The probe has one request at a time: either that of the last entry is served, or it
        // waits.
        let served = mapping.load_u32(SEMAPHORE).unwrap_or_default();
        let put = mapping.load_u32(USERD + userd::GP_PUT).unwrap_or_default();
        let waits = put != served % ENTRIES;
        // The process may have ended before it rang.
        usermode_page::ring(&doorbell, objects.token);
        Ok(Self {
            class: rm_client.adopt_object(Some(&channel), objects.class),
            compute: device.generation.compute,
            channel,
            group,
            notifier: Notifier::adopt(
                device,
                objects.notifier,
                descriptors::PROBE_NOTIFIER,
                files,
            )?,
            memory: ProbeMemory {
                device: device.clone(),
                space: device.adopt_space(objects.space, objects.range),
                object: device.adopt_object(objects.memory),
            },
            mapping,
            doorbell,
            token: objects.token,
            requests: served.saturating_add(waits.into()),
            requested_at: Instant::now(),
        })
    }

    /// Returns the objects for the adopting process.
    pub fn objects(&self) -> ProbeObjects {
        ProbeObjects {
            space: self.memory.space.space.handle(),
            range: self.memory.space.range.handle(),
            memory: self.memory.object.handle(),
            notifier: self.notifier.memory.handle(),
            group: self.group.handle(),
            channel: self.channel.handle(),
            class: self.class.handle(),
            token: self.token,
        }
    }

    /// Asks for the engine, unless a request is pending. Returns the request that is pending now.
    pub fn request(&mut self) -> Request {
        if self.is_served(Request(self.requests)) {
            self.submit();
        }
        Request(self.requests)
    }

    /// Returns whether the engine has served a request.
    pub fn is_served(&self, request: Request) -> bool {
        self.mapping.load_u32(SEMAPHORE).is_none_or(|served| served >= request.0)
    }

    /// Returns when the last request was made.
    pub fn requested_at(&self) -> Instant {
        self.requested_at
    }

    /// Returns whether the channel works. One that has failed serves no request.
    pub fn works(&self) -> bool {
        self.notifier.error().is_none()
    }

    fn submit(&mut self) {
        let entry = self.requests % ENTRIES;
        self.requests += 1;
        self.requested_at = Instant::now();
        let push = PUSHBUFFERS + u64::from(entry) * PUSHBUFFER_BYTES;
        let method = |subchannel, method, count| {
            MethodHeader { op: SecOp::Inc, subchannel, method, count }.encode()
        };
        let semaphore = VA + SEMAPHORE;
        let words = [
            method(SUBCHANNEL_COMPUTE, SET_OBJECT, 1),
            self.compute,
            // A method of the class needs the engine. Methods of the host alone do not.
            method(SUBCHANNEL_COMPUTE, compute::NO_OPERATION, 1),
            0,
            method(0, SEM_ADDR_LO, 5),
            semaphore as u32,
            (semaphore >> 32) as u32,
            self.requests,
            0,
            sem::RELEASE | sem::RELEASE_WFI,
        ];
        for (word, at) in words.iter().zip((push..).step_by(4)) {
            let _ = self.mapping.store_u32(at, *word);
        }
        let segment = GpEntry::Segment { va: VA + push, dwords: words.len() as u32 };
        let _ = self.mapping.store_u64(u64::from(entry) * GP_ENTRY_BYTES, segment.encode());
        let _ = self.mapping.store_u32(USERD + userd::GP_PUT, self.requests % ENTRIES);
        usermode_page::ring(&self.doorbell, self.token);
    }
}
