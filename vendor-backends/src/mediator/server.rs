//! The process that owns a device: answers the manager and the workers, and drives the silicon.
//!
//! The caller's thread serves the admin socket. Each vGPU has a thread of its own for its worker's connection, so that
//! what one worker asks for delays no other; when that connection closes, all that the vGPU had is freed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mdev_core::gpu::{ClientSpec, GpuDescription, Quotas};
use mdev_core::ids::VgpuId;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::hardware::Hardware;
use super::silicon::Silicon;
use super::silicon::vgpu::{Shared, Vgpu};
use super::wire::{self, AdminReply, AdminRequest, ClientReply, ClientRequest, Refusal};
use crate::seqpacket::{self, MAX_PACKET, SeqPacket, SeqPacketListener};

/// Managers that may be connected at a time: an old one, a new one, and some for tools.
const MAX_ADMINS: usize = 8;
/// How often to look whether the grace time is over.
const TICK_MS: u16 = 500;
/// How long to wait after nobody could be accepted, so as not to try without a pause.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// Time slices that may be set.
const SLICES: std::ops::RangeInclusive<Duration> =
    Duration::from_micros(100)..=Duration::from_secs(1);
/// Bounds of hangs that may be set.
const PATIENCES: std::ops::RangeInclusive<Duration> =
    Quotas::SHORTEST_TIMEOUT..=Quotas::LONGEST_TIMEOUT;

/// Serves until there has been neither a manager nor a vGPU for `grace`.
pub fn run(
    hardware: Arc<dyn Hardware>,
    grace: Duration,
    admin: &SeqPacketListener,
) -> io::Result<()> {
    let mut server = Server {
        silicon: Arc::new(Silicon::new(hardware)?),
        clients: Clients::default(),
        admins: Vec::new(),
    };
    let mut alone_since = None;
    loop {
        server.serve(admin)?;
        let alone = server.admins.is_empty() && server.clients.are_none();
        alone_since = alone.then(|| alone_since.unwrap_or_else(Instant::now));
        if alone_since.is_some_and(|since: Instant| since.elapsed() >= grace) {
            let name = &server.silicon.describe().parent;
            log::info!("{name}: no manager and no vGPU: its owner ends");
            return Ok(());
        }
    }
}

struct Server {
    silicon: Arc<Silicon>,
    /// Connections of workers.
    clients: Clients,
    admins: Vec<Admin>,
}

/// A manager's connection.
struct Admin {
    socket: SeqPacket,
    /// What both sides speak.
    version: u32,
}

