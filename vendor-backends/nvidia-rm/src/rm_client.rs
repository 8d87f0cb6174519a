//! Client of the resource manager.
//!
//! * `object`: an object of the client, which is freed when it is dropped

mod object;

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use zerocopy::{FromBytes, IntoBytes};

pub use self::object::{AddressSpace, Object};
use crate::abi::{self, Call};
use crate::numbers::{class, control, flag, status};
use crate::rm::{Node, Rm, RmError, call};
use crate::version::Layout;

/// First handle of an object. The driver chooses handles of clients from another range.
pub const FIRST_HANDLE: u32 = 0x5e55_0001;

/// Number of the file for exceptions. The driver knows a client's files for events by such numbers,
/// and does not look them up among the caller's descriptors: an adopting process has others.
pub const EXCEPTION_FILE: u32 = 1 << 30;

/// Record of the handles of a client, for the process that adopts the client.
pub trait HandleRecord: Send + Sync {
    /// Notes that an object is about to be made with a handle.
    fn note_handle(&self, handle: u32);
}

/// What a process needs to adopt the client of another one.
#[derive(Debug)]
pub struct AdoptedClient {
    /// Open file of the driver that the client belongs to.
    pub control: OwnedFd,
    /// Open file of the GPU, registered with the client.
    pub gpu: OwnedFd,
    /// Number of the GPU's device node.
    pub minor: u32,
    /// Handle of the client.
    pub root: u32,
    /// Handle of the next object.
    pub next_handle: u32,
}

/// Client of the resource manager. The driver frees all of its objects when its descriptors are
/// closed, in whichever process they are.
///
/// A client that was adopted may repeat calls: a mapping that exists is made anew, and what does
/// not exist any more counts as freed or unmapped.
pub struct RmClient {
    rm: Arc<dyn Rm>,
    layout: Layout,
    control: OwnedFd,
    gpu: OwnedFd,
    minor: u32,
    root: u32,
    next_handle: AtomicU32,
    /// The client was freed with all of its objects.
    freed: AtomicBool,
    /// Another process made the client. Calls may repeat what that process has done.
    adopted: bool,
    /// This process frees the client and its objects when it drops them.
    owned: AtomicBool,
    /// Record of the handles for the next process.
    handle_record: OnceLock<Arc<dyn HandleRecord>>,
}

impl fmt::Debug for RmClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RmClient").field("minor", &self.minor).finish_non_exhaustive()
    }
}

impl RmClient {
    /// Creates a client for the GPU with a minor number.
    pub fn open(rm: Arc<dyn Rm>, layout: Layout, minor: u32) -> Result<Arc<Self>, RmError> {
        let control = rm.open(Node::Control).map_err(RmError::open)?;
        let gpu = rm.open(Node::Gpu(minor)).map_err(RmError::open)?;
        let mut register = abi::RegisterFd { control: control.as_raw_fd() };
        call(&*rm, gpu.as_fd(), &mut register, None, "")?;
        let mut alloc = abi::Alloc { class: class::CLIENT, ..Default::default() };
        call(&*rm, control.as_fd(), &mut alloc, None, "client")?;
        Ok(Arc::new(Self {
            rm,
            layout,
            control,
            gpu,
            minor,
            root: alloc.object,
            next_handle: AtomicU32::new(FIRST_HANDLE),
            freed: AtomicBool::new(false),
            adopted: false,
            owned: AtomicBool::new(true),
            handle_record: OnceLock::new(),
        }))
    }

    /// Adopts the client of a process that has ended, by its open files. Until
    /// [`Self::own`] is called, drops free nothing: a process that cannot continue leaves the
    /// client to another one.
    pub fn adopt(rm: Arc<dyn Rm>, layout: Layout, client: AdoptedClient) -> Arc<Self> {
        let AdoptedClient { control, gpu, minor, root, next_handle } = client;
        Arc::new(Self {
            rm,
            layout,
            control,
            gpu,
            minor,
            root,
            next_handle: AtomicU32::new(next_handle),
            freed: AtomicBool::new(false),
            adopted: true,
            owned: AtomicBool::new(false),
            handle_record: OnceLock::new(),
        })
    }

