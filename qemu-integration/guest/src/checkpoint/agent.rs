//! Agent that carries out the host's requests to checkpoint the VM's CUDA programs.
//!
//! The guest's driver passes requests and answers (`/dev/tessera-checkpoint`). The processes that
//! are checkpointed are recorded in a file of `/run`, which is saved with the VM: an agent that is
//! started again restores them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use mdev_core::abi::control::{CHECKPOINT_REASON_BYTES, CHECKPOINT_WANTED, CheckpointState};
use mdev_core::untrusted::{TABLE, one_line, read_text};

use super::{Process, Steps, users};

/// The driver's node.
const NODE: &str = "/dev/tessera-checkpoint";
/// Processes that are checkpointed: a line with the process id for each. A name could hold a line
/// of its own: the process chooses its name.
const RECORD: &str = "/run/vgpu-guest.checkpointed";
/// Longest quote of a line that is no process id, in characters.
const MAX_QUOTE: usize = 40;
/// How often programs may begin to use the vGPU while others are checkpointed.
const ROUNDS: usize = 4;

/// Way to the host.
pub trait Host: std::fmt::Debug {
    /// Waits for the next request. Returns whether the programs are to be checkpointed.
    fn next_request(&mut self) -> io::Result<bool>;

    /// Answers. [`CheckpointState::Done`] fails with [`ErrorKind::ResourceBusy`] while a process
    /// has one of the device files open.
    fn answer(&mut self, state: CheckpointState, reason: &str) -> io::Result<()>;

    /// Returns the processes that use the vGPU.
    fn users(&self) -> io::Result<Vec<Process>>;
}

/// The driver's node.
#[derive(Debug)]
pub struct Node(File);

impl Node {
    /// Opens the node, which one agent can have.
    pub fn open() -> Result<Self> {
        let node = OpenOptions::new().read(true).write(true).open(NODE);
        node.map(Self).map_err(|error| {
            let why = match (error.kind(), error.raw_os_error()) {
                (ErrorKind::NotFound, _) => "load the module tessera_guest of this release",
                (ErrorKind::PermissionDenied, _) => "run as root",
                (ErrorKind::ResourceBusy, _) => "another agent has it",
                (_, Some(libc::EOPNOTSUPP)) => "the host's release cannot save CUDA programs",
                _ => "is the vGPU there?",
            };
            anyhow::Error::new(error).context(format!("Cannot open {NODE}: {why}"))
        })
    }
}

impl Host for Node {
    fn next_request(&mut self) -> io::Result<bool> {
        let mut request = [0; 4];
        self.0.read_exact(&mut request)?;
        Ok(u32::from_ne_bytes(request) & CHECKPOINT_WANTED != 0)
    }

    fn answer(&mut self, state: CheckpointState, reason: &str) -> io::Result<()> {
        let mut end = reason.len().min(CHECKPOINT_REASON_BYTES);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let answer = [&(state as u32).to_ne_bytes()[..], &reason.as_bytes()[..end]].concat();
        self.0.write_all(&answer)
    }

    fn users(&self) -> io::Result<Vec<Process>> {
        users::find(&users::majors()?)
    }
}

/// The agent.
#[derive(Debug)]
pub struct Agent<'a> {
    host: &'a mut dyn Host,
    steps: &'a dyn Steps,
    record: PathBuf,
    /// Processes that are checkpointed.
    waiting: Vec<Process>,
}

impl<'a> Agent<'a> {
    /// Creates an agent, with the processes that an earlier one has checkpointed.
    pub fn new(host: &'a mut dyn Host, steps: &'a dyn Steps) -> Self {
        Self::with_record(host, steps, RECORD.into())
    }

    pub(super) fn with_record(
        host: &'a mut dyn Host,
        steps: &'a dyn Steps,
        record: PathBuf,
    ) -> Self {
        let text = read_text(&record, TABLE).unwrap_or_else(|error| {
            if error.kind() != ErrorKind::NotFound {
                eprintln!("vgpu-guest: Cannot read {}: {error}", record.display());
            }
            String::new()
        });
        let waiting = recorded(&text);
        Self { host, steps, record, waiting }
    }

    /// Carries out requests until the driver fails.
    pub fn run(&mut self) -> Result<()> {
        eprintln!("vgpu-guest: Waiting for requests of the host");
        loop {
            self.serve().context("The vGPU's driver has ended the agent")?;
        }
    }

    /// Carries out the next request.
    pub(super) fn serve(&mut self) -> io::Result<()> {
        if !self.host.next_request()? {
            // Programs that wait to open a device file, and those that are restored, may go on.
            self.host.answer(CheckpointState::Ready, "")?;
            return self.restore();
        }
        if let Err(reason) = self.checkpoint() {
            eprintln!("vgpu-guest: CUDA programs are not checkpointed: {reason}");
            self.restore()?;
            self.host.answer(CheckpointState::Refused, &reason)?;
        }
        Ok(())
    }

    /// Checkpoints all processes that use the vGPU. Fails with the reason why not.
    fn checkpoint(&mut self) -> Result<(), String> {
        let failed = |error: io::Error| error.to_string();
        for _ in 0..ROUNDS {
            let users = self.host.users().map_err(failed)?;
            // A process can change its name.
            let is_waiting =
                |user: &&Process| self.waiting.iter().any(|process| process.pid == user.pid);
            if let Some(process) = users.iter().find(is_waiting) {
                return Err(format!("{process} keeps the vGPU's files open"));
            }
            super::checkpoint(self.steps, &users).map_err(|refusal| refusal.to_string())?;
            self.waiting.extend(users);
            let record = self.record.display();
            self.write_record().map_err(|error| format!("{record}: {error}"))?;
            match self.host.answer(CheckpointState::Done, "") {
                Ok(()) => return Ok(()),
                // A program has begun meanwhile.
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Err("programs keep beginning to use the vGPU".to_owned())
    }

    /// Restores all processes.
    fn restore(&mut self) -> io::Result<()> {
        for refusal in super::restore(self.steps, &self.waiting) {
            eprintln!("vgpu-guest: {refusal}");
        }
        self.waiting.clear();
        self.write_record()
    }

    fn write_record(&self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return match fs::remove_file(&self.record) {
                Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        }
        let lines = self.waiting.iter().map(|process| format!("{}\n", process.pid));
        fs::write(&self.record, lines.collect::<String>())
    }
}

/// Returns the processes of a record. Lines that are no process id are left out.
fn recorded(text: &str) -> Vec<Process> {
    let process = |line: &str| {
        let pid = line.parse().ok().filter(|pid: &u32| pid.to_string() == line);
        if pid.is_none() {
            eprintln!("vgpu-guest: {:?} is no process id in {RECORD}", one_line(line, MAX_QUOTE));
        }
        Some(Process::named(pid?).unwrap_or(Process { pid: pid?, name: String::new() }))
    };
    text.lines().filter_map(process).collect()
}
