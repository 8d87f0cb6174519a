//! Anchor of one vGPU: a process that holds what must not end with a worker, and starts the next
//! worker.
//!
//! It holds the listening sockets, the connection to the GPU, the VM's connection, the descriptors
//! of guest memory and interrupts, and the journal. It reads nothing of a guest: its worker sends
//! keys of descriptors, in packets of one length. It can open no file but its program's and those of
//! its C library, and makes few system calls (docs/decisions/0023-anchor.md).

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use vendor_backends::mem::sealed_memfd;
use vendor_backends::seqpacket::SeqPacket;

use crate::spawn::{self, Limits, Process};
use crate::worker::journal;
use crate::worker::journal::kept::{Kept, Message};
use crate::worker::sandbox;
use crate::worker::{WorkerArgs, WorkerFds};
use vgpud_host::users::Account;

/// A worker that works for less may die of what its predecessor left.
const SHORT_LIFE: Duration = Duration::from_millis(5);
/// Longest time that a worker may take to end after it has closed its socket, or was killed.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// Exit status of a process after a panic.
const PANIC: i32 = 101;
/// Limit of workers in a row that lived shortly.
const MAX_SHORT_LIVES: u32 = 8;

/// Starts workers until one exits by itself, or the manager ends the vGPU.
///
/// # Errors
///
/// Fails if the workers die too fast, or one cannot continue: the manager then begins anew.
pub fn run(args: &WorkerArgs) -> Result<()> {
    spawn::reserve_descriptors().context("Cannot reserve descriptors")?;
    let fds = args.take()?;
    let label = std::env::args().next().unwrap_or_default();
    let label = label.strip_prefix("vgpud[").and_then(|name| name.strip_suffix(']'));
    let label = label.unwrap_or("worker").to_owned();
    let journal = sealed_memfd(c"vgpu-journal", journal::BYTES).context("Cannot make a journal")?;
    let mut stop = SigSet::empty();
    stop.add(Signal::SIGTERM);
    stop.thread_block().context("Cannot block signals")?;
    let stop = SignalFd::with_flags(&stop, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK);
    let stop = stop.context("Cannot wait for signals")?;
    sandbox::enter_anchor(&programs());
    let mut anchor = Anchor { label, fds, journal, stop, kept: Kept::default(), works_since: None };
    let mut short_lives = 0;
    loop {
        anchor.works_since = None;
        let Some(how) = anchor.serve_with_worker()? else { return Ok(()) };
        let lived = anchor.works_since.is_some_and(|since| since.elapsed() >= SHORT_LIFE);
        short_lives = if lived { 0 } else { short_lives + 1 };
        if short_lives > MAX_SHORT_LIVES {
            bail!("The worker died {short_lives} times in a row, at last by {how}");
        }
        log::warn!("The worker died ({how}); another one continues");
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

struct Anchor {
    label: String,
    fds: WorkerFds,
    journal: OwnedFd,
    /// SIGTERM: the manager ends the vGPU.
    stop: SignalFd,
    kept: Kept,
    /// When the worker began to work.
    works_since: Option<Instant>,
}

impl Anchor {
    /// Starts a worker and keeps its descriptors until it ends. Returns how it died, or `None` if it
    /// was to end.
    fn serve_with_worker(&mut self) -> Result<Option<String>> {
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
            return Ok(None);
        }
        // What the worker sent before it died.
        while self.receive(&socket)? {}
        let status = process.reap()?;
        match status.code() {
            Some(0) => Ok(None),
            // A panic is a death; an error is the worker's decision.
            Some(code) if code != PANIC => bail!("The worker cannot continue ({status})"),
            _ => Ok(Some(status.to_string())),
        }
    }

    fn start(&self, socket: &SeqPacket) -> std::io::Result<Process> {
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
        spawn::role(&self.label, &args, &fds, limits)
    }

    /// Keeps descriptors until the worker ends, or the manager ends the vGPU: then returns true.
    fn keep_until_end(&mut self, socket: &SeqPacket, process: &Process) -> Result<bool> {
        let ended = process.watch()?;
        loop {
            let mut fds = [
                PollFd::new(socket.as_fd(), PollFlags::POLLIN),
                PollFd::new(ended.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.stop.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
            let [has_packet, has_ended, is_stopped] = fds.map(|fd| fd.any() == Some(true));
            if is_stopped {
                return Ok(true);
            }
            if has_ended {
                return Ok(false);
            }
            // A worker that closes its socket is about to end. One that lives on is taken over.
            if has_packet && !self.receive(socket)? && !process.wait(END_TIMEOUT) {
                process.signal(Signal::SIGKILL);
                let _ = process.wait(END_TIMEOUT);
            }
        }
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
