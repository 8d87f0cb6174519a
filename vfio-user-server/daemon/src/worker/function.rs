//! Device model of the vGPU, as a [`Device`] of the vfio-user server.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::Context;
use mdev_core::device::{AccessError, Handover, REGIONS, RegionEvent, VirtualFunction};
use mdev_core::ids::GuestPa;
use mdev_core::mem::{DmaAccess, MemError};
use vfio_bindings::bindings::vfio;

use pci_registers::interrupts::IrqEvent;
use vfio_user_server::device::{Area, Device, IoEventFd, pci};
use vfio_user_server::dma::{DmaMap, DmaUnmap};
use vfio_user_server::errno::Errno;
use vfio_user_server::irq::{Irq, IrqAction, IrqCommand};
use vfio_user_server::journal::{Journal, SessionRecord};
use vfio_user_server::layout::Layout;
use vfio_user_server::migration::Migration;

use super::journal::descriptors::Key;
use super::journal::{ProgramsRecorder, Recorder};
use super::migration::Transfer;

/// Device model with its vfio-user layout.
#[derive(Debug)]
pub struct Function {
    inner: VirtualFunction,
    layout: Layout,
    unmask_event_changed: bool,
    mdev_type: String,
    /// What the client reads or writes by migration messages.
    pub(super) transfer: Transfer,
    /// State of the vGPU while its VM's process is replaced.
    pub(super) handover: Option<Handover>,
    /// Journal for the adopting worker, if there can be one.
    pub(super) recorder: Option<Recorder>,
}

impl Function {
    /// Wraps a device model of a vGPU type.
    pub fn new(function: VirtualFunction, mdev_type: &str) -> anyhow::Result<Self> {
        let layout = layout(&function).context("Cannot describe its regions")?;
        let mdev_type = mdev_type.to_owned();
        let transfer = Transfer::None;
        Ok(Self {
            inner: function,
            layout,
            unmask_event_changed: false,
            mdev_type,
            transfer,
            handover: None,
            recorder: None,
        })
    }

    /// Returns the recorder, if there is one, and what it records.
    pub(super) fn recording(&mut self) -> (Option<&mut Recorder>, &VirtualFunction) {
        (self.recorder.as_mut(), &self.inner)
    }

    /// Returns the recorder of the host's programs, if there is one.
    pub(super) fn programs_recorder(&mut self) -> Option<&mut ProgramsRecorder> {
        self.recorder.as_mut().map(Recorder::programs)
    }

    /// Returns the vGPU's type.
    pub fn mdev_type(&self) -> &str {
        &self.mdev_type
    }

    /// Records the state from now on. `rewrites_answer` tells whether the answer to the last
    /// mailbox request is to be written again.
    pub fn adopt_recording(&mut self, recorder: Recorder, rewrites_answer: bool) {
        self.recorder = Some(recorder);
        self.inner.answer_later();
        if rewrites_answer {
            self.inner.write_answer();
        } else {
            self.inner.drop_answer();
        }
    }

    /// Records the state.
    pub fn commit(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.commit(&self.inner);
        }
    }

    /// Lets the control queue wait for the message at hand, which changes guest memory.
    fn hold_queue(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.hold_queue(&self.inner);
        }
    }

    /// Notes that a VM attaches. Its regions are not those of an earlier VM.
    pub fn attach(&mut self) -> anyhow::Result<()> {
        // The new process of a VM gets what the old one has.
        if self.handover.is_none() {
            self.inner.attach();
        }
        self.describe()
    }

    /// Describes the regions anew: their files change when a VM leaves.
    fn describe(&mut self) -> anyhow::Result<()> {
        self.layout = layout(&self.inner).context("Cannot describe its regions")?;
        Ok(())
    }

    /// Returns the device model.
    pub fn inner(&self) -> &VirtualFunction {
        &self.inner
    }

    /// Returns the device model.
    pub fn inner_mut(&mut self) -> &mut VirtualFunction {
        &mut self.inner
    }

    /// Notes that the INTx unmask eventfd may have been replaced.
    pub(super) fn note_unmask_event(&mut self) {
        self.unmask_event_changed = true;
    }

    /// Returns whether the INTx unmask eventfd may have been replaced since the last call.
    pub fn take_unmask_event_changed(&mut self) -> bool {
        std::mem::take(&mut self.unmask_event_changed)
    }
}

