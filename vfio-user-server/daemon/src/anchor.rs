//! Anchor of one vGPU: a process that holds what must not end with a worker, and starts the next
//! worker.
//!
//! It holds the listening sockets, the connection to the GPU, the VM's connection, the descriptors
//! of guest memory and interrupts, and the journal. It interprets nothing of a guest: its worker
//! sends keys of descriptors, in packets of one length. It can open no file but its program's,
//! those of its C library and the device nodes of its GPU, and makes few system calls
//! (docs/decisions/0023-anchor.md).
//!
//! A manager of another release passes its program on a socket that only its user can connect to.
//! The next worker is of that program. If it does not begin to work, one of the program before
//! does.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use foreign_fds::ForeignFd;
use ipc::mem::sealed_memfd;
use ipc::seqpacket::{SeqPacket, SeqPacketListener};
use log::Level;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{MsgFlags, Shutdown, getsockopt, setsockopt, shutdown, sockopt};
use nix::sys::time::TimeVal;
use vendor_backends::backend::BACKENDS;

use self::restarts::Restarts;
use crate::spawn::{self, Limits, Process};
use crate::worker::journal;
use crate::worker::journal::descriptors::{Descriptors, Key, Message};
use crate::worker::sandbox;
use crate::worker::{self, End, WorkerArgs, WorkerFds};
use vgpud_host::users::Account;

mod restarts;

/// A worker that works for less may die of what its predecessor left.
const SHORT_LIFE: Duration = Duration::from_millis(5);
/// Longest time that a worker may take to end after it has closed its socket, or was killed.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest time for which a manager may keep its connection without a program.
const PROGRAM_TIMEOUT: TimeVal = TimeVal::new(1, 0);
/// Exit status of a process after a panic.
const PANIC: i32 = 101;
/// Limit of workers in a row that lived shortly.
const MAX_SHORT_LIVES: u32 = 8;
/// Limit of bytes that are received from the VM at the end: more than a socket holds.
const MAX_DISCARDED: usize = 16 << 20;

/// Serves as the anchor of a vGPU until it ends.
///
/// # Errors
///
/// Fails if the workers die too fast, or one cannot continue: the manager then begins anew.
pub fn run(args: &WorkerArgs) -> Result<()> {
    spawn::reserve_descriptors().context("Cannot reserve descriptors")?;
    let fds = args.take()?;
    let spec = worker::read_spec(&fds.spec)?;
    let upgrade = args.upgrade_fd.map(worker::inherited).transpose()?;
    let upgrade =
        upgrade.map(|fd| spawn::listening(fd).map(SeqPacketListener::from)).transpose()?;
    if let Some(upgrade) = &upgrade {
        fcntl(upgrade, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).context("Cannot use a listener")?;
    }
    let label = std::env::args().next().unwrap_or_default();
    let label = label.strip_prefix("vgpud[").and_then(|name| name.strip_suffix(']'));
    let label = label.unwrap_or("worker").to_owned();
    let journal = sealed_memfd(c"vgpu-journal", journal::BYTES).context("Cannot make a journal")?;
    let mut stop = SigSet::empty();
    stop.add(Signal::SIGTERM);
    stop.thread_block().context("Cannot block signals")?;
    let stop = SignalFd::with_flags(&stop, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK);
    let stop = stop.context("Cannot wait for signals")?;
    sandbox::enter_anchor(&programs(), &BACKENDS.worker_files(&spec.backend));
    let mut anchor = Anchor {
        label,
        fds,
        journal,
        stop,
        upgrade,
        manager: spec.manager,
        program: None,
        tried_program: None,
        next_program: None,
        upgrader: None,
        kept: Descriptors::default(),
        works_since: None,
    };
    let ended = anchor.serve();
    let session = anchor.kept.take(Key::SESSION);
    if let Some(session) = &session {
        empty_session(session.as_fd());
    }
    // The end of the process closes all descriptors, and waits for no socket.
    std::mem::forget((anchor, session));
    ended
}

/// Empties the VM's connection. Where it closes with messages that were not received, QEMU 11.1
/// ends with its VM.
fn empty_session(socket: BorrowedFd<'_>) {
    let mut left = MAX_DISCARDED;
    // The VM sends no more. What comes of a descriptor that is no such socket does not matter.
    let mut is_open = shutdown(socket.as_raw_fd(), Shutdown::Both).is_ok();
    while is_open && left > 0 {
        let mut buffer = [0; 4096];
        let flags = MsgFlags::MSG_DONTWAIT.bits();
        let received = foreign_fds::receive(socket, &mut buffer, 0, flags, drop);
        let discarded = received.map_or(0, |received| received.bytes);
        left = left.saturating_sub(discarded);
        is_open = discarded > 0;
    }
}