impl Server {
    /// Waits a little for managers, and answers them.
    fn serve(&mut self, listener: &SeqPacketListener) -> io::Result<()> {
        let mut fds = vec![PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        fds.extend(
            self.admins.iter().map(|admin| PollFd::new(admin.socket.as_fd(), PollFlags::POLLIN)),
        );
        match poll(&mut fds, PollTimeout::from(TICK_MS)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any() == Some(true)).collect();
        drop(fds);
        let mut answered = ready[1..].iter();
        let admins = std::mem::take(&mut self.admins);
        for mut admin in admins {
            if answered.next() != Some(&true) || self.answer(&mut admin) {
                self.admins.push(admin);
            }
        }
        if ready[0] {
            match listener.accept() {
                Ok(socket) if self.admins.len() < MAX_ADMINS => {
                    self.admins.push(Admin { socket, version: wire::VERSION });
                }
                Ok(_) => log::warn!("Too many connections to the admin socket: one refused"),
                // Whoever it was has given up, or descriptors are short: neither ends a GPU.
                Err(error) => {
                    log::warn!("The admin socket accepts no connection: {error}");
                    thread::sleep(ACCEPT_REST);
                }
            }
        }
        Ok(())
    }

    /// Answers one request; false where the connection is over.
    fn answer(&self, admin: &mut Admin) -> bool {
        let socket = &admin.socket;
        let (request, _fds) = match receive(socket, true) {
            Received::Request(request, fds) => (request, fds),
            Received::Nothing => return true,
            Received::Garbage => {
                return send(socket, &AdminReply::Refused(Refusal::Message), &[]);
            }
            Received::End => return false,
        };
        if let AdminRequest::Hello { version } = request {
            admin.version = wire::agreed(version);
            let gpu = self.silicon.describe().clone();
            return send(socket, &AdminReply::Hello { version: admin.version, gpu }, &[]);
        }
        match self.handle(request) {
            Ok((reply, None)) => send(socket, &reply, &[]),
            Ok((reply, Some(fd))) => send(socket, &reply, &[fd.as_fd()]),
            Err(refusal) => {
                let refusal = refusal.to_version(admin.version);
                send(socket, &AdminReply::Refused(refusal), &[])
            }
        }
    }

    fn handle(&self, request: AdminRequest) -> Result<(AdminReply, Option<OwnedFd>), Refusal> {
        match request {
            AdminRequest::Hello { .. } => return Err(Refusal::Message),
            AdminRequest::Admit(spec) => {
                return Ok((AdminReply::Admitted, Some(self.admit(&spec)?)));
            }
            AdminRequest::Evict(id) => {
                self.silicon.evict(&self.silicon.find(id)?);
                self.clients.hang_up(id);
            }
            AdminRequest::Forget(id) => self.silicon.hardware().forget(id),
            AdminRequest::SetTimeslice(id, slice) => {
                if !SLICES.contains(&slice) {
                    return Err(Refusal::Timeslice);
                }
                self.silicon.find(id)?.set_timeslice(slice);
            }
            AdminRequest::SetBudget(id, budget) => {
                if budget.is_some_and(|budget| !budget.is_valid()) {
                    return Err(Refusal::Budget);
                }
                self.silicon.find(id)?.set_budget(budget);
            }
            AdminRequest::SetQuotas(id, quotas) => {
                let times = [quotas.hang_timeout, quotas.acquire_timeout];
                if !times.iter().flatten().all(|time| PATIENCES.contains(time)) {
                    return Err(Refusal::Quotas);
                }
                self.silicon.find(id)?.set_quotas(&quotas)?;
            }
            AdminRequest::SetGate(id, open) => self.silicon.find(id)?.set_gate(open),
            AdminRequest::Reset(id) => self.silicon.find(id)?.reset_channels()?,
            AdminRequest::Usage => return Ok((AdminReply::Usage(self.silicon.usage()), None)),
            AdminRequest::Focus(id) => {
                let took = self.silicon.hardware().focus(id)?;
                return Ok((AdminReply::Focused(took), None));
            }
            AdminRequest::Rotate(every) => self.silicon.hardware().rotate(every)?,
            AdminRequest::Screen => {
                return Ok((AdminReply::Screen(self.silicon.hardware().screen()?), None));
            }
        }
        Ok((AdminReply::Done, None))
    }

    /// Makes room for a vGPU and starts the thread that serves its worker.
    fn admit(&self, spec: &ClientSpec) -> Result<OwnedFd, Refusal> {
        // A worker that has just died may not have been noticed yet by its thread.
        if self.clients.has_hung_up(spec.vgpu)
            && let Ok(vgpu) = self.silicon.find(spec.vgpu)
        {
            self.silicon.evict(&vgpu);
        }
        let (vgpu, shared) = self.silicon.admit(spec)?;
        let started = SeqPacket::pair().and_then(|(ours, theirs)| {
            let client = ClientConnection {
                silicon: Arc::clone(&self.silicon),
                vgpu: Arc::clone(&vgpu),
                shared,
                _listed: self.clients.add(&vgpu, &ours)?,
                socket: ours,
            };
            let name = "gpu-client".into();
            let builder = thread::Builder::new().name(name).stack_size(256 << 10);
            builder.spawn(move || client.serve())?;
            Ok(theirs.into())
        });
        started.map_err(|error| {
            self.silicon.evict(&vgpu);
            Refusal::from(error)
        })
    }
}

/// The connections of workers, for those who want to end one.
#[derive(Clone, Default)]
struct Clients(Arc<Mutex<Vec<(VgpuId, OwnedFd)>>>);

impl Clients {
    fn list(&self) -> MutexGuard<'_, Vec<(VgpuId, OwnedFd)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn are_none(&self) -> bool {
        self.list().is_empty()
    }

    fn add(&self, vgpu: &Vgpu, socket: &SeqPacket) -> io::Result<Listed> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        let listed = Listed { clients: self.clone(), socket: socket.as_raw_fd() };
        self.list().push((vgpu.id(), socket));
        Ok(listed)
    }

    fn has_hung_up(&self, id: VgpuId) -> bool {
        self.list().iter().filter(|(vgpu, _)| *vgpu == id).any(|(_, socket)| {
            let mut fds = [PollFd::new(socket.as_fd(), PollFlags::empty())];
            poll(&mut fds, PollTimeout::ZERO).is_ok() && fds[0].any() == Some(true)
        })
    }

    /// Ends a worker's connection: it learns at once that its vGPU is gone.
    fn hang_up(&self, id: VgpuId) {
        for (_, socket) in self.list().iter().filter(|(vgpu, _)| *vgpu == id) {
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
    }
}

/// A connection's place in [`Clients`].
struct Listed {
    clients: Clients,
    socket: RawFd,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.clients.list().retain(|(_, socket)| socket.as_raw_fd() != self.socket);
    }
}

/// One worker's connection.
struct ClientConnection {
    silicon: Arc<Silicon>,
    vgpu: Arc<Vgpu>,
    socket: SeqPacket,
    shared: Shared,
    _listed: Listed,
}