impl Device for Function {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        self.inner.region_read(index, offset, data).map_err(access_errno)
    }

    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.inner.region_write(index, offset, data).map_err(access_errno)
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        self.hold_queue();
        let mut access = DmaAccess::empty();
        access.set(DmaAccess::READ, map.readable);
        access.set(DmaAccess::WRITE, map.writable);
        if let (Some(recorder), Some(fd)) = (&mut self.recorder, &map.fd) {
            recorder.keep(Key::memory(map.address), fd.as_fd());
        }
        let file = map.fd.map(|fd| (fd.into_trusted(), map.offset));
        self.inner
            .dma_map(GuestPa(map.address), map.size, access, file)
            .map_err(|error| mem_errno(&error))
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        self.hold_queue();
        let keys = match unmap {
            DmaUnmap::Range { address, .. } => Key::memory(address)..=Key::memory(address),
            DmaUnmap::All => Key::ALL_MEMORY,
        };
        if let Some(recorder) = &mut self.recorder {
            recorder.drop_later(keys);
        }
        match unmap {
            DmaUnmap::Range { address, size } => {
                self.inner.dma_unmap(GuestPa(address), size).map_err(|error| mem_errno(&error))
            }
            DmaUnmap::All => {
                self.inner.dma_unmap_all();
                Ok(())
            }
        }
    }

    fn set_irqs(&mut self, index: u32, command: IrqCommand<'_>) -> Result<(), Errno> {
        self.unmask_event_changed |= !matches!(command, IrqCommand::Perform { .. });
        if let (Some(recorder), IrqCommand::Assign { action, start, eventfds }) =
            (&mut self.recorder, &command)
        {
            for (number, fd) in (*start..).zip(eventfds.iter()) {
                let event = match (index, action) {
                    (pci::INTX, IrqAction::Unmask) => IrqEvent::Unmask,
                    (pci::INTX, _) => IrqEvent::Intx,
                    _ => IrqEvent::Msi(number),
                };
                recorder.keep(Key::event(event), fd.as_fd());
            }
        }
        self.inner.change_interrupts(|interrupts| command.apply(index, interrupts))
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.transfer = Transfer::None;
        self.inner.reset();
        Ok(())
    }

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        self.inner.can_save().then_some(self as _)
    }

    fn journal(&mut self) -> Option<&mut dyn Journal> {
        if self.recorder.is_some() { Some(self) } else { None }
    }

    fn detach(&mut self) {
        self.transfer = Transfer::None;
        self.unmask_event_changed = true;
        if self.handover.is_some() {
            return self.inner.release_client();
        }
        self.inner.detach();
        // `attach` describes the regions again, and then a failure refuses the VM.
        if let Err(error) = self.describe() {
            log::warn!("{error:#}");
        }
    }
}

impl Journal for Function {
    fn commit(&mut self, record: SessionRecord, is_repeatable: bool) {
        if let Some(recorder) = &mut self.recorder {
            recorder.commit_message(&self.inner, record, is_repeatable);
            // From here on the request is not carried out again.
            self.inner.write_answer();
        }
    }

    fn begin_reply(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.begin_reply();
        }
    }

    fn finish(&mut self, bytes: usize) {
        if let Some(recorder) = &mut self.recorder {
            recorder.finish(bytes);
        }
    }

    fn remove(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.recorder.as_mut().map_or(Ok(()), |recorder| recorder.remove(socket))
    }

    fn set_adoptable(&mut self, adoptable: bool) {
        if let Some(recorder) = &mut self.recorder {
            recorder.set_session_torn(!adoptable);
        }
    }
}

/// Describes the function's regions and interrupts for the protocol.
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
            layout = layout.io_event_fd(index, event);
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

fn access_errno(_: AccessError) -> Errno {
    Errno::EINVAL
}

fn mem_errno(error: &MemError) -> Errno {
    match error {
        MemError::BadRange { .. } => Errno::EINVAL,
        MemError::Overlap { .. } => Errno::EEXIST,
        MemError::NotMapped { .. } => Errno::ENOENT,
        MemError::TooMany(_) => Errno::ENOSPC,
    }
}
