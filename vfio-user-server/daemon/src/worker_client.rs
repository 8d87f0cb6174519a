//! Client of a worker's control socket. Each call but [`ask_status`] blocks for [`TIMEOUT`] at
//! most. So calls are made on threads that may block, not on the manager's thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use foreign_fds::ForeignFd;
use ipc::seqpacket::{MAX_PACKET, Packet, SeqPacket};
use mdev_core::device::{ConfigWrite, Scanout};
use mdev_core::gpu::StagedCopy;
use mdev_core::untrusted::one_line;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::spawn;
use crate::worker::journal::descriptors::{Key, Message};
use crate::worker_protocol::{
    MAX_PROCESSES, MemoryRange, OLDEST, Restored, VERSION, WorkerReply, WorkerRequest, WorkerStatus,
};

pub mod passed_files;

/// Limit of the wait for a worker's reply. A worker replies between two requests of its VM, which
/// take microseconds.
pub const TIMEOUT: Duration = Duration::from_secs(1);

/// Limit of the wait for a worker that saves or restores page tables and channels.
const SAVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Limit of the wait for a worker to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause between attempts to connect to a worker whose listener has no room.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// Question for a worker's status.
const STATUS: WorkerRequest = WorkerRequest::Status { version: OLDEST };

/// Limit of the warnings of a worker.
const MAX_WARNINGS: usize = 16;

/// Limit of workers that are asked at once, each on a thread.
const MAX_ASKED: usize = 256;

/// Limit of a text of a worker, in characters.
const MAX_TEXT: usize = 500;

/// Requests a worker's status. A worker of an unsupported version reports it, closes the connection
/// or sends a reply that cannot be parsed; each is an error of kind `Unsupported`.
pub fn status(control: &Path) -> io::Result<WorkerStatus> {
    status_within(TIMEOUT, control)
}

/// Requests the status of a worker that has just been started, or is replaced: on a busy host the
/// answer takes longer.
pub fn patient_status(control: &Path) -> io::Result<WorkerStatus> {
    status_within(START_TIMEOUT, control)
}

/// Requests a worker's status as [`status`], without a thread that waits for the worker.
pub async fn ask_status(control: &Path) -> io::Result<WorkerStatus> {
    let reply = tokio::time::timeout(TIMEOUT, ask(control, &STATUS)).await;
    supported(reply.unwrap_or_else(|_| Err(silent())))
}

/// Sends a request whose reply has no descriptors.
async fn ask(control: &Path, message: &WorkerRequest) -> io::Result<WorkerReply> {
    let socket = loop {
        match SeqPacket::try_connect_without_fds(control) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(CONNECT_PAUSE).await;
            }
            connected => break connected?,
        }
    };
    // A new connection has room for a packet.
    socket.try_send(&serde_json::to_vec(message)?, &[])?;
    // SAFETY: the descriptor is open for as long as it is borrowed.
    let watched = unsafe { AsyncFd::register_with_interest(socket.as_fd(), Interest::READABLE) }?;
    let mut buffer = Vec::new();
    let receive = |_: &BorrowedFd<'_>| {
        buffer.resize(MAX_PACKET, 0);
        socket.try_recv(&mut buffer)
    };
    let packet = watched.async_io(Interest::READABLE, receive).await?;
    Ok(reply_in(packet, &buffer)?.0)
}

fn status_within(timeout: Duration, control: &Path) -> io::Result<WorkerStatus> {
    let reply = exchange_within(timeout, control, &STATUS, &[], Takes::NoFds);
    supported(reply.map(|(reply, _)| reply))
}

/// Returns the status in a reply, if this manager can use the worker.
fn supported(reply: io::Result<WorkerReply>) -> io::Result<WorkerStatus> {
    let unsupported = |what: &str| {
        let known = format!("this vgpud speaks {OLDEST} to {VERSION}");
        io::Error::new(io::ErrorKind::Unsupported, format!("The worker {what}; {known}"))
    };
    let reply = match reply {
        Ok(reply) => reply,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(unsupported("does not speak a supported version of the control protocol"));
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Err(unsupported("sends a reply that cannot be parsed"));
        }
        Err(error) => return Err(error),
    };
    match reply {
        WorkerReply::Status(status) if status.is_supported() => Ok(shown(*status)),
        WorkerReply::Status(status) => {
            Err(unsupported(&format!("speaks version {} of the control protocol", status.version)))
        }
        other => Err(unexpected(&other)),
    }
}

