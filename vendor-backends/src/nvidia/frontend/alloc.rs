//! Allocation of objects (`NV_ESC_RM_ALLOC`).

use cuda_socket::{FileId, Range};
use mdev_core::abi::userd;
use mdev_core::gpu::{ChannelSpec, Client, EngineKind, Placement};
use mdev_core::ids::{GpuVa, SpaceId};
use mdev_core::units::{PAGE_SIZE, is_aligned};
use nvidia_rm::abi::{
    Alloc, AllocMemory, ChannelParams, ContextShareParams, CopyParams, DebuggerParams, EventParams,
    GroupParams, MemoryParams, VaSpaceParams,
};
use nvidia_rm::classes::{self, Class};
use nvidia_rm::generation::{CLASS_LIST, CLASS_LIST_BYTES, Generation, HOPPER};
use nvidia_rm::numbers::{class, engine, event, flag, status};
use nvidia_rm::table::{Row, find, label};
use zerocopy::{FromBytes, IntoBytes};

use super::NvidiaFrontEnd;
use super::call::{Call, Stop};
use super::memory::StoreId;
use super::objects::{EventSource, Kind, Object};

/// Length of the doorbell page, in bytes.
pub const DOORBELL_BYTES: u64 = 64 << 10;

/// An allocation in progress.
#[derive(Clone, Copy, Debug)]
struct New {
    file: FileId,
    root: u32,
    parent: u32,
    handle: u32,
    class: u32,
    /// Address of the parameters in the program.
    params: u64,
}

impl NvidiaFrontEnd {
    /// Carries out `NV_ESC_RM_ALLOC`.
    pub(super) fn rm_alloc(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
    ) -> Result<(), Stop> {
        let file = self.files.control_of(call.file())?;
        // The longer form begins with the same fields.
        let mut argument: Alloc = call.read()?;
        let Alloc { root, parent, object: handle, class, params, .. } = argument;
        let new = New { file, root, parent, handle, class, params };
        if find(classes::ROWS, class).and_then(Row::handler) == Some(&Class::Client) {
            (argument.object, argument.class) = (self.clients.create(file)?, class::CLIENT);
            return call.write(&argument);
        }
        self.clients.check_new(file, new.root, new.parent, new.handle)?;
        let kind = self.new_object(gpu, call, new)?;
        self.clients.insert(root, handle, Object { parent, class, kind });
        if class == class::STATUS_PAGE {
            self.write_status_pages();
        }
        Ok(())
    }

    fn new_object(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
        new: New,
    ) -> Result<Kind, Stop> {
        let generation = self.generation(gpu);
        let unknown = Stop::Status(status::INVALID_CLASS);
        let Some(class) = self.refusals.handler(classes::ROWS, ("class", new.class), unknown)?
        else {
            return Ok(Kind::Passive);
        };
        match class {
            Class::Space => self.new_space(call, new),
            Class::VideoMemory => self.new_memory(call, new, true),
            Class::SystemMemory => self.new_memory(call, new, false),
            Class::StatusPage => self.new_status_page(call),
            Class::Group => self.new_group(call, new),
            Class::ContextShare => self.new_context_share(call, new),
            Class::Event => self.new_event(call, new),
            Class::Debugger => self.new_debugger(call, new),
            Class::Doorbell => Ok(Kind::Memory(self.memories.doorbell(DOORBELL_BYTES)?)),
            Class::VirtualMemory => new_virtual_memory(call, new.params),
            Class::Channel if new.class == generation.channel => self.new_channel(gpu, call, new),
            Class::Compute if new.class == generation.compute => {
                self.new_engine_object(call, new, true)
            }
            Class::Copy if new.class == generation.copy => self.new_engine_object(call, new, false),
            // Of another generation; `rm_alloc` creates clients.
            Class::Channel | Class::Compute | Class::Copy | Class::Client => {
                self.refusals.note("class", label(classes::ROWS, new.class));
                Err(Stop::Status(status::INVALID_CLASS))
            }
        }
    }

