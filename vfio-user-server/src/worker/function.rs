//! The vGPU's device model, as the protocol's [`Device`].

use anyhow::Context;
use mdev_core::device::{AccessError, REGIONS, RegionEvent, VirtualFunction};
use mdev_core::ids::GuestPa;
use mdev_core::irq::{IrqError, IrqIndex};
use mdev_core::mem::{DmaAccess, MemError};
use vfio_bindings::bindings::vfio;

use crate::device::{Area, Device, IoEventFd};
use crate::dma::{DmaMap, DmaUnmap};
use crate::errno::Errno;
use crate::irq::{Irq, IrqAction, IrqCommand, IrqLines};
use crate::layout::Layout;

/// A vGPU behind a vfio-user socket.
#[derive(Debug)]
pub struct Function {
    inner: VirtualFunction,
    layout: Layout,
    unmask_event_changed: bool,
}

impl Function {
    /// Serves `function`.
    pub fn new(function: VirtualFunction) -> anyhow::Result<Self> {
        let layout = layout(&function).context("Its regions cannot be offered")?;
        Ok(Self { inner: function, layout, unmask_event_changed: false })
    }

    /// The device model.
    pub fn inner(&self) -> &VirtualFunction {
        &self.inner
    }

    /// The device model.
    pub fn inner_mut(&mut self) -> &mut VirtualFunction {
        &mut self.inner
    }

    /// Whether the eventfd that unmasks INTx was replaced since this was last asked.
    pub fn take_unmask_event_changed(&mut self) -> bool {
        std::mem::take(&mut self.unmask_event_changed)
    }
}

impl Device for Function {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        self.inner.region_read(index, offset, data).map_err(Errno::from)
    }

    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.inner.region_write(index, offset, data).map_err(Errno::from)
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let mut access = DmaAccess::empty();
        access.set(DmaAccess::READ, map.readable);
        access.set(DmaAccess::WRITE, map.writable);
        let file = map.fd.map(|fd| (fd, map.offset));
        self.inner.dma_map(GuestPa(map.address), map.size, access, file).map_err(Errno::from)
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        match unmap {
            DmaUnmap::Range { address, size } => {
                self.inner.dma_unmap(GuestPa(address), size).map_err(Errno::from)
            }
            DmaUnmap::All => {
                self.inner.dma_unmap_all();
                Ok(())
            }
        }
    }

    fn set_irqs(&mut self, index: u32, command: IrqCommand<'_>) -> Result<(), Errno> {
        let index = IrqIndex::from_number(index).ok_or(Errno::EINVAL)?;
        match command {
            IrqCommand::Disable => {
                self.unmask_event_changed = true;
                self.inner.irq_disable(index);
            }
            IrqCommand::Assign { action: IrqAction::Trigger, start, eventfds } => {
                let events = eventfds.into_iter().map(Some).collect();
                self.inner.irq_set_triggers(index, start, events)?;
            }
            IrqCommand::Unassign { action: IrqAction::Trigger, start, count } => {
                let none = (0..count).map(|_| None).collect();
                self.inner.irq_set_triggers(index, start, none)?;
            }
            IrqCommand::Assign { action: IrqAction::Unmask, start: 0, eventfds } => {
                self.unmask_event_changed = true;
                self.inner.irq_set_unmask_event(index, eventfds.into_iter().next())?;
            }
            IrqCommand::Unassign { action: IrqAction::Unmask, .. } => {
                self.unmask_event_changed = true;
                self.inner.irq_set_unmask_event(index, None)?;
            }
            IrqCommand::Assign { .. } | IrqCommand::Unassign { .. } => return Err(Errno::ENOTTY),
            IrqCommand::Perform { action, lines } => {
                let which = chosen(&lines);
                match action {
                    IrqAction::Trigger => self.inner.irq_fire(index, lines.start, &which)?,
                    IrqAction::Mask => self.inner.irq_mask(index, lines.start, &which, true)?,
                    IrqAction::Unmask => {
                        self.inner.irq_mask(index, lines.start, &which, false)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.inner.reset();
        Ok(())
    }

    fn detach(&mut self) {
        self.unmask_event_changed = true;
        self.inner.detach();
    }
}

/// The function's regions and interrupts, in the protocol's words.
fn layout(function: &VirtualFunction) -> anyhow::Result<Layout> {
    let mut layout = Layout::builder();
    for index in 0..REGIONS {
        let Some(info) = function.region(index).filter(|info| info.size > 0) else { continue };
        layout = match info.mapping {
            None => layout.trapped(index, info.size),
            Some(mapping) => {
                let part = Area { offset: 0, size: mapping.len };
                let areas = if mapping.len == info.size { Vec::new() } else { vec![part] };
                let (fd, offset) = (mapping.fd.try_clone_to_owned()?, mapping.offset);
                layout.partly_mapped(index, info.size, fd, offset, areas)
            }
        };
        if let Some(RegionEvent { offset, len, fd }) = function.region_event(index) {
            let fd = fd.try_clone_to_owned()?;
            let event = IoEventFd { offset, size: len, flags: 0, datamatch: 0, fd };
            layout = layout.signal(index, event);
        }
    }
    let irqs = (0..).map_while(|index| Some((index, function.irq_info(index)?)));
    for (index, info) in irqs.filter(|(_, info)| info.count > 0) {
        let flags = [
            (info.eventfd, vfio::VFIO_IRQ_INFO_EVENTFD),
            (info.maskable, vfio::VFIO_IRQ_INFO_MASKABLE),
            (info.automasked, vfio::VFIO_IRQ_INFO_AUTOMASKED),
            (info.no_resize, vfio::VFIO_IRQ_INFO_NORESIZE),
        ];
        let flags = flags.iter().filter(|(set, _)| *set).fold(0, |all, (_, flag)| all | flag);
        layout = layout.irq(index, Irq { count: info.count, flags });
    }
    Ok(layout.build()?)
}

/// A flag for each interrupt of the range. (The session has bounded the range by the index's count.)
fn chosen(lines: &IrqLines<'_>) -> Vec<bool> {
    let mut which = vec![false; lines.count as usize];
    for line in lines.iter() {
        if let Some(flag) = which.get_mut((line - lines.start) as usize) {
            *flag = true;
        }
    }
    which
}

impl From<AccessError> for Errno {
    fn from(_: AccessError) -> Self {
        Self::EINVAL
    }
}

impl From<MemError> for Errno {
    fn from(error: MemError) -> Self {
        match error {
            MemError::BadRange { .. } => Self::EINVAL,
            MemError::Overlap { .. } => Self::EEXIST,
            MemError::NotMapped { .. } => Self::ENOENT,
            MemError::TooMany(_) => Self::ENOSPC,
        }
    }
}

impl From<IrqError> for Errno {
    fn from(error: IrqError) -> Self {
        match error {
            IrqError::OutOfRange { .. } => Self::EINVAL,
            IrqError::NotMaskable(_) => Self::ENOTTY,
        }
    }
}