/// Requests the statuses of many workers at once: those that do not answer cost one wait together,
/// of three times [`TIMEOUT`] at most. A thread that waits longer is left.
pub fn statuses(controls: &[PathBuf]) -> Vec<io::Result<WorkerStatus>> {
    let mut statuses = Vec::with_capacity(controls.len());
    for some in controls.chunks(MAX_ASKED) {
        let asked: Vec<_> = some
            .iter()
            .map(|control| {
                let (control, (answer, answered)) = (control.clone(), mpsc::channel());
                // An error means that the answer came too late.
                let ask = move || drop(answer.send(status(&control)));
                spawn::thread("ask-worker", ask).map(|_| answered)
            })
            .collect();
        let deadline = Instant::now() + 3 * TIMEOUT;
        statuses.extend(asked.into_iter().map(|answered| {
            let left = deadline.saturating_duration_since(Instant::now());
            answered?.recv_timeout(left).unwrap_or_else(|_| Err(silent()))
        }));
    }
    statuses
}

fn silent() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "The worker does not answer")
}

/// Makes a worker's words fit for a terminal: a worker that its VM has compromised chooses them.
fn shown(mut status: WorkerStatus) -> WorkerStatus {
    status.warnings.truncate(MAX_WARNINGS);
    for warning in &mut status.warnings {
        *warning = one_line(warning, MAX_TEXT);
    }
    if let Some(programs) = &mut status.programs {
        programs.processes.truncate(MAX_PROCESSES);
    }
    status
}

/// Requests the scanout of a worker's display, with the descriptors that the worker passes. A
/// worker that was compromised can pass any.
pub fn scanout(control: &Path) -> io::Result<(io::Result<Scanout>, Vec<ForeignFd>)> {
    let (reply, fds) = exchange(control, &WorkerRequest::Scanout, &[], Takes::Fds)?;
    let scanout = match reply {
        WorkerReply::Scanout(scanout) => Ok(scanout),
        other => Err(unexpected(&other)),
    };
    Ok((scanout, fds))
}

/// State of a vGPU, and where its video memory is.
#[derive(Debug)]
pub struct SavedWorker {
    /// File with the state in JSON.
    pub state: OwnedFd,
    /// File of the video memory.
    pub memory: OwnedFd,
    /// Video memory in its file.
    pub range: MemoryRange,
}

/// Asks whether a worker's vGPU can be saved now.
pub fn check_save(control: &Path) -> io::Result<()> {
    done(control, &WorkerRequest::CheckSave)
}

/// Asks the guest to checkpoint its CUDA programs. Returns whether no program uses the vGPU any
/// more.
pub fn checkpoint(control: &Path) -> io::Result<bool> {
    match request(control, &WorkerRequest::Checkpoint, &[])? {
        WorkerReply::Checkpoint { done } => Ok(done),
        other => Err(unexpected(&other)),
    }
}

/// Stops the work of a worker's vGPU.
pub fn pause(control: &Path) -> io::Result<()> {
    done_in_time(control, &WorkerRequest::Pause)
}

/// Continues the work of a worker's vGPU.
pub fn resume(control: &Path) -> io::Result<()> {
    done_in_time(control, &WorkerRequest::Resume)
}

/// Resets a worker's vGPU and clears its video memory.
pub fn discard(control: &Path) -> io::Result<()> {
    done_in_time(control, &WorkerRequest::Discard)
}

/// Lets another process of the VM attach.
pub fn begin_handover(control: &Path) -> io::Result<()> {
    done_in_time(control, &WorkerRequest::BeginHandover)
}

/// Gives the vGPU to the process that has attached. Returns the writes to configuration space that
/// the process must learn of.
pub fn adopt(control: &Path) -> io::Result<Vec<ConfigWrite>> {
    match with_memory(control, &WorkerRequest::Adopt, &[])? {
        (WorkerReply::Adopted { config }, _) => Ok(config),
        (other, _) => Err(unexpected(&other)),
    }
}

/// Gives the vGPU back to the old process.
pub fn abandon_handover(control: &Path) -> io::Result<()> {
    done_in_time(control, &WorkerRequest::AbandonHandover)
}

/// Requests the state of a paused vGPU.
pub fn save(control: &Path) -> io::Result<SavedWorker> {
    match with_memory(control, &WorkerRequest::Save, &[])? {
        (WorkerReply::Saved(range), fds) => {
            let [state, memory] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| missing())?;
            Ok(SavedWorker { state, memory, range })
        }
        (other, _) => Err(unexpected(&other)),
    }
}

