//! Copies between video memory and the host, through a channel of the worker's own and a copy
//! engine.
//!
//! The channel's address space has the partition, the staging memory, and the channel's own memory.
//! The guest cannot access it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::mem::{Mapping, SharedMemory};
use mdev_core::abi::copy::{
    self, LAUNCH_DMA, LINE_LENGTH_IN, OFFSET_IN_UPPER, SET_SEMAPHORE_A, launch,
};
use mdev_core::abi::host::{
    GP_ENTRY_BYTES, GpEntry, MethodHeader, SET_OBJECT, SUBCHANNEL_COPY, SecOp,
};
use mdev_core::abi::userd;
use mdev_core::gpu::{GpuError, StagedCopy};
use mdev_core::ids::Token;
use mdev_core::units::{GIB, MIB, PAGE_SIZE};
use nvidia_rm::abi;
use nvidia_rm::numbers::{class, control, flag};
use nvidia_rm::rm_client::{AddressSpace, Object};
use zerocopy::IntoBytes;

use super::device::Device;
use super::usermode_page;

/// Length of staging memory, in bytes.
pub const STAGING_BYTES: u64 = 128 * MIB;

/// Addresses of the channel's memory, of staging memory, and of video memory.
const CONTROL_VA: u64 = 1 << 36;
const STAGING_VA: u64 = 1 << 37;
const VRAM_VA: u64 = 1 << 38;

/// Number of entries of the ring.
const ENTRIES: u32 = 16;
/// Offsets in the channel's memory.
const USERD: u64 = PAGE_SIZE;
const PUSHBUFFERS: u64 = 2 * PAGE_SIZE;
const SEMAPHORE: u64 = 3 * PAGE_SIZE;
const CONTROL_BYTES: u64 = 4 * PAGE_SIZE;
/// Size of a pushbuffer.
const PUSHBUFFER_BYTES: u64 = 128;
/// Limit of the bytes of one launch.
const MAX_LAUNCH: u64 = GIB;
/// Limit of the wait for a copy. Other vGPUs may be using the engine.
const LIMIT: Duration = Duration::from_secs(5);
/// Interval of looking at the semaphore.
const INTERVAL: Duration = Duration::from_micros(20);

/// Copier of a partition of video memory.
#[derive(Debug)]
pub struct VramCopier {
    // Freed in this order.
    _class: Arc<Object>,
    _channel: Arc<Object>,
    _group: Arc<Object>,
    _mapped: Mapped,
    _notifier: Arc<Object>,
    control: Arc<Mapping>,
    staging: SharedMemory,
    doorbell: Arc<Mapping>,
    token: Token,
    copy_class: u32,
    vram_bytes: u64,
    /// Number of copies so far.
    copies: u32,
}

/// Address space with its mappings.
#[derive(Debug)]
struct Mapped {
    device: Arc<Device>,
    space: AddressSpace,
    /// Memory objects and their addresses.
    memory: Vec<(Arc<Object>, u64)>,
}

impl Mapped {
    fn map(&mut self, object: Arc<Object>, len: u64, va: u64, flags: u32) -> Result<(), GpuError> {
        self.device.rm_client.map_dma(&self.space, &object, 0, len, va, flags)?;
        self.memory.push((object, va));
        Ok(())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let rm_client = &self.device.rm_client;
        for (object, va) in self.memory.drain(..).filter(|_| rm_client.frees_objects()) {
            if let Err(error) = rm_client.unmap_dma(&self.space, object.handle(), va, 0) {
                log::debug!("{error}");
            }
        }
    }
}

