//! A GPU's client that keeps books, and panics about a call that no caller may make.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use mdev_core::gpu::{
    Apertures, Backing, ChannelHandle, ChannelSpec, ChannelStatus, Client, ClientSpec, ErrorStates,
    Exception, GpuCapabilities, GpuDescription, GpuError, GuestRam, MapRequest, Pending, Programs,
    Usage,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId, Token, VgpuId};
use mdev_core::units::{MIB, PAGE_SIZE, is_aligned};
use nix::sys::eventfd::EventFd;
use vendor_backends::nvidia::frontend::identity::Identity;
use vendor_backends::nvidia::frontend::{NvidiaFrontEnd, testing};

/// Video memory of the client, in bytes.
pub const VRAM: u64 = 64 * MIB;

/// A client that keeps books.
#[derive(Debug)]
pub struct Books {
    spec: ClientSpec,
    gpu: GpuDescription,
    apertures: Apertures,
    event: EventFd,
    /// Fails each n-th call that makes something.
    refuse_every: u32,
    /// Whether the driver allocates video memory, or the client has a partition of it.
    allocates: bool,
    made: u32,
    next: u32,
    /// Imports and allocations: length, and whether it is an allocation.
    memory: BTreeMap<u32, (u64, bool)>,
    /// Mappings of each space: length by address.
    spaces: BTreeMap<u32, BTreeMap<u64, u64>>,
    channels: BTreeMap<u32, ChannelSpec>,
}

/// Returns a front end for a version of the driver, on the vGPU of [`Books`].
pub fn front_end(driver: &str) -> NvidiaFrontEnd {
    let vgpu = Books::new(0, false).spec.vgpu;
    testing::front_end(Identity { vgpu, ..testing::identity(driver, VRAM) }, VRAM)
}

impl Books {
    /// Creates a client that fails each n-th call.
    pub fn new(refuse_every: u32, allocates: bool) -> Self {
        Self {
            spec: ClientSpec {
                vgpu: VgpuId(uuid::Uuid::from_u128(7)),
                vram_bytes: VRAM,
                framebuffer_bytes: 0,
                max_channels: 8,
                max_import_bytes: VRAM,
            },
            gpu: GpuDescription {
                parent: "soft0".into(),
                model: "SOFT".into(),
                name: "Test GPU".into(),
                vram_bytes: VRAM,
                capabilities: GpuCapabilities::all(),
                max_vgpus: 16,
                max_channels: 8,
                max_import_bytes: VRAM,
                default_timeslice: Duration::from_millis(2),
                hang_timeout: None,
            },
            apertures: Apertures { vram: None, doorbell: None, framebuffer: None },
            event: EventFd::new().expect("an eventfd"),
            refuse_every,
            allocates,
            made: 0,
            next: 0,
            memory: BTreeMap::new(),
            spaces: BTreeMap::new(),
            channels: BTreeMap::new(),
        }
    }

    /// Returns whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty() && self.spaces.is_empty() && self.channels.is_empty()
    }

    fn make(&mut self) -> Result<u32, GpuError> {
        self.made += 1;
        if self.refuse_every > 0 && self.made.is_multiple_of(self.refuse_every) {
            return Err(GpuError::Limit("mood"));
        }
        self.next += 1;
        Ok(self.next)
    }

    /// Checks that `len` bytes exist.
    fn check(&self, backing: Backing, len: u64) {
        let (offset, size) = match backing {
            Backing::Guest { memory, offset } => (offset, self.memory[&memory.0]),
            Backing::Allocated { memory, offset } => (offset, self.memory[&memory.0]),
            Backing::Vram { offset } => (offset, (VRAM, true)),
        };
        let video = !matches!(backing, Backing::Guest { .. });
        assert_eq!(video, size.1, "{backing:?}");
        assert!(offset.checked_add(len).is_some_and(|end| end <= size.0), "{backing:?}");
    }

    fn add_mapping(&mut self, space: SpaceId, va: u64, len: u64) {
        let space = self.spaces.get_mut(&space.0).expect("an address space");
        let end = va.checked_add(len).expect("an address");
        assert!(len > 0 && is_aligned(va | len, PAGE_SIZE) && end <= 1 << 57);
        let before = space.range(..end).next_back();
        assert!(before.is_none_or(|(start, len)| start + len <= va), "{va:#x} is mapped");
        space.insert(va, len);
    }
}