/// Restores the state in a file. Returns the file of the video memory, to be filled.
pub fn restore(control: &Path, state: BorrowedFd<'_>) -> io::Result<(Restored, OwnedFd)> {
    match with_memory(control, &WorkerRequest::Restore, &[state])? {
        (WorkerReply::Restored(restored), fds) => {
            let [memory] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| missing())?;
            Ok((restored, memory))
        }
        (other, _) => Err(unexpected(&other)),
    }
}

/// Begins or ends a record of the guest memory that the vGPU writes.
pub fn log_writes(control: &Path, enabled: bool) -> io::Result<()> {
    done(control, &WorkerRequest::LogWrites { enabled })
}

/// Guest memory that a vGPU has written.
#[derive(Debug)]
pub struct Written {
    /// File of [`guest_pieces`](crate::guest_pieces).
    pub pieces: OwnedFd,
    /// Address from which there is more. A worker that was compromised can say so for ever.
    pub next: Option<u64>,
}

/// Requests the guest memory that a paused vGPU has written, from an address on.
pub fn written(control: &Path, from: u64) -> io::Result<Written> {
    match with_memory(control, &WorkerRequest::Written { from }, &[])? {
        (WorkerReply::Written { next }, fds) => {
            let [pieces] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| missing())?;
            Ok(Written { pieces, next })
        }
        (other, _) => Err(unexpected(&other)),
    }
}

/// Writes guest memory of a restored vGPU.
pub fn fill_guest(control: &Path, pieces: BorrowedFd<'_>) -> io::Result<()> {
    match with_memory(control, &WorkerRequest::FillGuest, &[pieces])? {
        (WorkerReply::Done, _) => Ok(()),
        (other, _) => Err(unexpected(&other)),
    }
}

/// Connection for copies between the video memory of a paused vGPU and its staging memory.
#[derive(Debug)]
pub struct StagedCopier(SeqPacket);

impl StagedCopier {
    /// Connects to a worker.
    pub fn connect(control: &Path) -> io::Result<Self> {
        SeqPacket::connect_without_fds(control, SAVE_TIMEOUT).map(Self)
    }

    /// Makes a copy, and waits for its end.
    pub fn copy(&self, copy: StagedCopy) -> io::Result<()> {
        let request = WorkerRequest::CopyStaged(copy);
        accept_done(exchange_on(&self.0, &request, &[], Takes::NoFds)?.0)
    }
}