impl VramCopier {
    /// Creates a copier of the partition `vram`, on a copy engine of the device. `doorbell` is the
    /// GPU's doorbell page.
    pub fn new(
        device: &Arc<Device>,
        doorbell: Arc<Mapping>,
        engine: u32,
        (vram, vram_bytes): (Arc<Object>, u64),
    ) -> Result<Self, GpuError> {
        let rm_client = &device.rm_client;
        let control = SharedMemory::new(c"copier", CONTROL_BYTES)?.mapping;
        let staging = SharedMemory::new(c"staging", STAGING_BYTES)?;
        let control_object = device.register(&control)?;
        let staging_object = device.register(&staging.mapping)?;
        let space = device.address_space()?;
        let mut mapped = Mapped { device: device.clone(), space, memory: Vec::new() };
        let flags = flag::PAGE_4K | flag::SNOOP;
        mapped.map(control_object.clone(), CONTROL_BYTES, CONTROL_VA, flags)?;
        mapped.map(staging_object, STAGING_BYTES, STAGING_VA, flags)?;
        mapped.map(vram, vram_bytes, VRAM_VA, 0)?;
        // The driver writes it, and nothing reads it.
        let notifier = device.system_memory(PAGE_SIZE, false)?;
        let mut params = abi::GroupParams {
            va_space: mapped.space.space.handle(),
            engine,
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        let group =
            rm_client.alloc(Some(&device.device), class::GROUP, params, "copier's group")?;
        let mut params = abi::ChannelParams {
            error: notifier.handle(),
            gpfifo: CONTROL_VA,
            gpfifo_entries: ENTRIES,
            flags: flag::CHANNEL,
            engine,
            ..Default::default()
        };
        params.userd_memory[0] = control_object.handle();
        params.userd_offset[0] = USERD;
        let params = &mut params.as_mut_bytes()[..rm_client.layout().channel];
        let generation = device.generation;
        let channel =
            rm_client.alloc(Some(&group), generation.channel, Some(params), "copier's channel")?;
        let mut params = abi::CopyParams { version: 1, engine };
        let params = Some(params.as_mut_bytes());
        let class = rm_client.alloc(Some(&channel), generation.copy, params, "copier's class")?;
        let mut token = u32::MAX;
        channel.control(control::TOKEN, &mut token)?;
        device.schedule(&group)?;
        Ok(Self {
            _class: class,
            _channel: channel,
            _group: group,
            _mapped: mapped,
            _notifier: notifier,
            control,
            staging,
            doorbell,
            token: Token(token),
            copy_class: generation.copy,
            vram_bytes,
            copies: 0,
        })
    }

    /// Returns the file of the staging memory.
    pub fn staging(&self) -> std::io::Result<OwnedFd> {
        self.staging.fd.as_fd().try_clone_to_owned()
    }

    /// Makes a copy and waits for its end.
    pub fn copy(&mut self, copy: StagedCopy) -> Result<(), GpuError> {
        let StagedCopy { offset, len, at, fills } = copy;
        let fits = |start: u64, limit| start.checked_add(len).is_some_and(|end| end <= limit);
        if len == 0 || !fits(offset, self.vram_bytes) || !fits(at, STAGING_BYTES) {
            return Err(GpuError::OutOfRange("a copy of video memory"));
        }
        let (vram, staging) = (VRAM_VA + offset, STAGING_VA + at);
        let (from, to) = if fills { (staging, vram) } else { (vram, staging) };
        self.submit(from, to, len);
        let since = Instant::now();
        while self.control.load_u32(SEMAPHORE) != Some(self.copies) {
            if since.elapsed() > LIMIT {
                return Err(GpuError::Later("a copy engine does not answer"));
            }
            std::thread::sleep(INTERVAL);
        }
        Ok(())
    }

    fn submit(&mut self, from: u64, to: u64, len: u64) {
        let entry = self.copies % ENTRIES;
        self.copies += 1;
        let method = |method, count| {
            MethodHeader { op: SecOp::Inc, subchannel: SUBCHANNEL_COPY, method, count }.encode()
        };
        let halves = |va: u64| [(va >> 32) as u32, va as u32];
        let ([from_hi, from_lo], [to_hi, to_lo]) = (halves(from), halves(to));
        let [done_hi, done_lo] = halves(CONTROL_VA + SEMAPHORE);
        let plain =
            launch::TRANSFER_NON_PIPELINED | launch::FLUSH | launch::SRC_PITCH | launch::DST_PITCH;
        let words = [
            method(SET_OBJECT, 1),
            self.copy_class,
            // OFFSET_IN and OFFSET_OUT are consecutive.
            method(OFFSET_IN_UPPER, 4),
            from_hi,
            from_lo,
            to_hi,
            to_lo,
            method(LINE_LENGTH_IN, 1),
            len as u32,
            method(LAUNCH_DMA, 1),
            plain,
            method(SET_SEMAPHORE_A, 3),
            done_hi,
            done_lo,
            self.copies,
            method(LAUNCH_DMA, 1),
            launch::FLUSH | launch::SEMAPHORE_ONE_WORD,
        ];
        let push = PUSHBUFFERS + u64::from(entry) * PUSHBUFFER_BYTES;
        for (word, at) in words.iter().zip((push..).step_by(4)) {
            let _ = self.control.store_u32(at, *word);
        }
        let segment = GpEntry::Segment { va: CONTROL_VA + push, dwords: words.len() as u32 };
        let _ = self.control.store_u64(u64::from(entry) * GP_ENTRY_BYTES, segment.encode());
        let _ = self.control.store_u32(USERD + userd::GP_PUT, self.copies % ENTRIES);
        usermode_page::ring(&self.doorbell, self.token);
    }
}

const _: () = {
    assert!(STAGING_BYTES <= MAX_LAUNCH && copy::OFFSET_OUT_UPPER == OFFSET_IN_UPPER + 8);
    assert!(PUSHBUFFER_BYTES * ENTRIES as u64 <= PAGE_SIZE && 17 * 4 <= PUSHBUFFER_BYTES);
};