    /// Frees what is dropped from now on.
    pub fn own(&self) {
        self.owned.store(true, Ordering::Release);
    }

    /// Leaves the client's objects to another process.
    #[cfg(feature = "test-util")]
    pub fn disown(&self) {
        self.owned.store(false, Ordering::Release);
    }

    /// Returns whether objects are to be freed when they are dropped.
    pub fn frees_objects(&self) -> bool {
        self.owned.load(Ordering::Acquire) && !self.is_freed()
    }

    /// Returns an object that an earlier process has made.
    pub fn adopt_object(
        self: &Arc<Self>,
        parent: Option<&Arc<Object>>,
        handle: u32,
    ) -> Arc<Object> {
        self.object(parent, handle)
    }

    /// Returns the open files of the client: of the driver, and of the GPU.
    pub fn files(&self) -> [BorrowedFd<'_>; 2] {
        [self.control.as_fd(), self.gpu.as_fd()]
    }

    /// Returns the handle of the next object.
    pub fn next_handle(&self) -> u32 {
        self.next_handle.load(Ordering::Relaxed)
    }

    /// Returns whether the client was freed.
    pub fn is_freed(&self) -> bool {
        self.freed.load(Ordering::Acquire)
    }

    /// Returns the client's handle.
    pub fn root(&self) -> u32 {
        self.root
    }