/// Sends a request whose reply has files. A worker that was compromised can pass any: reading one
/// of a file system in user space waits for its server, so files that are no shared memory are
/// refused.
fn with_memory(
    control: &Path,
    message: &WorkerRequest,
    fds: &[BorrowedFd<'_>],
) -> io::Result<(WorkerReply, Vec<OwnedFd>)> {
    let (reply, fds) = exchange_within(SAVE_TIMEOUT, control, message, fds, Takes::Fds)?;
    if fds.iter().all(|fd| foreign_fds::is_memory(fd.as_fd())) {
        return Ok((reply, fds.into_iter().map(ForeignFd::into_trusted).collect()));
    }
    passed_files::refuse(control, fds);
    Err(io::Error::other("The worker passes a file that is not memory"))
}

fn missing() -> io::Error {
    io::Error::other("The worker passes no file")
}

fn done(control: &Path, message: &WorkerRequest) -> io::Result<()> {
    accept_done(request(control, message, &[])?)
}

/// Sends a request that can take as long as the work of the vGPU, or as its memory is large.
fn done_in_time(control: &Path, message: &WorkerRequest) -> io::Result<()> {
    accept_done(exchange_within(SAVE_TIMEOUT, control, message, &[], Takes::NoFds)?.0)
}

fn accept_done(reply: WorkerReply) -> io::Result<()> {
    match reply {
        WorkerReply::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

/// Tells a worker to make room for another one. It leaves even if nothing waits for its answer, so
/// the wait is as long as for the next worker.
pub fn leave(control: &Path) -> io::Result<()> {
    let answer = exchange_within(START_TIMEOUT, control, &WorkerRequest::Leave, &[], Takes::NoFds);
    accept_done(answer?.0)
}

/// A program that an anchor has taken for its next worker.
#[derive(Debug)]
pub struct TakenProgram(SeqPacket);

/// Passes the program of the next worker to an anchor.
pub fn pass_program(upgrade: &Path, program: BorrowedFd<'_>) -> io::Result<TakenProgram> {
    let socket = SeqPacket::connect_without_fds(upgrade, START_TIMEOUT)?;
    socket.send(&Message::Keep(Key::PROGRAM).encode(), &[program])?;
    match receive(&socket)? {
        Some(Message::Keep(Key::PROGRAM)) => Ok(TakenProgram(socket)),
        _ => Err(io::Error::other("The anchor refuses the program")),
    }
}

impl TakenProgram {
    /// Waits for a worker of the program. Returns false if none has begun to work, and one of the
    /// program before continues.
    pub fn works(&self) -> io::Result<bool> {
        match receive(&self.0)? {
            Some(Message::WORKS) => Ok(true),
            Some(Message::FAILED) => Ok(false),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Receives a message of an anchor.
fn receive(socket: &SeqPacket) -> io::Result<Option<Message>> {
    let mut buffer = [0; Message::BYTES + 1];
    let packet = socket.recv(&mut buffer)?;
    Ok(packet.and_then(|packet| Message::decode(&buffer[..packet.len])))
}

/// Tells a worker to exit.
pub fn stop(control: &Path) -> io::Result<()> {
    done(control, &WorkerRequest::Stop)
}

/// Passes a new connection to the GPU to a worker.
pub fn attach(control: &Path, gpu: BorrowedFd<'_>) -> io::Result<()> {
    match request(control, &WorkerRequest::Attach, &[gpu])? {
        WorkerReply::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

/// Whether a reply has descriptors.
#[derive(Clone, Copy, Debug)]
enum Takes {
    Fds,
    NoFds,
}

/// Sends a request whose reply has no descriptors.
fn request(
    control: &Path,
    message: &WorkerRequest,
    fds: &[BorrowedFd<'_>],
) -> io::Result<WorkerReply> {
    Ok(exchange(control, message, fds, Takes::NoFds)?.0)
}

fn exchange(
    control: &Path,
    message: &WorkerRequest,
    fds: &[BorrowedFd<'_>],
    takes: Takes,
) -> io::Result<(WorkerReply, Vec<ForeignFd>)> {
    exchange_within(TIMEOUT, control, message, fds, takes)
}

fn exchange_within(
    timeout: Duration,
    control: &Path,
    message: &WorkerRequest,
    fds: &[BorrowedFd<'_>],
    takes: Takes,
) -> io::Result<(WorkerReply, Vec<ForeignFd>)> {
    // The listener of a worker that is stopped has no room for a connection after some time.
    let late = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => silent(),
        _ => error,
    };
    if matches!(takes, Takes::NoFds) {
        let socket = SeqPacket::connect_without_fds(control, timeout).map_err(late)?;
        return exchange_on(&socket, message, fds, takes);
    }
    passed_files::check(control)?;
    let socket = SeqPacket::connect_with_timeout(control, timeout).map_err(late)?;
    let result = exchange_on(&socket, message, fds, takes);
    // Too many files, or a reply that is none.
    if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidData) {
        passed_files::refuse(control, []);
    }
    result
}

fn exchange_on(
    socket: &SeqPacket,
    message: &WorkerRequest,
    fds: &[BorrowedFd<'_>],
    takes: Takes,
) -> io::Result<(WorkerReply, Vec<ForeignFd>)> {
    socket.send(&serde_json::to_vec(message)?, fds)?;
    let mut buffer = vec![0; MAX_PACKET];
    let packet = match takes {
        Takes::Fds => socket.recv_with_fds(&mut buffer),
        Takes::NoFds => socket.recv(&mut buffer),
    };
    let packet = packet.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => silent(),
        _ => error,
    })?;
    reply_in(packet, &buffer)
}

/// Returns the reply in a packet that was received, with its descriptors.
fn reply_in(packet: Option<Packet>, buffer: &[u8]) -> io::Result<(WorkerReply, Vec<ForeignFd>)> {
    let packet = packet.ok_or_else(|| {
        io::Error::new(io::ErrorKind::UnexpectedEof, "The worker closed the connection")
    })?;
    match serde_json::from_slice(&buffer[..packet.len]) {
        Ok(reply) => Ok((reply, packet.fds)),
        Err(error) => {
            foreign_fds::close_all(packet.fds);
            // The text may quote the reply.
            let error = one_line(&error.to_string(), MAX_TEXT);
            Err(io::Error::new(io::ErrorKind::InvalidData, error))
        }
    }
}

fn unexpected(reply: &WorkerReply) -> io::Error {
    match reply {
        WorkerReply::Error { message } => io::Error::other(one_line(message, MAX_TEXT)),
        other => {
            let reply = format!("Unexpected reply of the worker: {other:?}");
            io::Error::other(one_line(&reply, MAX_TEXT))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
