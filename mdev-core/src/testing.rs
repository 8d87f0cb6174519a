//! Test helpers: a GPU client that records its calls, and guest memory.
//!
//! * [`queue_driver`]: a guest's driver of the control queue
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "test helpers panic on violations"
)]

pub mod queue_driver;

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use crate::abi::mailbox::VA_END;
use crate::abi::userd;
use crate::device::Scanout;
use crate::gpu::{
    Aperture, Apertures, Backing, ChannelHandle, ChannelSpec, ChannelStatus, Client, ClientSpec,
    GpuCapabilities, GpuDescription, GpuError, GuestRam, MapRequest, Pending, SavedChannel,
    SavedClient, Saving, Usage, WrittenPages,
};
use crate::ids::{ChannelId, GpuVa, GuestPa, MemoryId, SpaceId, Token, VgpuId};
use crate::mem::{DmaAccess, GuestMemory};
use crate::stream::Head;
use crate::units::{MIB, PAGE_SIZE, is_aligned};

/// Calls of a [`Recorder`], and its configured replies.
#[derive(Debug, Default)]
pub struct Record {
    pub calls: Vec<String>,
    pub pending: Option<Pending>,
    pub imports: BTreeMap<u32, u64>,
    pub mapped: BTreeMap<u64, (u64, Backing, bool)>,
    pub channels: BTreeMap<u32, ChannelSpec>,
    pub interrupts: [bool; 4],
    /// Last scanout of the client.
    pub scanout: Scanout,
    /// Number of scanouts.
    pub scanouts: u32,
    pub scrubbed: u32,
    /// Whether the client can replace its apertures.
    pub renewable: bool,
    pub lost: bool,
    pub paused: bool,
    /// What the GPU has written to each import whose writes are recorded.
    pub writes: Vec<Range<u64>>,
    /// Number of map calls before one fails.
    pub maps_left: Option<u32>,
    /// Fail each n-th call, except for calls that release resources.
    pub refuse_every: Option<u32>,
    next: u32,
    made: u32,
}

/// Record, shared with the test.
pub type Shared = Arc<Mutex<Record>>;

#[derive(Debug)]
pub struct Recorder {
    /// What it was opened with.
    pub spec: ClientSpec,
    gpu: GpuDescription,
    apertures: Apertures,
    event: EventFd,
    record: Shared,
}

/// Offset of the recorder's apertures in their files. Other vGPUs own the memory before it.
pub const APERTURE_OFFSET: u64 = 3 * PAGE_SIZE;

/// Returns an aperture of `len` bytes in the middle of a file.
fn aperture(len: u64) -> Aperture {
    Aperture { fd: memory(2 * APERTURE_OFFSET + len).into(), offset: APERTURE_OFFSET, len }
}

/// Returns 8 MiB of video memory, with a framebuffer of 4 MiB, and a doorbell page.
fn apertures() -> Apertures {
    let vram = aperture(8 * MIB);
    let framebuffer =
        Aperture { fd: vram.fd.try_clone().unwrap(), offset: vram.offset, len: 4 * MIB };
    Apertures {
        vram: Some(vram),
        doorbell: Some(aperture(0x1_0000)),
        framebuffer: Some(framebuffer),
    }
}

impl Recorder {
    /// Returns a client with 8 MiB of video memory, including a framebuffer of 4 MiB.
    pub fn new() -> (Box<Self>, Shared) {
        let record = Shared::default();
        let recorder = Self {
            spec: ClientSpec {
                vgpu: VgpuId(uuid::Uuid::from_u128(0x11)),
                vram_bytes: 8 * MIB,
                framebuffer_bytes: 4 * MIB,
                max_channels: 8,
                max_import_bytes: 64 * MIB,
            },
            gpu: GpuDescription {
                parent: "soft0".into(),
                model: "SOFT".into(),
                name: "Test GPU".into(),
                vram_bytes: 64 * MIB,
                capabilities: GpuCapabilities::all(),
                max_vgpus: 16,
                max_channels: 8,
                max_import_bytes: 1 << 30,
                default_timeslice: Duration::from_millis(2),
                hang_timeout: None,
            },
            apertures: apertures(),
            event: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
            record: record.clone(),
        };
        (Box::new(recorder), record)
    }