    /// Returns the GPU's generation, by the classes that its driver lists.
    fn generation(&mut self, gpu: &mut dyn Client) -> &'static Generation {
        if let Some(known) = self.generation {
            return known;
        }
        let mut list = [0; CLASS_LIST_BYTES];
        let listed = self.query(gpu, CLASS_LIST, &mut list) == Some(status::OK);
        let found = Generation::of_list(&list).filter(|_| listed).unwrap_or(&HOPPER);
        self.generation.insert(found)
    }

    /// Creates an object of a channel, through which methods reach an engine.
    fn new_engine_object(
        &mut self,
        call: &mut Call<'_>,
        new: New,
        computes: bool,
    ) -> Result<Kind, Stop> {
        let parent = self.clients.object(new.file, new.root, new.parent)?;
        let &Kind::Channel { engine, .. } = &parent.kind else {
            return Err(Stop::Status(status::INVALID_OBJECT_PARENT));
        };
        if computes || new.params == 0 {
            return Ok(Kind::Engine(engine));
        }
        let params: CopyParams = call.params(new.params)?;
        // The first version has the number of a copy engine, the second that of an engine.
        let first = if params.version == 0 { engine::COPY0 } else { 0 };
        Ok(Kind::Engine(first.saturating_add(params.engine)))
    }

    fn new_space(&mut self, call: &mut Call<'_>, new: New) -> Result<Kind, Stop> {
        let len = self.layout.va_space;
        let mut bytes = call.block(new.params, len)?;
        bytes.resize(size_of::<VaSpaceParams>(), 0);
        let mut params = VaSpaceParams::read_from_bytes(&bytes).map_err(|_| Stop::INVALID)?;
        // As the driver answers: the size of the address space.
        params.size = super::VA_END.saturating_sub(params.base.max(PAGE_SIZE));
        bytes = params.as_bytes()[..len].to_vec();
        call.write_block(new.params, bytes);
        Ok(Kind::Space(None))
    }

    fn new_memory(&mut self, call: &mut Call<'_>, new: New, video: bool) -> Result<Kind, Stop> {
        let mut params: MemoryParams = call.params(new.params)?;
        let (store, len) = if video {
            let (store, len) = self.memories.allocate_video(params.size, params.alignment)?;
            (params.attr, params.attr2) = (attr::VIDEO, attr::VIDEO_2);
            (store, len)
        } else {
            let cached = params.attr2 & attr::CACHED_2 != 0;
            let memory = call.new_memory(params.size)?;
            let owner = self.owner(new.file)?;
            let (store, len) = self.memories.allocate_system(owner, params.size, memory, cached)?;
            // Location and coherency stay as asked, of contiguous 4 KiB pages.
            params.attr =
                params.attr & !attr::PAGE_SIZE_MASK & !attr::ALLOW_CONTIGUOUS | attr::PAGE_SIZE_4K;
            params.attr2 = if cached { attr::CACHED_2_OUT } else { attr::UNCACHED_2 };
            params.alignment = PAGE_SIZE;
            (store, len)
        };
        (params.size, params.limit, params.format) = (len, len - 1, attr::FORMAT);
        call.write_params(new.params, &params);
        Ok(Kind::Memory(store))
    }

    fn new_group(&mut self, call: &mut Call<'_>, new: New) -> Result<Kind, Stop> {
        let params: GroupParams = call.params(new.params)?;
        engine_kind(params.engine)?;
        if params.va_space != 0 {
            self.space_handle(new.file, new.root, params.va_space)?;
        }
        let number = self.next_group();
        Ok(Kind::Group { engine: params.engine, number, space: params.va_space })
    }

    /// Returns the number of a new group of the vGPU's channels.
    fn next_group(&mut self) -> u32 {
        self.last_group = self.last_group.wrapping_add(1);
        self.last_group
    }

    /// Checks that a handle is that of an address space.
    fn space_handle(&self, file: FileId, root: u32, handle: u32) -> Result<u32, Stop> {
        match self.clients.object(file, root, handle)?.kind {
            Kind::Space(_) => Ok(handle),
            _ => Err(Stop::Status(status::INVALID_OBJECT_HANDLE)),
        }
    }

    fn new_context_share(&mut self, call: &mut Call<'_>, new: New) -> Result<Kind, Stop> {
        let mut params: ContextShareParams = call.params(new.params)?;
        let space = self.space_handle(new.file, new.root, params.va_space)?;
        let group = self.clients.object(new.file, new.root, new.parent)?;
        if !matches!(group.kind, Kind::Group { .. }) {
            return Err(Stop::Status(status::INVALID_OBJECT_PARENT));
        }
        // The number of the subcontext: the last, as the driver gives to an asynchronous one.
        params.subcontext = 63;
        call.write_params(new.params, &params);
        Ok(Kind::ContextShare { space })
    }

    fn new_event(&mut self, call: &mut Call<'_>, new: New) -> Result<Kind, Stop> {
        let mut params: EventParams = call.params(new.params)?;
        let fd = i32::try_from(params.data).map_err(|_| Stop::INVALID)?;
        let file = call.file_of(fd)?;
        self.files.get(file)?;
        params.source = new.parent;
        call.write_params(new.params, &params);
        let parent = self.clients.object(new.file, new.root, new.parent)?;
        let source = match parent.kind {
            Kind::Engine(_) => EventSource::Exceptions { notifier: params.index & event::INDEX },
            _ => EventSource::Interrupts,
        };
        Ok(Kind::Event { file, source })
    }

    /// Creates the debugger of an object that kernels run through.
    fn new_debugger(&mut self, call: &mut Call<'_>, new: New) -> Result<Kind, Stop> {
        let params: DebuggerParams = call.params(new.params)?;
        if params.client != 0 && params.client != new.root {
            return Err(Stop::Status(status::INVALID_CLIENT));
        }
        let object = self.clients.object(new.file, new.root, params.object)?;
        match object.kind {
            Kind::Engine(engine::GRAPHICS) => Ok(Kind::Debugger { channel: object.parent }),
            _ => Err(Stop::Status(status::INVALID_OBJECT_HANDLE)),
        }
    }

    /// Returns the address space of a handle, and creates it the first time.
    pub(super) fn space(
        &mut self,
        gpu: &mut dyn Client,
        file: FileId,
        root: u32,
        handle: u32,
    ) -> Result<SpaceId, Stop> {
        match &mut self.clients.object_mut(file, root, handle)?.kind {
            Kind::Space(Some(space)) => Ok(*space),
            Kind::Space(space) => Ok(*space.insert(gpu.create_space()?)),
            _ => Err(Stop::Status(status::INVALID_OBJECT_HANDLE)),
        }
    }

    /// Returns the store of a memory object.
    pub(super) fn store(&self, file: FileId, root: u32, handle: u32) -> Result<StoreId, Stop> {
        match self.clients.object(file, root, handle)?.kind {
            Kind::Memory(store) => Ok(store),
            _ => Err(Stop::Status(status::INVALID_OBJECT_HANDLE)),
        }
    }

    fn new_channel(
        &mut self,
        gpu: &mut dyn Client,
        call: &mut Call<'_>,
        new: New,
    ) -> Result<Kind, Stop> {
        let mut bytes = call.block(new.params, self.layout.channel)?;
        bytes.resize(size_of::<ChannelParams>(), 0);
        let params = ChannelParams::read_from_bytes(&bytes).map_err(|_| Stop::INVALID)?;
        let New { file, root, .. } = new;
        let parent = self.clients.object(file, root, new.parent)?;
        let (engine, number, mut space) = match parent.kind {
            Kind::Group { engine, number, space } => (engine, number, space),
            // A channel without a group, which libcuda makes for the copies of a checkpoint.
            Kind::Passive if parent.class == class::DEVICE => (params.engine, self.next_group(), 0),
            _ => return Err(Stop::Status(status::INVALID_OBJECT_PARENT)),
        };
        if params.context_share != 0 {
            match self.clients.object(file, root, params.context_share)?.kind {
                Kind::ContextShare { space: shared } => space = shared,
                _ => return Err(Stop::Status(status::INVALID_OBJECT_HANDLE)),
            }
        } else if params.va_space != 0 {
            space = params.va_space;
        }
        let notifier = match params.error {
            0 => None,
            handle => Some(self.store(file, root, handle)?),
        };
        let userd = self.store(file, root, params.userd_memory[0])?;
        let at = params.userd_offset[0];
        let (page, offset) = (at / PAGE_SIZE * PAGE_SIZE, at % PAGE_SIZE);
        if !is_aligned(at, userd::BYTES) {
            return Err(Stop::Status(status::INVALID_ARGUMENT));
        }
        let pieces = self.memories.backing(gpu, userd, page, PAGE_SIZE)?;
        let piece = pieces.first().map(|(backing, _)| backing.later(offset));
        let userd = piece.ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        let space = self.space(gpu, file, root, space)?;
        let kind = engine_kind(engine)?;
        let copy_engine = (kind == EngineKind::Copy).then(|| engine - engine::COPY0);
        let second_runqueue = params.flags & flag::SECOND_RUNQUEUE != 0;
        let handle = gpu.create_channel(&ChannelSpec {
            engine: kind,
            gpfifo: GpuVa(params.gpfifo),
            gpfifo_entries: params.gpfifo_entries,
            userd,
            vector: 0,
            space,
            group: Some(number),
            placement: Placement { copy_engine, second_runqueue },
            preamble: None,
        })?;
        Ok(Kind::Channel { handle, engine, space, ended: false, notifier, failed: false })
    }

    /// Carries out `NV_ESC_RM_ALLOC_MEMORY`: makes pages of the program a memory object.
    pub(super) fn rm_alloc_memory(&mut self, call: &mut Call<'_>) -> Result<(), Stop> {
        let control = self.files.control_of(call.file())?;
        let argument: AllocMemory = call.read()?;
        if argument.class != class::OS_DESCRIPTOR {
            self.refusals.note("memory of class", label(classes::ROWS, argument.class));
            return Err(Stop::Status(status::INVALID_CLASS));
        }
        let AllocMemory { root, parent, object: handle, memory: address, .. } = argument;
        self.clients.check_new(control, root, parent, handle)?;
        let len = argument.limit.checked_add(1);
        let len = len.filter(|len| is_aligned(address | len, PAGE_SIZE) && *len > 0);
        let len = len.ok_or(Stop::Status(status::INVALID_ARGUMENT))?;
        let memory = call.share(Range { address, len })?;
        let store = self.memories.add(self.owner(control)?, memory, len)?;
        let kind = Kind::Memory(store);
        self.clients.insert(root, handle, Object { parent, class: class::OS_DESCRIPTOR, kind });
        Ok(())
    }
}