impl Client for Books {
    fn programs(&mut self) -> Option<&mut dyn Programs> {
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
        let id = self.make()?;
        assert!(ram.len > 0 && is_aligned(ram.len | ram.offset, PAGE_SIZE));
        self.memory.insert(id, (ram.len, false));
        Ok(MemoryId(id))
    }

    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        self.memory.remove(&memory.0).map(drop).ok_or(GpuError::NotFound("memory"))
    }

    fn create_space(&mut self) -> Result<SpaceId, GpuError> {
        let id = self.make()?;
        self.spaces.insert(id, BTreeMap::new());
        Ok(SpaceId(id))
    }

    fn destroy_space(&mut self, space: SpaceId) -> Result<(), GpuError> {
        let used = self.channels.values().any(|channel| channel.space == space);
        assert!(!used, "a channel uses the address space");
        self.spaces.remove(&space.0).map(drop).ok_or(GpuError::NotFound("address space"))
    }

    fn map(&mut self, request: &MapRequest) -> Result<(), GpuError> {
        self.make()?;
        self.check(request.backing, request.len);
        self.add_mapping(request.space, request.va.0, request.len);
        Ok(())
    }

    fn unmap(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError> {
        let space = self.spaces.get_mut(&space.0).expect("an address space");
        let inside: Vec<_> = space.range(va.0..va.0 + len).map(|(va, len)| (*va, *len)).collect();
        assert_eq!(inside.iter().map(|(_, len)| len).sum::<u64>(), len, "it is mapped");
        inside.iter().for_each(|(va, _)| assert!(space.remove(va).is_some()));
        Ok(())
    }

    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError> {
        let id = self.make()?;
        assert!(self.spaces.contains_key(&spec.space.0), "no address space");
        self.check(spec.userd, 512);
        if spec.check(self.gpu.capabilities).is_err() {
            return Err(GpuError::Invalid("channel"));
        }
        if self.channels.len() >= 8 {
            return Err(GpuError::Limit("channels"));
        }
        self.channels.insert(id, *spec);
        Ok(ChannelHandle { id: ChannelId(id), token: Token(id) })
    }

    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError> {
        self.channels.remove(&id.0).map(drop).ok_or(GpuError::NotFound("channel"))
    }

    fn query_channel(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError> {
        let error = if id.0.is_multiple_of(3) { 31 } else { 0 };
        Ok(ChannelStatus { error, ..Default::default() })
    }

    fn wake(&mut self, _token: Token) -> Result<(), GpuError> {
        Ok(())
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn set_interrupt(&mut self, _: u32, _: Option<BorrowedFd<'_>>) -> Result<(), GpuError> {
        Ok(())
    }

    fn take_pending(&mut self) -> Pending {
        Pending::empty()
    }

    fn reset(&mut self) -> Result<(), GpuError> {
        Ok(())
    }

    fn usage(&mut self) -> Result<Usage, GpuError> {
        Ok(Usage::default())
    }
}

impl Programs for Books {
    fn driver(&self) -> &str {
        ""
    }

    fn query_driver(&mut self, _command: u32, _params: &mut [u8]) -> Option<u32> {
        None
    }

    fn allocate(&mut self, len: u64) -> Result<MemoryId, GpuError> {
        if !self.allocates {
            return Err(GpuError::Unsupported("allocations of video memory"));
        }
        let id = self.make()?;
        self.memory.insert(id, (len, true));
        let video = self.memory.values().filter(|(_, video)| *video);
        assert!(video.map(|(len, _)| len).sum::<u64>() <= VRAM, "the partition is exceeded");
        Ok(MemoryId(id))
    }

    fn map_launch_region(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError> {
        self.make()?;
        self.add_mapping(space, va.0, len);
        Ok(())
    }

    fn preempt_instructions(&mut self, _channel: ChannelId) -> Result<(), GpuError> {
        Ok(())
    }

    fn watch_exceptions(&mut self, _channel: ChannelId, _mask: u32) -> Result<(), GpuError> {
        Ok(())
    }

    fn take_exceptions(&mut self) -> Vec<Exception> {
        Vec::new()
    }

    fn error_states(
        &mut self,
        _channel: ChannelId,
        _first: u32,
        _count: u32,
    ) -> Result<ErrorStates, GpuError> {
        Err(GpuError::Unsupported("errors of multiprocessors"))
    }

    fn clear_error_states(&mut self, _channel: ChannelId, _count: u32) -> Result<(), GpuError> {
        Ok(())
    }

    fn boost_clocks(&mut self, _boost: bool) -> Result<(), GpuError> {
        Ok(())
    }

    fn reset_channel(&mut self, _id: ChannelId) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("resets of channels"))
    }
}