    fn call(&self, text: String) -> Result<MutexGuard<'_, Record>, GpuError> {
        let mut record = self.record.lock().unwrap();
        record.calls.push(text);
        if record.lost { Err(GpuError::Lost("unplugged".into())) } else { Ok(record) }
    }

    /// Records a call that may fail.
    fn fallible_call(&self, text: String) -> Result<MutexGuard<'_, Record>, GpuError> {
        let mut record = self.call(text)?;
        record.made += 1;
        match record.refuse_every {
            Some(every) if record.made.is_multiple_of(every) => Err(GpuError::Limit("mood")),
            _ => Ok(record),
        }
    }
}

/// What the GPU of a [`Recorder`] has written.
#[derive(Debug)]
struct Writes(Shared);

impl WrittenPages for Writes {
    fn ranges(&self) -> Vec<Range<u64>> {
        self.0.lock().unwrap().writes.clone()
    }
}

impl Client for Recorder {
    fn saving(&mut self) -> Option<&mut dyn Saving> {
        Some(self)
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
        assert!(ram.len > 0 && is_aligned(ram.len | ram.offset, PAGE_SIZE), "{ram:?}");
        let mut record = self.fallible_call(format!("import {:#x} {}", ram.len, ram.writable))?;
        record.next += 1;
        let id = record.next;
        record.imports.insert(id, ram.len);
        Ok(MemoryId(id))
    }

    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        let mut record = self.call(format!("release {}", memory.0))?;
        record.imports.remove(&memory.0).ok_or(GpuError::NotFound("memory"))?;
        Ok(())
    }

    fn create_space(&mut self) -> Result<SpaceId, GpuError> {
        Err(GpuError::Unsupported("several address spaces"))
    }

    fn destroy_space(&mut self, _space: SpaceId) -> Result<(), GpuError> {
        Err(GpuError::NotFound("address space"))
    }

    fn map(&mut self, request: &MapRequest) -> Result<(), GpuError> {
        let MapRequest { space, va, len, backing, writable, .. } = *request;
        assert_eq!(space, SpaceId::DEFAULT);
        assert!(len > 0 && is_aligned(va.0 | len, PAGE_SIZE), "{va} {len:#x}");
        let end = va.0.checked_add(len).unwrap();
        assert!(end <= VA_END, "{va} {len:#x}");
        let mut record = self.fallible_call(format!("map {va} {len:#x} {backing:?} {writable}"))?;
        let (offset, limit) = match backing {
            Backing::Guest { memory, offset } | Backing::Allocated { memory, offset } => {
                (offset, record.imports[&memory.0])
            }
            Backing::Vram { offset } => (offset, self.spec.vram_bytes),
        };
        assert!(offset.checked_add(len).unwrap() <= limit, "{backing:?} {len:#x}");
        let before = record.mapped.range(..end).next_back();
        if before.is_some_and(|(start, (len, ..))| start + len > va.0) {
            return Err(GpuError::Overlap(va));
        }
        match &mut record.maps_left {
            Some(0) => return Err(GpuError::Overlap(va)),
            Some(left) => *left -= 1,
            None => {}
        }
        record.mapped.insert(va.0, (len, backing, writable));
        Ok(())
    }

    fn unmap(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError> {
        assert_eq!(space, SpaceId::DEFAULT);
        let mut record = self.call(format!("unmap {va} {len:#x}"))?;
        let before = record.mapped.len();
        record.mapped.retain(|start, _| *start < va.0 || *start - va.0 >= len);
        if record.mapped.len() == before { Err(GpuError::NotFound("mapping")) } else { Ok(()) }
    }

    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError> {
        assert_eq!(spec.check(self.gpu().capabilities), Ok(()), "{spec:?}");
        let mut record = self.fallible_call("create_channel".into())?;
        record.next += 1;
        let id = record.next;
        record.channels.insert(id, *spec);
        Ok(ChannelHandle { id: ChannelId(id), token: Token(0x100 + id) })
    }

    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError> {
        let mut record = self.fallible_call(format!("destroy_channel {}", id.0))?;
        record.channels.remove(&id.0).map(drop).ok_or(GpuError::NotFound("channel"))
    }

    fn query_channel(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError> {
        let record = self.fallible_call(format!("query_channel {}", id.0))?;
        let found = record.channels.contains_key(&id.0);
        let status = ChannelStatus { gp_get: 5, ..ChannelStatus::default() };
        if found { Ok(status) } else { Err(GpuError::NotFound("channel")) }
    }

    fn wake(&mut self, token: Token) -> Result<(), GpuError> {
        self.fallible_call(format!("wake {:#x}", token.0)).map(drop)
    }

    fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is owned by self, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }

    fn set_interrupt(
        &mut self,
        vector: u32,
        event: Option<BorrowedFd<'_>>,
    ) -> Result<(), GpuError> {
        let mut record =
            self.fallible_call(format!("set_interrupt {vector} {}", event.is_some()))?;
        record.interrupts[vector as usize] = event.is_some();
        Ok(())
    }

    fn take_pending(&mut self) -> Pending {
        self.record.lock().unwrap().pending.take().unwrap_or(Pending::empty())
    }

    fn reset(&mut self) -> Result<(), GpuError> {
        let mut record = self.call("reset".into())?;
        record.channels.clear();
        record.mapped.clear();
        record.paused = false;
        Ok(())
    }

    fn usage(&mut self) -> Result<Usage, GpuError> {
        Ok(Usage::default())
    }

    fn set_scanout(&mut self, scanout: &Scanout) -> Result<(), GpuError> {
        let mut record = self.record.lock().unwrap();
        record.scanout = *scanout;
        record.scanouts += 1;
        Ok(())
    }

    fn renew(&mut self) -> Result<bool, GpuError> {
        let renewable = self.record.lock().unwrap().renewable;
        if renewable {
            self.apertures = apertures();
        }
        Ok(renewable)
    }

    fn scrub(&mut self) -> Result<(), GpuError> {
        self.record.lock().unwrap().scrubbed += 1;
        Ok(())
    }
}

