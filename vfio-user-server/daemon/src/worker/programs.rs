//! CUDA programs on the vGPU: their connections, their open files, and the driver's device files.
//!
//! A program's process has one connection for requests and one socket for each open file. A vGPU
//! serves either a VM or programs. When the last program has left, the vGPU gets new memory.
//!
//! * `requests`: requests, each of which has its effect once
//! * `adoption`: adopting an earlier worker's programs
//! * `instance`: what tells a process from a later one with the same id
//! * `throttle`: processes that wait for CPU time
//! * `unread`: replies with descriptors that processes have not received

mod adoption;
mod instance;
mod requests;
mod throttle;
mod unread;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use anyhow::{Context, Result};
use ipc::seqpacket::{SeqPacket, SeqPacketListener};
use mdev_core::gpu::Pending;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};
use programs::FrontEnd;
use programs::change_map::ChangeMap;
use programs::front_end::{FrontEndSpec, MemoryFileId};

use self::adoption::Begun;
pub use self::throttle::Throttled;
use self::unread::{CutOff, Unread};
use super::doorbell::Doorbell;
use super::front_end;
use super::function::Function;
pub use super::journal::Source;
use super::journal::descriptors::Key;
use super::journal::{Answer, OpenFile, ProgramChanges, ProgramState};
use super::queue_thread::ProgramsInVm;
use super::request_budget;
use crate::cpu_budget::Budget;
use crate::worker_protocol::{MAX_PROCESSES, ProgramsStatus};
use vgpud_api::AttachedClient;

/// Limit of processes on a vGPU.
pub const MAX_CONNECTIONS: usize = 64;

/// Process on the vGPU.
#[derive(Debug)]
struct Connection {
    socket: SeqPacket,
    process: AttachedClient,
    /// See [`instance::of`].
    instance: u64,
    /// The process has sent its hello.
    greeted: bool,
    /// CPU time that its requests may take.
    budget: Budget,
    /// Its requests wait for the budget: its socket is not watched.
    waits: bool,
    unread: Unread,
}

/// What to watch from now on.
#[derive(Debug, Default)]
pub struct Changes {
    /// New descriptors.
    pub watch: Vec<Source>,
    /// Descriptors that are no longer to be watched. They are closed when this is dropped.
    pub unwatch: Vec<SeqPacket>,
}

/// CUDA programs on the vGPU.
#[derive(Debug)]
pub struct Programs {
    listener: SeqPacketListener,
    spec: FrontEndSpec,
    front_end: Box<dyn FrontEnd>,
    connections: ChangeMap<Source, Connection>,
    /// Connections that were cut off.
    cut_off: Vec<CutOff>,
    /// Files with the worker's ends of their sockets.
    files: ChangeMap<Source, (OpenFile, SeqPacket)>,
    last: Source,
    /// Reply to the last request, until the program has it.
    answer: Option<Answer>,
    /// What an earlier worker has begun.
    begun: Option<Begun>,
    /// Programs of the VM.
    in_vm: ProgramsInVm,
    doorbell: Option<Doorbell>,
    /// CPU time that the requests of all processes may take.
    budget: Budget,
    /// New processes wait for the budget: the listener is not watched.
    listener_waits: bool,
    /// Timer that ends waits for a budget.
    timer: TimerFd,
}

impl Programs {
    /// Creates the programs' side of a vGPU. The listener becomes non-blocking.
    pub fn new(
        spec: FrontEndSpec,
        listener: SeqPacketListener,
        in_vm: ProgramsInVm,
    ) -> Result<Self> {
        fcntl(&listener, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .context("Cannot use the programs' listener")?;
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer =
            TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).context("Cannot create a timer")?;
        Ok(Self {
            listener,
            front_end: front_end::create(&spec)?,
            spec,
            connections: ChangeMap::default(),
            cut_off: Vec::new(),
            files: ChangeMap::default(),
            last: Source(0),
            answer: None,
            begun: None,
            in_vm,
            doorbell: None,
            budget: Budget::new(request_budget::VGPU, Instant::now()),
            listener_waits: false,
            timer,
        })
    }

    /// Returns the listener.
    pub fn listener(&self) -> &SeqPacketListener {
        &self.listener
    }