/// Returns what a worker's start reads: its program and the C library.
fn programs() -> Vec<PathBuf> {
    // The link leads to the program also where its folder is closed to this user.
    let program = "/proc/self/exe";
    let library = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"];
    let all = [program, "/dev/random", "/dev/urandom"].into_iter().chain(library);
    all.map(PathBuf::from).filter(|path| path.exists()).collect()
}

/// How a worker has ended.
enum Ended {
    /// The vGPU ends.
    Stopped,
    /// The manager told the worker to make room for another one.
    Left,
    /// It died, by this status.
    Died(String),
}

struct Anchor {
    label: String,
    fds: WorkerFds,
    journal: OwnedFd,
    /// SIGTERM: the manager ends the vGPU.
    stop: SignalFd,
    /// Socket on which the manager passes programs.
    upgrade: Option<SeqPacketListener>,
    /// User of the manager.
    manager: u32,
    /// Program of the workers, if it is not this one.
    program: Option<OwnedFd>,
    /// Program of the running worker, until that works.
    tried_program: Option<OwnedFd>,
    /// Program of the next worker.
    next_program: Option<OwnedFd>,
    /// Connection of the manager that has passed a program, until that works.
    upgrader: Option<SeqPacket>,
    kept: Descriptors,
    /// When the worker began to work.
    works_since: Option<Instant>,
}

impl Anchor {
    /// Starts workers until one exits by itself, or the manager ends the vGPU.
    fn serve(&mut self) -> Result<()> {
        let mut short_lives = 0;
        let mut restarts = Restarts::new(Instant::now());
        loop {
            self.works_since = None;
            let ended = self.serve_with_worker();
            let has_failed = self.tried_program.take().is_some();
            let (level, how) = match ended {
                Ok(Ended::Stopped) => return Ok(()),
                // A worker that was compromised can leave at once, again and again.
                Ok(Ended::Left) => (Level::Info, "it left".to_owned()),
                Ok(Ended::Died(how)) => (Level::Warn, how),
                Err(error) if has_failed => (Level::Error, format!("{error:#}")),
                Err(error) => return Err(error),
            };
            if self.is_stopped_within(restarts.pause(Instant::now()))? {
                return Ok(());
            }
            if has_failed {
                log::error!("The new program cannot continue ({how}); the one before does");
                self.tell_upgrader(Message::FAILED);
                continue;
            }
            let lived = self.works_since.is_some_and(|since| since.elapsed() >= SHORT_LIFE);
            short_lives = if lived { 0 } else { short_lives + 1 };
            if short_lives > MAX_SHORT_LIVES {
                bail!("The worker ended {short_lives} times in a row, at last: {how}");
            }
            log::log!(level, "The worker ended ({how}); another one continues");
        }
    }