impl Saving for Recorder {
    fn log_writes(
        &mut self,
        memory: MemoryId,
        _len: u64,
    ) -> Result<Box<dyn WrittenPages>, GpuError> {
        drop(self.fallible_call(format!("log writes {}", memory.0))?);
        Ok(Box::new(Writes(Arc::clone(&self.record))))
    }

    fn end_log(&mut self, _memory: MemoryId) -> Result<(), GpuError> {
        Ok(())
    }

    fn pause(&mut self) -> Result<(), GpuError> {
        self.fallible_call("pause".into())?.paused = true;
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GpuError> {
        self.fallible_call("resume".into())?.paused = false;
        Ok(())
    }

    fn save(&mut self) -> Result<SavedClient, GpuError> {
        let record = self.fallible_call("save".into())?;
        assert!(record.paused);
        let mappings = record.mapped.iter().map(|(va, (len, backing, writable))| MapRequest {
            writable: *writable,
            ..MapRequest::new(GpuVa(*va), *len, *backing)
        });
        let channels = record.channels.iter().map(|(id, spec)| SavedChannel {
            id: ChannelId(*id),
            spec: *spec,
            state: vec![*id as u8],
        });
        let (mappings, channels) = (mappings.collect(), channels.collect());
        Ok(SavedClient { spaces: Vec::new(), mappings, channels })
    }

    fn restore_channel(&mut self, channel: &SavedChannel) -> Result<(), GpuError> {
        assert_eq!(channel.spec.check(self.gpu().capabilities), Ok(()), "{channel:?}");
        let mut record = self.fallible_call("restore_channel".into())?;
        assert!(record.paused);
        if let Backing::Guest { memory, offset } = channel.spec.userd {
            assert!(offset + userd::BYTES <= record.imports[&memory.0], "{channel:?}");
        }
        if record.channels.insert(channel.id.0, channel.spec).is_some() {
            return Err(GpuError::Invalid("the channel exists"));
        }
        Ok(())
    }

    fn restore_space(&mut self, _space: SpaceId) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("several address spaces"))
    }
}

/// Returns the description of a saved vGPU.
pub fn saved_head(vram_bytes: u64) -> Head {
    Head {
        tessera: String::new(),
        vgpu: VgpuId(uuid::Uuid::nil()),
        mdev_type: "TEST".into(),
        vram_bytes,
        place: None,
    }
}

/// Returns a file in memory, filled with zeros.
pub fn memory(len: u64) -> File {
    // SAFETY: creates a descriptor; the name outlives the call.
    let fd = unsafe { libc::memfd_create(c"memory".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new and has no other owner.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(len).unwrap();
    file
}

/// Returns a file of guest RAM for the test and a descriptor for the device.
pub fn guest_ram(len: u64) -> (File, OwnedFd) {
    let file = memory(len);
    let shared = file.try_clone().unwrap().into();
    (file, shared)
}

/// Maps a new file of guest RAM for the device and returns it.
pub fn shared_ram(memory: &mut GuestMemory, iova: u64, size: u64) -> File {
    let (file, fd) = guest_ram(size);
    let access = DmaAccess::READ | DmaAccess::WRITE;
    memory.map(GuestPa(iova), size, access, Some((fd, 0))).unwrap();
    file
}