    /// Returns a descriptor of a program.
    pub fn descriptor(&self, source: Source) -> Option<BorrowedFd<'_>> {
        let connection = self.connections.get(&source).map(|connection| connection.socket.as_fd());
        connection.or_else(|| Some(self.files.get(&source)?.1.as_fd()))
    }

    /// Returns a process that uses the vGPU.
    pub fn user(&self) -> Option<AttachedClient> {
        self.connections.values().next().map(|connection| connection.process)
    }

    /// Returns the processes of the host, or of the VM, and their memory, while there are any.
    pub fn status(&self) -> Option<ProgramsStatus> {
        if !self.are_present() {
            return self.in_vm.status();
        }
        let mut processes = self.front_end.video_bytes_by_process();
        for Connection { process, .. } in self.connections.values() {
            processes.entry(process.pid).or_default();
        }
        let vram_used_bytes = self.front_end.used_video_bytes();
        let processes = processes.into_iter().take(MAX_PROCESSES).collect();
        Some(ProgramsStatus { vram_used_bytes, processes, ..ProgramsStatus::default() })
    }

    /// Returns true while a process is connected or has a file open.
    pub fn are_present(&self) -> bool {
        !self.connections.is_empty() || !self.files.is_empty()
    }

    fn next_source(&mut self) -> Source {
        loop {
            let source = Source(self.last.0.wrapping_add(1) & (u32::MAX >> 1));
            self.last = source;
            if !self.connections.contains_key(&source) && !self.files.contains_key(&source) {
                return source;
            }
        }
    }

    /// Adds a process.
    pub fn connect(
        &mut self,
        function: &mut Function,
        socket: SeqPacket,
        process: AttachedClient,
    ) -> Changes {
        let source = self.next_source();
        if let Some(recorder) = function.programs_recorder() {
            recorder.keep(Key::connection(source.0), socket.as_fd());
        }
        if !self.are_present() {
            function.inner_mut().attach();
            self.start_doorbell(function);
        }
        let connection = self.connection(source, socket, process, false);
        self.connections.insert(source, connection);
        self.record(function);
        Changes { watch: vec![source], ..Default::default() }
    }

    fn connection(
        &self,
        source: Source,
        socket: SeqPacket,
        process: AttachedClient,
        greeted: bool,
    ) -> Connection {
        let budget = Budget::new(request_budget::PROCESS, Instant::now()).at_most(&self.budget);
        let (instance, unread) = (instance::of(&socket, source), Unread::default());
        Connection { socket, process, instance, greeted, budget, waits: false, unread }
    }

    fn start_doorbell(&mut self, function: &mut Function) {
        self.doorbell = Doorbell::start(&mut **function.inner_mut().client())
            .inspect_err(|error| log::warn!("The doorbell cannot be watched: {error:#}"))
            .unwrap_or(None);
    }

    /// Records what has changed.
    fn record(&mut self, function: &mut Function) {
        let are_present = self.are_present();
        if let (Some(recorder), function) = function.recording() {
            recorder.commit_programs(function, are_present.then_some(self));
        }
    }

    /// Notes what is going to be served: an adopting worker serves it before all else.
    fn begin(function: &mut Function, source: Source) {
        if let Some(recorder) = function.programs_recorder() {
            recorder.set_served(u64::from(source.0) + 1);
        }
    }

    /// Serves a descriptor that is readable.
    pub fn on_ready(&mut self, function: &mut Function, source: Source) -> Changes {
        let mut changes = Changes::default();
        let were_present = self.are_present();
        if self.files.contains_key(&source) {
            self.on_file(function, source, &mut changes);
        } else if let Err(error) = self.on_request(function, source, &mut changes) {
            self.remove(function, source, &error, &mut changes);
        }
        self.end_event(function, were_present);
        changes
    }

    /// Ends the use of the vGPU if no program is left, and records what has changed.
    fn end_event(&mut self, function: &mut Function, were_present: bool) {
        if were_present && !self.are_present() {
            self.leave(function);
        }
        self.record(function);
    }

    /// Removes a connection that has failed.
    fn remove(
        &mut self,
        function: &mut Function,
        source: Source,
        error: &io::Error,
        changes: &mut Changes,
    ) {
        let Some(connection) = self.connections.remove(&source) else { return };
        if error.kind() != io::ErrorKind::UnexpectedEof {
            log::debug!("Process {} is cut off: {error}", connection.process.pid);
        }
        self.cut_off.extend(CutOff::new(&connection.socket, connection.process.pid));
        if let Some(recorder) = function.programs_recorder() {
            recorder.drop_later(Key::connection(source.0));
        }
        // A socket that waits is not watched.
        if !connection.waits {
            changes.unwatch.push(connection.socket);
        }
    }

    /// Notices that a program has closed a file.
    fn on_file(&mut self, function: &mut Function, source: Source, changes: &mut Changes) {
        let Some((file, socket)) = self.files.get(&source) else { return };
        // A program sends nothing here. What it sends stays, for the adopting worker.
        match socket.try_peek(&mut [0; 64]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Ok(_) | Err(_) => {}
        }
        let id = file.id;
        Self::begin(function, source);
        self.front_end.close(&mut **function.inner_mut().client(), id);
        if let Some((_, socket)) = self.files.remove(&source) {
            if let Some(recorder) = function.programs_recorder() {
                recorder.drop_later(Key::file(source.0));
            }
            changes.unwatch.push(socket);
        }
    }

    /// Notices all files that programs have closed: a program may rely on `close()` to have freed
    /// memory.
    fn on_closed_files(&mut self, function: &mut Function, changes: &mut Changes) {
        if let Some(recorder) = function.programs_recorder() {
            recorder.settle();
        }
        // One call for all of them, since each request comes here.
        let sockets = self.files.values().map(|(_, socket)| socket.as_fd());
        let mut fds: Vec<_> = sockets.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        if !matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..)) {
            return;
        }
        let ready = self.files.keys().zip(&fds).filter(|(_, fd)| fd.any() == Some(true));
        let ready: Vec<_> = ready.map(|(source, _)| *source).collect();
        for source in ready {
            self.on_file(function, source, changes);
            self.record(function);
        }
    }

    /// Creates a front end that no program has used.
    fn create_front_end(&self, function: &mut Function) -> Result<Box<dyn FrontEnd>> {
        let mut front_end = front_end::create(&self.spec)?;
        if let Some(recorder) = function.programs_recorder() {
            front_end.set_files(Box::new(recorder.memory()));
        }
        Ok(front_end)
    }

    /// Ends the use by programs: the vGPU gets new memory.
    fn leave(&mut self, function: &mut Function) {
        self.doorbell = None;
        match self.create_front_end(function) {
            Ok(front_end) => self.front_end = front_end,
            Err(error) => log::error!("{error:#}"),
        }
        function.inner_mut().detach();
    }

    /// Passes an interrupt of the GPU to the programs that wait for events.
    pub fn on_gpu_event(&mut self, function: &mut Function, pending: Pending) {
        if self.files.is_empty() || pending.is_empty() {
            return;
        }
        let waiting = self.front_end.on_gpu_event(&mut **function.inner_mut().client(), pending);
        for (file, socket) in self.files.values() {
            if waiting.binary_search(&file.id).is_ok() {
                // A full socket is readable already.
                let _ = socket.try_send(&[0], &[]);
            }
        }
        self.record(function);
    }
}

impl ProgramState for Programs {
    fn last(&self) -> Source {
        self.last
    }

    fn answer(&self) -> Option<&Answer> {
        self.answer.as_ref()
    }

    fn take_changes(&mut self) -> Option<ProgramChanges> {
        let Self { front_end, connections, files, .. } = self;
        let front_end = front_end.take_changes();
        let changed = front_end.is_some() || connections.is_changed() || files.is_changed();
        let (front_end, memory) = front_end.map(|it| (it.bytes, it.files)).unzip();
        changed.then(|| ProgramChanges {
            connections: connections.take_changes(|connection| connection.greeted),
            files: files.take_changes(|(file, _)| *file),
            front_end,
            memory: memory.unwrap_or_default(),
        })
    }

    fn all(&self) -> ProgramChanges {
        let front_end = self.front_end.all();
        ProgramChanges {
            connections: self.connections.all(|connection| connection.greeted),
            files: self.files.all(|(file, _)| *file),
            front_end: Some(front_end.bytes),
            memory: front_end.files,
        }
    }

    fn memory_file(&self, id: MemoryFileId) -> Option<BorrowedFd<'_>> {
        self.front_end.memory_file(id)
    }
}
