//! One client of the driver, and its objects: each is freed when it is dropped, children first.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::rm::{Node, Rm, RmError, call};
use super::sys::abi;
use super::sys::numbers::{class, control, flag};
use super::version::Layout;
use crate::mem::Mapping;

/// The first handle that we choose. The driver chooses its own from elsewhere.
const FIRST_HANDLE: u32 = 0x5e55_0001;

/// Descriptors of the driver, and the client that belongs to them. When the descriptors are closed the driver frees
/// whatever is left of it.
pub struct Session {
    rm: Arc<dyn Rm>,
    layout: Layout,
    control: OwnedFd,
    gpu: OwnedFd,
    minor: u32,
    root: u32,
    next: AtomicU32,
    /// Everything of it was freed at once.
    ended: AtomicBool,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("minor", &self.minor).finish_non_exhaustive()
    }
}

impl Session {
    /// Makes a client for the GPU with that minor number.
    pub fn open(rm: Arc<dyn Rm>, layout: Layout, minor: u32) -> Result<Arc<Self>, RmError> {
        let control = rm.open(Node::Control).map_err(RmError::os("NVIDIA's driver"))?;
        let gpu = rm.open(Node::Gpu(minor)).map_err(RmError::os("NVIDIA's driver"))?;
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
            next: AtomicU32::new(FIRST_HANDLE),
            ended: AtomicBool::new(false),
        }))
    }

    /// The client's own handle.
    pub fn root(&self) -> u32 {
        self.root
    }

    /// What this driver's structures look like.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    fn handle(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes an object under `parent`, or under the client. `params` as the class has them; none is fine for some.
    pub fn alloc(
        self: &Arc<Self>,
        parent: Option<&Arc<Object>>,
        class: u32,
        params: Option<&mut [u8]>,
        what: &str,
    ) -> Result<Arc<Object>, RmError> {
        let parent_handle = parent.map_or(self.root, |parent| parent.handle);
        let handle = self.handle();
        let mut alloc = abi::Alloc {
            root: self.root,
            parent: parent_handle,
            object: handle,
            class,
            // The driver takes 0 for "as long as the class has them".
            params_bytes: 0,
            ..Default::default()
        };
        call(&*self.rm, self.control.as_fd(), &mut alloc, params, what)?;
        Ok(self.object(parent, handle))
    }

    fn object(self: &Arc<Self>, parent: Option<&Arc<Object>>, handle: u32) -> Arc<Object> {
        Arc::new(Object { session: self.clone(), parent: parent.cloned(), handle })
    }

    /// Asks something of the client itself.
    pub fn control_root<P: IntoBytes + FromBytes>(
        &self,
        command: u32,
        params: &mut P,
    ) -> Result<(), RmError> {
        self.control(self.root, command, params.as_mut_bytes())
    }

    fn control(&self, object: u32, command: u32, params: &mut [u8]) -> Result<(), RmError> {
        let mut argument = abi::Control {
            client: self.root,
            object,
            command,
            params_bytes: params.len() as u32,
            ..Default::default()
        };
        let what = format!("{command:#x}");
        call(&*self.rm, self.control.as_fd(), &mut argument, Some(params), &what)
    }

    /// Makes memory of the pages of a mapping, which stay pinned until it is freed.
    pub fn register(
        self: &Arc<Self>,
        device: &Arc<Object>,
        mapping: &Mapping,
    ) -> Result<Arc<Object>, RmError> {
        let handle = self.handle();
        let mut argument = abi::AllocMemory {
            root: self.root,
            parent: device.handle,
            object: handle,
            class: class::OS_DESCRIPTOR,
            flags: flag::OS_DESCRIPTOR,
            memory: mapping.address(),
            limit: mapping.len() - 1,
            fd: -1,
            ..Default::default()
        };
        call(&*self.rm, self.gpu.as_fd(), &mut argument, None, "guest memory")?;
        Ok(self.object(Some(device), handle))
    }

    /// Prepares a fresh descriptor so that mapping `len` bytes of it, from offset 0, maps `memory`.
    ///
    /// The descriptor belongs to no client: it can be handed out, and whoever has it can map that memory and do nothing
    /// else with it.
    pub fn aperture(
        &self,
        device: &Object,
        memory: &Object,
        node: Node,
        len: u64,
        flags: u32,
    ) -> Result<OwnedFd, RmError> {
        let fd = self.rm.open(node).map_err(RmError::os("NVIDIA's driver"))?;
        let mut argument = abi::MapMemory {
            client: self.root,
            device: device.handle,
            memory: memory.handle,
            length: len,
            flags,
            fd: fd.as_raw_fd(),
            ..Default::default()
        };
        call(&*self.rm, self.control.as_fd(), &mut argument, None, "")?;
        Ok(fd)
    }

    /// The GPU's own device node.
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
        let (client, device, dma) = (self.root, space.device.handle, space.range.handle);
        let (memory, length, flags) = (memory.handle, len, flags | flag::FIXED_VA);
        macro_rules! map {
            ($form:ty) => {{
                let mut argument = <$form>::default();
                (argument.client, argument.device, argument.dma) = (client, device, dma);
                (argument.memory, argument.offset, argument.length) = (memory, offset, length);
                (argument.flags, argument.va) = (flags, va);
                call(&*self.rm, self.control.as_fd(), &mut argument, None, "")?;
                argument.va
            }};
        }
        let mapped = if self.layout.map_dma == size_of::<abi::MapDma570>() {
            map!(abi::MapDma570)
        } else {
            map!(abi::MapDma)
        };
        if mapped == va {
            return Ok(());
        }
        let error = io::Error::other(format!("mapped at {mapped:#x} instead of {va:#x}"));
        self.unmap_dma(space, memory, mapped, 0)?;
        Err(RmError::Os { what: "RM_MAP_MEMORY_DMA".into(), error })
    }

    /// Unmaps `size` bytes at `va`, or with 0 the mapping that begins there.
    pub fn unmap_dma(
        &self,
        space: &AddressSpace,
        memory: u32,
        va: u64,
        size: u64,
    ) -> Result<(), RmError> {
        let mut argument = abi::UnmapDma {
            client: self.root,
            device: space.device.handle,
            dma: space.range.handle,
            memory,
            va,
            size,
            ..Default::default()
        };
        call(&*self.rm, self.control.as_fd(), &mut argument, None, "")
    }

    /// A descriptor that polls readable whenever the GPU raises `event`.
    pub fn event(
        self: &Arc<Self>,
        subdevice: &Arc<Object>,
        event: u32,
    ) -> Result<(Arc<Object>, OwnedFd), RmError> {
        let fd = self.rm.open(Node::Event).map_err(RmError::os("NVIDIA's driver"))?;
        let mut argument = abi::AllocOsEvent {
            client: self.root,
            fd: fd.as_raw_fd().cast_unsigned(),
            ..Default::default()
        };
        call(&*self.rm, fd.as_fd(), &mut argument, None, "")?;
        let mut params = abi::EventParams {
            client: self.root,
            source: subdevice.handle,
            class: class::OS_EVENT,
            index: event,
            data: u64::from(fd.as_raw_fd().cast_unsigned()),
        };
        let object =
            self.alloc(Some(subdevice), class::OS_EVENT, Some(params.as_mut_bytes()), "event")?;
        let mut ask = abi::SetNotification {
            event: event & 0xffff,
            action: super::sys::numbers::event::REPEAT,
            ..Default::default()
        };
        object.session.control(subdevice.handle, control::SET_NOTIFICATION, ask.as_mut_bytes())?;
        Ok((object, fd))
    }

    /// Frees everything at once, whatever it is doing. Later calls fail.
    pub fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel)
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

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
    }
}