    /// Returns the layout of the driver's structures.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    fn new_handle(&self) -> u32 {
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        if let Some(record) = self.handle_record.get() {
            record.note_handle(handle);
        }
        handle
    }

    /// Records handles before objects are made with them.
    pub fn record_handles(&self, record: Arc<dyn HandleRecord>) {
        // Set once.
        let _ = self.handle_record.set(record);
    }

    /// Frees what the earlier process has made and not recorded, up to a handle: the last first,
    /// since objects depend on earlier ones. Requests that made them are repeated with the same
    /// handles.
    pub fn free_unrecorded(&self, last: u32) {
        for handle in (self.next_handle()..=last).rev() {
            // Objects below it, or the process itself, may have taken it along.
            if let Err(error) = self.free(self.root, handle) {
                log::debug!("{error}");
            }
        }
    }

    /// Allocates an object below `parent`, or below the client. `detail` names the object in
    /// errors.
    pub fn alloc(
        self: &Arc<Self>,
        parent: Option<&Arc<Object>>,
        class: u32,
        params: Option<&mut [u8]>,
        detail: &str,
    ) -> Result<Arc<Object>, RmError> {
        let parent_handle = parent.map_or(self.root, |parent| parent.handle());
        let handle = self.new_handle();
        let mut alloc = abi::Alloc {
            root: self.root,
            parent: parent_handle,
            object: handle,
            class,
            // 0 stands for the size that the class has.
            params_bytes: 0,
            ..Default::default()
        };
        call(&*self.rm, self.control.as_fd(), &mut alloc, params, detail)?;
        Ok(self.object(parent, handle))
    }

    fn object(self: &Arc<Self>, parent: Option<&Arc<Object>>, handle: u32) -> Arc<Object> {
        Object::new(self.clone(), parent.cloned(), handle)
    }

    /// Calls a control of the client itself.
    pub fn control_root<P: IntoBytes + FromBytes>(
        &self,
        command: u32,
        params: &mut P,
    ) -> Result<(), RmError> {
        self.control(self.root, command, params.as_mut_bytes())
    }

    /// Calls a control of the client itself, with parameters as bytes.
    pub fn control_root_bytes(&self, command: u32, params: &mut [u8]) -> Result<(), RmError> {
        self.control(self.root, command, params)
    }

    fn control(&self, object: u32, command: u32, params: &mut [u8]) -> Result<(), RmError> {
        let mut argument = abi::Control {
            client: self.root,
            object,
            command,
            params_bytes: params.len() as u32,
            ..Default::default()
        };
        let detail = format!("{command:#x}");
        call(&*self.rm, self.control.as_fd(), &mut argument, Some(params), &detail)
    }

    /// Creates a memory object from pages of this process, which are pinned until it is freed. The
    /// caller keeps them mapped until then.
    pub fn register(
        self: &Arc<Self>,
        device: &Arc<Object>,
        addresses: Range<u64>,
    ) -> Result<Arc<Object>, RmError> {
        let handle = self.new_handle();
        let mut argument = abi::AllocMemory {
            root: self.root,
            parent: device.handle(),
            object: handle,
            class: class::OS_DESCRIPTOR,
            flags: flag::OS_DESCRIPTOR,
            memory: addresses.start,
            limit: addresses.end.saturating_sub(addresses.start).saturating_sub(1),
            fd: -1,
            ..Default::default()
        };
        call(&*self.rm, self.gpu.as_fd(), &mut argument, None, "guest memory")?;
        Ok(self.object(Some(device), handle))
    }

    /// Opens a descriptor with which `mmap` of `len` bytes at offset 0 maps `memory`.
    ///
    /// The descriptor belongs to no client. A process that receives it can only map this memory.
    pub fn aperture(
        &self,
        device: &Object,
        memory: &Object,
        node: Node,
        len: u64,
        flags: u32,
    ) -> Result<OwnedFd, RmError> {
        let fd = self.rm.open(node).map_err(RmError::open)?;
        let mut argument = abi::MapMemory {
            client: self.root,
            device: device.handle(),
            memory: memory.handle(),
            length: len,
            flags,
            fd: fd.as_raw_fd(),
            ..Default::default()
        };
        call(&*self.rm, self.control.as_fd(), &mut argument, None, "")?;
        Ok(fd)
    }

    /// Returns the GPU's device node.
    pub fn gpu_node(&self) -> Node {
        Node::Gpu(self.minor)
    }

    /// Maps `len` bytes of `memory` at a GPU virtual address.
    pub fn map_dma(
        &self,
        space: &AddressSpace,
        memory: &Object,
        offset: u64,
        len: u64,
        va: u64,
        flags: u32,
    ) -> Result<(), RmError> {
        let mapping = abi::MapDma {
            client: self.root,
            device: space.device.handle(),
            dma: space.range.handle(),
            memory: memory.handle(),
            offset,
            length: len,
            flags: flags | flag::FIXED_VA,
            va,
            ..Default::default()
        };
        let mapped = match self.call_map_dma(&mapping) {
            // An earlier process may have made the mapping, and not recorded it.
            Err(error) if self.adopted && error.status() == Some(status::NO_MEMORY) => {
                self.unmap_dma(space, memory.handle(), va, 0)?;
                self.call_map_dma(&mapping)?
            }
            mapped => mapped?,
        };
        if mapped == va {
            return Ok(());
        }
        let error = io::Error::other(format!("Mapped at {mapped:#x} instead of {va:#x}"));
        self.unmap_dma(space, memory.handle(), mapped, 0)?;
        Err(RmError::Os { call: abi::MapDma::NAME.into(), error })
    }

    /// Maps all `len` bytes of `memory`, through which kernels launch others, at a GPU virtual
    /// address. Drivers before series 580 cannot.
    pub fn map_launch_region(
        &self,
        space: &AddressSpace,
        memory: &Object,
        len: u64,
        va: u64,
    ) -> Result<(), RmError> {
        if self.layout.map_dma != size_of::<abi::MapDma>() {
            let call = abi::MapDma::NAME.into();
            return Err(RmError::Status { call, status: status::NOT_SUPPORTED });
        }
        let mut argument = abi::MapDma {
            client: self.root,
            device: space.device.handle(),
            dma: space.range.handle(),
            memory: memory.handle(),
            length: len,
            flags: flag::FIXED_VA | flag::KIND_OVERRIDE,
            kind: flag::KIND_LAUNCH_REGION,
            va,
            ..Default::default()
        };
        call(&*self.rm, self.control.as_fd(), &mut argument, None, "")
    }

    /// Makes a mapping with the form of this driver. Returns the GPU virtual address.
    fn call_map_dma(&self, mapping: &abi::MapDma) -> Result<u64, RmError> {
        let (rm, fd) = (&*self.rm, self.control.as_fd());
        if self.layout.map_dma == size_of::<abi::MapDma570>() {
            let mut argument = abi::MapDma570::from(*mapping);
            return call(rm, fd, &mut argument, None, "").map(|()| argument.va);
        }
        let mut argument = *mapping;
        call(rm, fd, &mut argument, None, "").map(|()| argument.va)
    }

    /// Unmaps `size` bytes at `va`, or with size 0 the mapping that begins there.
    pub fn unmap_dma(
        &self,
        space: &AddressSpace,
        memory: u32,
        va: u64,
        size: u64,
    ) -> Result<(), RmError> {
        let mut argument = abi::UnmapDma {
            client: self.root,
            device: space.device.handle(),
            dma: space.range.handle(),
            memory,
            va,
            size,
            ..Default::default()
        };
        match call(&*self.rm, self.control.as_fd(), &mut argument, None, "") {
            // An earlier process may have removed the mapping, and not recorded that.
            Err(RmError::Status { status, .. }) if self.adopted => {
                log::debug!("Nothing is unmapped at {va:#x}: status {status:#x}");
                Ok(())
            }
            done => done,
        }
    }

    /// Returns an event object, and a descriptor that polls readable when the GPU raises `event`.
    pub fn event(
        self: &Arc<Self>,
        subdevice: &Arc<Object>,
        event: u32,
    ) -> Result<(Arc<Object>, OwnedFd), RmError> {
        let fd = self.rm.open(Node::Event).map_err(RmError::open)?;
        let number = fd.as_raw_fd().cast_unsigned();
        self.register_event_file(fd.as_fd(), number)?;
        let object = self.alloc_event(subdevice, event, number)?;
        let mut notification = abi::SetNotification {
            event: event & crate::numbers::event::INDEX,
            action: crate::numbers::event::REPEAT,
            ..Default::default()
        };
        self.control(subdevice.handle(), control::SET_NOTIFICATION, notification.as_mut_bytes())?;
        Ok((object, fd))
    }

    /// Opens the file for exceptions, and registers it as [`EXCEPTION_FILE`].
    pub fn exception_file(&self) -> Result<OwnedFd, RmError> {
        let fd = self.rm.open(Node::Event).map_err(RmError::open)?;
        self.register_event_file(fd.as_fd(), EXCEPTION_FILE)?;
        Ok(fd)
    }

    /// Registers a file for events by a number. Fails if the client has a file with this number.
    pub fn register_event_file(&self, fd: BorrowedFd<'_>, number: u32) -> Result<(), RmError> {
        let mut argument =
            abi::AllocOsEvent { client: self.root, fd: number, ..Default::default() };
        call(&*self.rm, fd, &mut argument, None, "")
    }

    /// Creates an event object of `source` for a registered file, which polls readable when
    /// `source` raises `event`. Without [`WITHOUT_DATA`](crate::numbers::event::WITHOUT_DATA),
    /// [`Self::take_event`] then returns which object it was.
    pub fn alloc_event(
        self: &Arc<Self>,
        source: &Arc<Object>,
        event: u32,
        file: u32,
    ) -> Result<Arc<Object>, RmError> {
        let mut params = abi::EventParams {
            client: self.root,
            source: source.handle(),
            class: class::OS_EVENT,
            index: event,
            data: u64::from(file),
        };
        self.alloc(Some(source), class::OS_EVENT, Some(params.as_mut_bytes()), "event")
    }

    /// Takes an event with data from a descriptor. Fails if there is none.
    pub fn take_event(&self, fd: BorrowedFd<'_>) -> Result<abi::EventData, RmError> {
        let mut data = abi::EventData::default();
        let mut argument = abi::GetEventData::default();
        call(&*self.rm, fd, &mut argument, Some(data.as_mut_bytes()), "")?;
        Ok(data)
    }

    /// Frees the client with all of its objects. Later calls fail.
    pub fn free_all(&self) {
        if !self.freed.swap(true, Ordering::AcqRel)
            && let Err(error) = self.free(self.root, self.root)
        {
            log::warn!("{error}");
        }
    }

    fn free(&self, parent: u32, object: u32) -> Result<(), RmError> {
        let mut argument = abi::Free { root: self.root, parent, object, ..Default::default() };
        call(&*self.rm, self.control.as_fd(), &mut argument, None, "")
    }
}

impl Drop for RmClient {
    fn drop(&mut self) {
        if self.frees_objects() {
            self.free_all();
        }
    }
}
