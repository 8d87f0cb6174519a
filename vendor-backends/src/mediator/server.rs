//! Server in a GPU process: answers the manager and the workers.
//!
//! The caller's thread serves the admin socket. The vGPUs are in this process or in contexts
//! (`vgpus`). In this process, each vGPU has a thread for its worker's connection, so that a
//! request of one worker does not delay other workers. When a worker's connection closes, all
//! resources of its vGPU are freed.

mod answered;
mod clients;
mod packet;
mod request_budget;
mod vgpus;
mod worker_connection;

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use foreign_fds::ForeignFd;
use ipc::seqpacket::{SeqPacket, SeqPacketListener};
use mdev_core::gpu::{GpuCapabilities, Quotas};
use mdev_core::sched::policy::SHORTEST_SLICE;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use self::packet::{Received, receive_admin, send};
use self::vgpus::{Here, Vgpus};
pub use self::worker_connection::WorkerConnection;
use super::arbiter::Arbiter;
use super::emulation::EmulatedGpu;
use super::hardware::Hardware;
use super::wire::{self, AdminReply, AdminRequest, Refusal};

/// Maximum number of admin connections: an old manager, a new manager, and tools.
const MAX_ADMINS: usize = 8;
/// Interval between checks of the grace time.
const TICK_MS: u16 = 500;
/// Delay after an accept error, to avoid a busy loop.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Allowed time slices.
const SLICES: RangeInclusive<Duration> = SHORTEST_SLICE..=Duration::from_secs(1);
/// Allowed hang limits.
const QUOTA_TIMEOUTS: RangeInclusive<Duration> = Quotas::SHORTEST_TIMEOUT..=Quotas::LONGEST_TIMEOUT;

/// Serves until there has been neither a manager nor a vGPU for `grace`.
pub fn run(
    hardware: Arc<dyn Hardware>,
    grace: Duration,
    admin: &SeqPacketListener,
) -> io::Result<()> {
    let has_contexts = hardware.describe().capabilities.contains(GpuCapabilities::CONTEXTS);
    let vgpus = if has_contexts {
        Vgpus::InContexts(Arbiter::start(Arc::clone(&hardware))?)
    } else {
        Vgpus::Here(Here::new(EmulatedGpu::new(Arc::clone(&hardware))?))
    };
    let mut server = Server { hardware, vgpus, admins: Vec::new() };
    let mut unused_since = None;
    loop {
        server.serve(admin)?;
        let unused = server.admins.is_empty() && server.vgpus.are_none();
        unused_since = unused.then(|| unused_since.unwrap_or_else(Instant::now));
        if unused_since.is_some_and(|since: Instant| since.elapsed() >= grace) {
            let name = &server.hardware.describe().parent;
            log::info!("{name}: no manager and no vGPU: the GPU process ends");
            return Ok(());
        }
    }
}

struct Server {
    hardware: Arc<dyn Hardware>,
    vgpus: Vgpus,
    admins: Vec<SeqPacket>,
}

impl Server {
    /// Waits for admin requests for at most [`TICK_MS`] and answers them.
    fn serve(&mut self, listener: &SeqPacketListener) -> io::Result<()> {
        let mut fds = vec![PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.admins.iter().map(|admin| PollFd::new(admin.as_fd(), PollFlags::POLLIN)));
        match poll(&mut fds, PollTimeout::from(TICK_MS)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any() == Some(true)).collect();
        drop(fds);
        let mut answered = ready[1..].iter();
        let admins = std::mem::take(&mut self.admins);
        for admin in admins {
            if answered.next() != Some(&true) || self.answer(&admin) {
                self.admins.push(admin);
            }
        }
        if ready[0] {
            match listener.accept() {
                Ok(socket) if self.admins.len() < MAX_ADMINS => {
                    self.admins.push(socket);
                }
                Ok(_) => log::warn!(
                    "Refused a connection to the admin socket: limit of {MAX_ADMINS} reached"
                ),
                // The peer has given up, or file descriptors are short. Neither may end the GPU.
                Err(error) => {
                    log::warn!("Cannot accept a connection on the admin socket: {error}");
                    thread::sleep(ACCEPT_RETRY_DELAY);
                }
            }
        }
        Ok(())
    }