    /// Waits for the manager to end the vGPU, for `time` at most. Returns whether it does.
    fn is_stopped_within(&self, time: Duration) -> Result<bool> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let mut stop = [PollFd::new(self.stop.as_fd(), PollFlags::POLLIN)];
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut stop, timeout) {
                Ok(0) if left.is_zero() => return Ok(false),
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Starts a worker and keeps its descriptors until it ends.
    fn serve_with_worker(&mut self) -> Result<Ended> {
        let (socket, theirs) = SeqPacket::pair().context("Cannot make a socket")?;
        let process = self.start(&theirs).context("Cannot start a worker")?;
        drop(theirs);
        // A worker that has died already does not read them.
        if let Err(error) = self.kept.send(&socket) {
            log::debug!("The worker does not take its descriptors: {error}");
        }
        let stopped = self.keep_until_end(&socket, &process)?;
        if stopped {
            process.signal(Signal::SIGKILL);
            // A worker that waits in the kernel keeps the anchor, so that the manager knows.
            while !process.wait(Duration::from_secs(3600)) {}
            return Ok(Ended::Stopped);
        }
        // What the worker sent before it died.
        while self.receive(&socket)? {}
        let status = process.reap()?;
        match status.code() {
            Some(0) => Ok(Ended::Stopped),
            Some(code) if code == i32::from(End::LEFT) => Ok(Ended::Left),
            // A panic is a death; an error is the worker's decision.
            Some(code) if code != PANIC => bail!("The worker cannot continue ({status})"),
            _ => Ok(Ended::Died(status.to_string())),
        }
    }

    fn start(&mut self, socket: &SeqPacket) -> io::Result<Process> {
        self.tried_program = self.next_program.take();
        let WorkerFds { spec, listen, control, programs, gpu } = &self.fds;
        let all = [
            ("--spec-fd", Some(spec.as_fd())),
            ("--listen-fd", Some(listen.as_fd())),
            ("--control-fd", Some(control.as_fd())),
            ("--programs-fd", programs.as_ref().map(AsFd::as_fd)),
            ("--gpu-fd", gpu.as_ref().map(AsFd::as_fd)),
            ("--journal-fd", Some(self.journal.as_fd())),
            ("--anchor-fd", Some(socket.as_fd())),
        ];
        let (fds, args) = spawn::arguments("worker", all);
        let limits = Limits {
            files: getrlimit(Resource::RLIMIT_NOFILE)?.0,
            threads: None,
            may_lock_memory: true,
            is_oom_protected: true,
            ends_with_parent: true,
            user: Account::own(),
        };
        match self.tried_program.as_ref().or(self.program.as_ref()) {
            Some(program) => spawn::role_of_file(program.as_fd(), &self.label, &args, &fds, limits),
            None => spawn::role(&self.label, &args, &fds, None, limits),
        }
    }

    /// Keeps descriptors until the worker ends, or the manager ends the vGPU: then returns true.
    fn keep_until_end(&mut self, socket: &SeqPacket, process: &Process) -> Result<bool> {
        let ended = process.watch()?;
        loop {
            let upgrade = self.upgrade.as_ref().map_or(self.stop.as_fd(), AsFd::as_fd);
            let mut fds = [
                PollFd::new(socket.as_fd(), PollFlags::POLLIN),
                PollFd::new(ended.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.stop.as_fd(), PollFlags::POLLIN),
                PollFd::new(upgrade, PollFlags::POLLIN),
            ];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
            let [has_packet, has_ended, is_stopped, is_upgraded] =
                fds.map(|fd| fd.any() == Some(true));
            if is_stopped {
                return Ok(true);
            }
            if has_ended {
                return Ok(false);
            }
            if is_upgraded && let Err(error) = self.take_program() {
                log::warn!("A new program is refused: {error}");
            }
            // A worker that closes its socket is about to end. One that lives on is taken over.
            if has_packet && !self.receive(socket)? && !process.wait(END_TIMEOUT) {
                log::error!("The worker sends what its anchor cannot keep, and is killed");
                process.signal(Signal::SIGKILL);
                let _ = process.wait(END_TIMEOUT);
            }
        }
    }

    /// Takes the program of the next worker from the manager. The answer is the same packet, and
    /// once the program was started, [`Message::WORKS`] or [`Message::FAILED`].
    fn take_program(&mut self) -> io::Result<()> {
        let Some(listener) = &self.upgrade else { return Ok(()) };
        let socket = listener.accept()?;
        let uid = getsockopt(&socket, sockopt::PeerCredentials)?.uid();
        if uid != 0 && uid != self.manager {
            return Err(io::Error::other(format!("user {uid} is not the manager's")));
        }
        setsockopt(&socket, sockopt::ReceiveTimeout, &PROGRAM_TIMEOUT)?;
        let mut buffer = [0; Message::BYTES + 1];
        let packet = socket.recv_with_fds(&mut buffer)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let message = Message::decode(&buffer[..packet.len]);
        // The manager is trusted.
        let program = packet.fds.into_iter().next().map(ForeignFd::into_trusted);
        let (Some(Message::Keep(Key::PROGRAM)), Some(program)) = (message, program) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        self.next_program = Some(program);
        self.upgrader = Some(socket);
        self.answer_upgrader(Message::Keep(Key::PROGRAM))
    }

    fn answer_upgrader(&self, message: Message) -> io::Result<()> {
        self.upgrader.as_ref().map_or(Ok(()), |socket| socket.try_send(&message.encode(), &[]))
    }

    /// Tells the manager what has become of its program.
    fn tell_upgrader(&mut self, message: Message) {
        if let Err(error) = self.answer_upgrader(message) {
            log::debug!("The manager does not wait for its program: {error}");
        }
        self.upgrader = None;
    }

    /// Carries out a message of the worker. Returns false if there is none.
    fn receive(&mut self, socket: &SeqPacket) -> Result<bool> {
        let mut buffer = [0; Message::BYTES + 1];
        match socket.try_recv_with_fds(&mut buffer) {
            Ok(Some(packet)) => {
                let message = Message::decode(&buffer[..packet.len]);
                let fd = packet.fds.into_iter().next();
                if message == Some(Message::WORKS) {
                    self.works_since = Some(Instant::now());
                    if let Some(program) = self.tried_program.take() {
                        self.program = Some(program);
                        self.tell_upgrader(Message::WORKS);
                    }
                    return Ok(true);
                }
                Ok(message.is_some_and(|message| self.kept.apply(message, fd)))
            }
            Ok(None) => Ok(false),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_may_read_its_program_and_library_only() {
        let programs = programs();
        assert!(programs.contains(&PathBuf::from("/proc/self/exe")));
        assert!(
            programs.iter().all(|path| !path.starts_with("/home") && !path.starts_with("/run"))
        );
    }
}
