//! The worker's client of a GPU process.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use foreign_fds::ForeignFd;
use ipc::mem::{Mapping, WriteLog};
use ipc::seqpacket::SeqPacket;
use mdev_core::abi::doorbell;
use mdev_core::device::Scanout;
use mdev_core::gpu::{
    Adoption, AnchoredDescriptor, Aperture, Apertures, ChannelHandle, ChannelSpec, ChannelStatus,
    Client, ClientSpec, GpuCapabilities, GpuDescription, GpuError, GuestRam, MapRequest, Pending,
    SavedChannel, SavedClient, Saving, Usage, WrittenPages,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId, Token};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::connection::{Connection, is_closed};
use super::saved_state;
use super::wire::{self, ClientReply, ClientRequest, HELLO_FDS, RENEWED_FDS, Refusal};

/// One vGPU of a mediated device. Dropping the client, or the death of its process, frees all
/// resources of the vGPU.
#[derive(Debug)]
pub struct MediatedClient {
    connection: Connection,
    gpu: GpuDescription,
    spec: ClientSpec,
    apertures: Apertures,
    status: Arc<Mapping>,
    changed: File,
    wake: SeqPacket,
    wake_event: OwnedFd,
    /// Readable when `changed` is readable and when the GPU process is gone.
    event: Epoll,
    lost_reported: bool,
    /// Conditions that the process before this one had taken.
    again: Pending,
}

impl MediatedClient {
    /// Opens the client whose connection is in an [`mdev_core::gpu::Admission`].
    pub fn open(fd: OwnedFd) -> Result<Self, GpuError> {
        Self::greet(fd, 0, false)
    }

    /// Adopts the client of a process that has ended. `position` is what
    /// [`Adoption::position`] returned when the state was recorded from which the caller
    /// continues.
    pub fn adopt(fd: OwnedFd, position: u64) -> Result<Self, GpuError> {
        let mut client = Self::greet(fd, position, true)?;
        // What was taken, and not recorded, is pending again.
        let taken = client.status.swap_u32(wire::STATUS_TAKEN as u64, 0).unwrap_or_default();
        client.again = Pending::from_bits_truncate(taken);
        Ok(client)
    }

    fn greet(fd: OwnedFd, position: u64, adopts: bool) -> Result<Self, GpuError> {
        // The vGPU can be admitted again as soon as the client is dropped.
        let mut connection = Connection::numbered_from(SeqPacket::trusting(fd), position)?;
        let hello = ClientRequest::Hello { version: wire::VERSION, adopts };
        let (reply, fds) = connection.request_anew(&hello)?;
        let mut fds = trusted(fds);
        let (gpu, spec, vram_offset) = match reply {
            ClientReply::Hello { version, gpu, spec, vram_offset } if wire::is_spoken(version) => {
                (gpu, spec, vram_offset)
            }
            ClientReply::Refused(refusal) => return Err(refusal.into()),
            _ => return Err(Refusal::Version.into()),
        };
        let file = if vram_offset.is_some() { fds.pop() } else { None };
        let Ok(fds) = <[OwnedFd; HELLO_FDS]>::try_from(fds) else {
            return Err(connection.unexpected_reply());
        };
        let [doorbell, status, changed, wake, wake_event] = fds;
        let apertures = apertures(&gpu, &spec, file.zip(vram_offset).as_ref(), doorbell)?;
        let status = Mapping::new(status.as_fd(), 0, wire::STATUS_BYTES as u64, true)?;
        let (changed, wake) = (File::from(changed), SeqPacket::from(wake));
        let event = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(std::io::Error::from)?;
        for (fd, flags) in
            [(changed.as_fd(), EpollFlags::EPOLLIN), (connection.as_fd(), EpollFlags::EPOLLHUP)]
        {
            event.add(fd, EpollEvent::new(flags, 0)).map_err(std::io::Error::from)?;
        }
        Ok(Self {
            connection,
            gpu,
            spec,
            apertures,
            status,
            changed,
            wake,
            wake_event,
            event,
            lost_reported: false,
            again: Pending::empty(),
        })
    }