    /// Answers one request. Returns false at the end of the connection.
    fn answer(&self, socket: &SeqPacket) -> bool {
        let (request, fds) = match receive_admin(socket) {
            Received::Request(request, fds) => (request, fds),
            Received::Nothing => return true,
            Received::Refused(refusal) => return reply(socket, &AdminReply::Refused(refusal), &[]),
            Received::End => return false,
        };
        if let AdminRequest::Hello { version } = request {
            let (version, gpu) = (wire::agreed(version), self.hardware.describe().clone());
            return reply(socket, &AdminReply::Hello { version, gpu }, &[]);
        }
        match self.handle(request, fds) {
            Ok((answer, fd)) => reply(socket, &answer, fd.as_ref().map(AsFd::as_fd).as_slice()),
            Err(refusal) => reply(socket, &AdminReply::Refused(refusal), &[]),
        }
    }

    fn handle(
        &self,
        request: AdminRequest,
        fds: Vec<ForeignFd>,
    ) -> Result<(AdminReply, Option<OwnedFd>), Refusal> {
        match request {
            AdminRequest::Hello { .. } => return Err(Refusal::Message),
            AdminRequest::Admit(spec) => {
                return Ok((AdminReply::Admitted, Some(self.vgpus.admit(&spec)?)));
            }
            AdminRequest::AdmitContext(spec) => {
                // The manager has made the connection and opened the file.
                let mut fds = fds.into_iter().map(ForeignFd::into_trusted);
                let link = fds.next().ok_or(Refusal::Descriptor)?;
                self.vgpus.admit_context(&spec, link, fds.next())?;
            }
            AdminRequest::Evict(id) => self.vgpus.evict(id)?,
            AdminRequest::Forget(id) => self.hardware.forget(id),
            AdminRequest::SetTimeslice(id, slice) => {
                if !SLICES.contains(&slice) {
                    return Err(Refusal::Timeslice);
                }
                self.vgpus.set_timeslice(id, slice)?;
            }
            AdminRequest::SetBudget(id, budget) => {
                if budget.is_some_and(|budget| !budget.is_valid()) {
                    return Err(Refusal::Budget);
                }
                self.vgpus.set_budget(id, budget)?;
            }
            AdminRequest::SetQuotas(id, quotas) => {
                let times = [quotas.hang_timeout, quotas.acquire_timeout];
                if !times.iter().flatten().all(|time| QUOTA_TIMEOUTS.contains(time)) {
                    return Err(Refusal::Quotas);
                }
                self.vgpus.set_quotas(id, &quotas)?;
            }
            AdminRequest::SetGate(id, is_open) => self.vgpus.set_gate(id, is_open)?,
            AdminRequest::Reset(id) => self.vgpus.reset(id)?,
            AdminRequest::Usage => {
                return Ok((AdminReply::Usage(self.vgpus.usage().into()), None));
            }
            AdminRequest::Waits(ids) => {
                if ids.len() > wire::MAX_WAITS {
                    return Err(Refusal::Message);
                }
                let waits = ids.iter().filter_map(|id| Some((*id, self.vgpus.waits(*id).ok()?)));
                return Ok((AdminReply::Waits(waits.collect()), None));
            }
            AdminRequest::Focus(id) => {
                let took = self.hardware.focus(id)?;
                return Ok((AdminReply::Focused(took), None));
            }
            AdminRequest::Rotate(every) => self.hardware.rotate(every)?,
            AdminRequest::Screen => {
                return Ok((AdminReply::Screen(self.hardware.screen()?), None));
            }
        }
        Ok((AdminReply::Done, None))
    }
}

/// Sends a reply to the manager.
fn reply(socket: &SeqPacket, reply: &AdminReply, fds: &[BorrowedFd<'_>]) -> bool {
    send(socket, reply, fds, AdminReply::Refused)
}