/// Creates a range of addresses, which programs only describe: mappings have fixed addresses.
fn new_virtual_memory(call: &mut Call<'_>, address: u64) -> Result<Kind, Stop> {
    let mut params: MemoryParams = call.params(address)?;
    (params.attr, params.attr2, params.format) = (attr::VIRTUAL, attr::VIDEO_2, attr::FORMAT);
    (params.range_lo, params.range_hi) = (params.offset, u32::MAX.into());
    (params.alignment, params.limit) = (2 << 20, params.size.saturating_sub(1));
    call.write_params(address, &params);
    Ok(Kind::Passive)
}

/// Returns the engine of a channel group for a number (`NV2080_ENGINE_TYPE_*`).
fn engine_kind(number: u32) -> Result<EngineKind, Stop> {
    match number {
        engine::GRAPHICS => Ok(EngineKind::Compute),
        copy if (engine::COPY0..engine::COPY0 + engine::COPY_ENGINES).contains(&copy) => {
            Ok(EngineKind::Copy)
        }
        _ => Err(Stop::Status(status::INVALID_ARGUMENT)),
    }
}

/// Attributes of memory (`NVOS32_ATTR_*`, `NVOS32_ATTR2_*`), as the driver answers them.
mod attr {
    /// Video memory, in contiguous huge pages.
    pub const VIDEO: u32 = 0x1180_0000;
    /// Addresses for huge pages.
    pub const VIRTUAL: u32 = 0x1600_0000;
    /// Format of memory without one, as answered.
    pub const FORMAT: u32 = 6;
    /// Huge pages of 2 MiB, not cached elsewhere.
    pub const VIDEO_2: u32 = 0x0010_0005;
    /// `NVOS32_ATTR_PAGE_SIZE`.
    pub const PAGE_SIZE_MASK: u32 = 3 << 23;
    /// `NVOS32_ATTR_PAGE_SIZE_4KB`.
    pub const PAGE_SIZE_4K: u32 = 1 << 23;
    /// Upper bit of `NVOS32_ATTR_PHYSICALITY`: contiguous memory is allowed, too.
    pub const ALLOW_CONTIGUOUS: u32 = 1 << 28;
    /// `NVOS32_ATTR2_GPU_CACHEABLE_YES`, as asked.
    pub const CACHED_2: u32 = 4;
    /// The same, as answered.
    pub const CACHED_2_OUT: u32 = 5;
    /// `NVOS32_ATTR2_GPU_CACHEABLE_NO`, as answered.
    pub const UNCACHED_2: u32 = 9;
}