    fn send(&mut self, request: &ClientRequest, fds: &[BorrowedFd<'_>]) -> Result<(), GpuError> {
        match self.connection.request(request, fds)?.0 {
            ClientReply::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    fn unexpected(&mut self, reply: &ClientReply) -> GpuError {
        match reply {
            ClientReply::Refused(refusal) => (*refusal).into(),
            _ => self.connection.unexpected_reply(),
        }
    }

    fn peer_closed(&self) -> bool {
        let mut fds = [PollFd::new(self.connection.as_fd(), PollFlags::empty())];
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
        poll(&mut fds, PollTimeout::ZERO).is_ok()
            && fds[0].revents().is_some_and(|events| events.intersects(gone))
    }
}

/// Returns the descriptors of a reply. The GPU process is trusted for its vGPUs.
fn trusted(fds: Vec<ForeignFd>) -> Vec<OwnedFd> {
    fds.into_iter().map(ForeignFd::into_trusted).collect()
}

/// Returns the apertures for a file of video memory, the partition's offset in it, and a doorbell
/// page.
fn apertures(
    gpu: &GpuDescription,
    spec: &ClientSpec,
    memory: Option<&(OwnedFd, u64)>,
    doorbell: OwnedFd,
) -> Result<Apertures, GpuError> {
    let aperture = |len: u64| {
        let Some((file, offset)) = memory.filter(|_| len > 0) else { return Ok(None) };
        let fd = file.try_clone()?;
        Ok::<_, GpuError>(Some(Aperture { fd, offset: *offset, len }))
    };
    let vram_mapped = gpu.capabilities.contains(GpuCapabilities::VRAM_APERTURE);
    let doorbell_mapped = gpu.capabilities.contains(GpuCapabilities::DOORBELL_MAPPED);
    Ok(Apertures {
        framebuffer: aperture(spec.framebuffer_bytes)?,
        vram: aperture(if vram_mapped { spec.vram_bytes } else { 0 })?,
        doorbell: doorbell_mapped.then_some(Aperture {
            fd: doorbell,
            offset: 0,
            len: doorbell::PAGE_BYTES,
        }),
    })
}

impl Client for MediatedClient {
    fn saving(&mut self) -> Option<&mut dyn Saving> {
        Some(self)
    }

    fn adoption(&mut self) -> Option<&mut dyn Adoption> {
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
        let GuestRam { fd, offset, len, writable } = ram;
        match self.connection.request(&ClientRequest::Import { offset, len, writable }, &[fd])?.0 {
            ClientReply::Imported(memory) => Ok(memory),
            other => Err(self.unexpected(&other)),
        }
    }

    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        self.send(&ClientRequest::Release(memory), &[])
    }

    fn create_space(&mut self) -> Result<SpaceId, GpuError> {
        match self.connection.request(&ClientRequest::CreateSpace, &[])?.0 {
            ClientReply::SpaceCreated(space) => Ok(space),
            other => Err(self.unexpected(&other)),
        }
    }

    fn destroy_space(&mut self, space: SpaceId) -> Result<(), GpuError> {
        self.send(&ClientRequest::DestroySpace(space), &[])
    }

    fn map(&mut self, request: &MapRequest) -> Result<(), GpuError> {
        self.send(&ClientRequest::Map(*request), &[])
    }

    fn unmap(&mut self, space: SpaceId, va: GpuVa, len: u64) -> Result<(), GpuError> {
        self.send(&ClientRequest::Unmap { space, va, len }, &[])
    }

    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError> {
        match self.connection.request(&ClientRequest::CreateChannel(*spec), &[])?.0 {
            ClientReply::Created(handle) => Ok(handle),
            other => Err(self.unexpected(&other)),
        }
    }

    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError> {
        self.send(&ClientRequest::DestroyChannel(id), &[])
    }

    fn query_channel(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError> {
        match self.connection.request(&ClientRequest::QueryChannel(id), &[])?.0 {
            ClientReply::Status(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    fn wake(&mut self, _token: Token) -> Result<(), GpuError> {
        // The token is not needed: the engine polls all channels of this vGPU. A full queue already
        // holds a pending wake-up.
        match self.wake.try_send(&[1], &[]) {
            Err(error) if is_closed(&error) => Err(GpuError::Lost(error.to_string())),
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn wake_event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake_event.as_fd())
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.event.0.as_fd()
    }

    fn set_interrupt(
        &mut self,
        vector: u32,
        event: Option<BorrowedFd<'_>>,
    ) -> Result<(), GpuError> {
        self.send(&ClientRequest::SetInterrupt(vector), event.as_slice())
    }

    fn take_pending(&mut self) -> Pending {
        // Read the counter first: bits that are set afterwards make it readable again.
        let _ = self.changed.read(&mut [0; 8]);
        let (pending, taken) = (wire::STATUS_PENDING as u64, wire::STATUS_TAKEN as u64);
        // In this order an adopting process finds each condition in one of the words.
        let bits = self.status.load_u32(pending).unwrap_or_default();
        if bits != 0 {
            self.status.or_u32(taken, bits);
            self.status.update_u32(pending, |word| word & !bits);
        }
        let mut pending = Pending::from_bits_truncate(bits)
            | std::mem::replace(&mut self.again, Pending::empty());
        if !self.lost_reported && self.peer_closed() {
            self.lost_reported = true;
            let _ = self.event.delete(self.connection.as_fd());
            pending |= Pending::DEVICE_LOST;
        }
        pending
    }

    fn reset(&mut self) -> Result<(), GpuError> {
        self.send(&ClientRequest::Reset, &[])
    }

    fn set_scanout(&mut self, scanout: &Scanout) -> Result<(), GpuError> {
        if !self.gpu.capabilities.contains(GpuCapabilities::SCANOUT) {
            return Ok(());
        }
        self.send(&ClientRequest::SetScanout(*scanout), &[])
    }

    fn renew(&mut self) -> Result<bool, GpuError> {
        let (reply, fds) = self.connection.request(&ClientRequest::Renew, &[])?;
        let mut fds = trusted(fds);
        let ClientReply::Renewed { vram_offset } = reply else {
            return Err(self.unexpected(&reply));
        };
        let file = if vram_offset.is_some() { fds.pop() } else { None };
        let Ok([doorbell, event]) = <[OwnedFd; RENEWED_FDS]>::try_from(fds) else {
            return Err(self.connection.unexpected_reply());
        };
        self.wake_event = event;
        let memory = file.zip(vram_offset);
        if memory.is_some() {
            self.apertures = apertures(&self.gpu, &self.spec, memory.as_ref(), doorbell)?;
        } else if let Some(aperture) = &mut self.apertures.doorbell {
            aperture.fd = doorbell;
        }
        Ok(memory.is_some())
    }

    fn scrub(&mut self) -> Result<(), GpuError> {
        self.send(&ClientRequest::Scrub, &[])
    }

    fn usage(&mut self) -> Result<Usage, GpuError> {
        match self.connection.request(&ClientRequest::Usage, &[])?.0 {
            ClientReply::Usage(usage) => Ok(usage.0),
            other => Err(self.unexpected(&other)),
        }
    }
}

impl Saving for MediatedClient {
    fn log_writes(
        &mut self,
        memory: MemoryId,
        len: u64,
    ) -> Result<Box<dyn WrittenPages>, GpuError> {
        let (reply, fds) = self.connection.request(&ClientRequest::LogWrites(memory), &[])?;
        match (reply, trusted(fds).pop()) {
            (ClientReply::Logged, Some(file)) => Ok(Box::new(WriteLog::open(file.as_fd(), len)?)),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    fn end_log(&mut self, memory: MemoryId) -> Result<(), GpuError> {
        self.send(&ClientRequest::EndLog(memory), &[])
    }

    fn pause(&mut self) -> Result<(), GpuError> {
        self.send(&ClientRequest::Pause, &[])
    }

    fn resume(&mut self) -> Result<(), GpuError> {
        self.send(&ClientRequest::Resume, &[])
    }

    fn save(&mut self) -> Result<SavedClient, GpuError> {
        let (reply, fds) = self.connection.request(&ClientRequest::Save, &[])?;
        match (reply, trusted(fds).pop()) {
            (ClientReply::Saved, Some(file)) => Ok(saved_state::read(file)?),
            (other, _) => Err(self.unexpected(&other)),
        }
    }

    fn restore_space(&mut self, space: SpaceId) -> Result<(), GpuError> {
        self.send(&ClientRequest::RestoreSpace(space), &[])
    }

    fn restore_channel(&mut self, channel: &SavedChannel) -> Result<(), GpuError> {
        self.send(&ClientRequest::RestoreChannel(channel.clone()), &[])
    }
}

impl Adoption for MediatedClient {
    fn position(&mut self) -> Option<u64> {
        self.connection.last_number()
    }

    fn take_descriptors(&mut self) -> Vec<AnchoredDescriptor> {
        // The GPU process has all that is needed.
        Vec::new()
    }

    fn record(&mut self) {
        self.connection.record();
        if self.status.load_u32(wire::STATUS_TAKEN as u64) != Some(0) {
            self.status.store_u32(wire::STATUS_TAKEN as u64, 0);
        }
    }
}