impl ClientConnection {
    fn serve(self) {
        let mut greeted = false;
        while self.answer(&mut greeted) {}
        log::debug!("vGPU {}: its worker is gone", self.vgpu.id());
    }

    /// Answers one request; false where the connection is over.
    fn answer(&self, greeted: &mut bool) -> bool {
        let (request, fds) = match receive(&self.socket, false) {
            Received::Request(request, fds) => (request, fds),
            Received::Nothing => return true,
            Received::Garbage => {
                return send(&self.socket, &ClientReply::Refused(Refusal::Message), &[]);
            }
            Received::End => return false,
        };
        if let ClientRequest::Hello { version } = request {
            *greeted = true;
            return self.hello(wire::agreed(version));
        }
        let reply = if *greeted { self.handle(&request, fds) } else { Err(Refusal::Message) };
        send(&self.socket, &reply.unwrap_or_else(ClientReply::Refused), &[])
    }

    fn hello(&self, version: u32) -> bool {
        let gpu: GpuDescription = self.silicon.describe().clone();
        let Shared { vram, doorbell, status, event, wake } = &self.shared;
        let reply = ClientReply::Hello {
            version,
            gpu,
            spec: self.vgpu.spec().clone(),
            vram_offset: vram.as_ref().map(|(_, offset)| *offset),
        };
        let shared = [doorbell, status, event, &wake.socket, &wake.event];
        let fds: [BorrowedFd<'_>; wire::HELLO_FDS] = shared.map(AsFd::as_fd);
        let mut fds = fds.to_vec();
        fds.extend(vram.as_ref().map(|(file, _)| file.as_fd()));
        send(&self.socket, &reply, &fds)
    }

    fn handle(&self, request: &ClientRequest, fds: Vec<OwnedFd>) -> Result<ClientReply, Refusal> {
        let vgpu = &self.vgpu;
        let mut fds = fds.into_iter();
        match *request {
            ClientRequest::Hello { .. } => return Err(Refusal::Message),
            ClientRequest::Import { offset, len, writable } => {
                let fd = fds.next().ok_or(Refusal::Descriptor)?;
                return Ok(ClientReply::Imported(vgpu.import(&fd, offset, len, writable)?));
            }
            ClientRequest::Release(memory) => vgpu.release(memory)?,
            ClientRequest::Map { va, len, backing, writable } => {
                vgpu.map(va, len, backing, writable)?;
            }
            ClientRequest::Unmap { va, len } => vgpu.unmap(va, len)?,
            ClientRequest::CreateChannel(ref spec) => {
                return Ok(ClientReply::Created(vgpu.create_channel(spec)?));
            }
            ClientRequest::DestroyChannel(id) => vgpu.destroy_channel(id)?,
            ClientRequest::QueryChannel(id) => {
                return Ok(ClientReply::Status(vgpu.query_channel(id)?));
            }
            ClientRequest::SetInterrupt(vector) => vgpu.set_interrupt(vector, fds.next())?,
            ClientRequest::Reset => vgpu.reset()?,
            ClientRequest::Usage => return Ok(ClientReply::Usage(vgpu.usage())),
            ClientRequest::SetScanout(ref scanout) => {
                self.silicon.hardware().set_scanout(vgpu.id(), scanout)?;
            }
            ClientRequest::Scrub => self.silicon.hardware().scrub(vgpu.id())?,
        }
        Ok(ClientReply::Done)
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        self.silicon.evict(&self.vgpu);
    }
}

enum Received<T> {
    Request(T, Vec<OwnedFd>),
    /// Nothing was there after all.
    Nothing,
    /// Something that is not a request.
    Garbage,
    /// The other side is gone.
    End,
}

fn receive<T: DeserializeOwned>(socket: &SeqPacket, poll: bool) -> Received<T> {
    let mut buffer = vec![0; MAX_PACKET];
    let packet = if poll { socket.try_recv(&mut buffer) } else { socket.recv(&mut buffer) };
    match packet {
        Ok(Some(packet)) => match seqpacket::decode(&buffer[..packet.len]) {
            Ok(request) => Received::Request(request, packet.fds),
            Err(_) => Received::Garbage,
        },
        Ok(None) => Received::End,
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock => Received::Nothing,
            io::ErrorKind::InvalidData => Received::Garbage,
            _ => Received::End,
        },
    }
}

/// Answers; false where the other side does not take it. Who does not read answers is not waited for.
fn send<T: Serialize>(socket: &SeqPacket, reply: &T, fds: &[BorrowedFd<'_>]) -> bool {
    seqpacket::encode(reply).and_then(|bytes| socket.try_send(&bytes, fds)).is_ok()
}