/// A GPU virtual address space, and the range of it that mappings are made in.
#[derive(Debug)]
pub struct AddressSpace {
    // Freed in this order.
    /// All of its addresses.
    pub range: Arc<Object>,
    /// Its page tables.
    pub space: Arc<Object>,
    /// The device that it is of.
    pub device: Arc<Object>,
}

/// An object of the driver's. It keeps its parent alive, so children are always freed first.
pub struct Object {
    session: Arc<Session>,
    parent: Option<Arc<Object>>,
    handle: u32,
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Object({:#x})", self.handle)
    }
}

impl Object {
    /// Its handle.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Asks something of it.
    pub fn control<P: IntoBytes + FromBytes + Immutable>(
        &self,
        command: u32,
        params: &mut P,
    ) -> Result<(), RmError> {
        self.control_bytes(command, params.as_mut_bytes())
    }

    /// Asks something of it, with parameters whose length depends on the driver's series.
    pub fn control_bytes(&self, command: u32, params: &mut [u8]) -> Result<(), RmError> {
        self.session.control(self.handle, command, params)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if self.session.ended.load(Ordering::Acquire) {
            return;
        }
        let parent = self.parent.as_ref().map_or(self.session.root, |parent| parent.handle);
        if let Err(error) = self.session.free(parent, self.handle) {
            log::debug!("{error}");
        }
    }
}
