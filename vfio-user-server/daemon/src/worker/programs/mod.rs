//! CUDA programs on the vGPU: their connections, their open files, and the driver's device files.
//!
//! A program's process has one connection for requests and one socket for each open file. A vGPU
//! serves either a VM or programs. When the last program has left, the vGPU gets new memory.
//!
//! * `throttle`: processes that wait for CPU time

mod throttle;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use anyhow::{Context, Result};
use cuda_socket::{FileId, Node, Reply, Request, VERSION, decode, encode};
use mdev_core::device::VirtualFunction;
use mdev_core::gpu::Pending;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::fstat;
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};
use vendor_backends::nvidia::frontend::{FrontEnd, Mapped, Outcome};
use vendor_backends::seqpacket::{MAX_PACKET, SeqPacket, SeqPacketListener};

pub use self::throttle::Throttled;
use super::doorbell::{self, Doorbell};
use super::front_end_spec::FrontEndSpec;
use super::queue_thread::ProgramsInVm;
use super::request_budget::{self, Budget};
use crate::worker_client::MAX_PROCESSES;
use crate::worker_protocol::ProgramsStatus;
use vgpud_api::AttachedClient;

/// Limit of processes on a vGPU.
const MAX_CONNECTIONS: usize = 64;

/// Process on the vGPU.
#[derive(Debug)]
struct Connection {
    socket: SeqPacket,
    process: AttachedClient,
    /// The process has sent its hello.
    greeted: bool,
    /// CPU time that its requests may take.
    budget: Budget,
    /// Its requests wait for the budget: its socket is not watched.
    waits: bool,
}

/// Device and inode number.
type Inode = (u64, u64);

/// Number of a descriptor of a program that the worker watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source(pub u32);

/// What to watch from now on.
#[derive(Debug, Default)]
pub struct Changes {
    /// New descriptors.
    pub watch: Vec<Source>,
    /// Descriptors that are no longer to be watched. They are closed when this is dropped.
    pub unwatch: Vec<OwnedFd>,
}

/// CUDA programs on the vGPU.
#[derive(Debug)]
pub struct Programs {
    listener: SeqPacketListener,
    new_front_end: FrontEndSpec,
    front_end: FrontEnd,
    connections: BTreeMap<Source, Connection>,
    /// Files with the worker's ends of their sockets, and the inodes of the programs' ends.
    files: BTreeMap<Source, (FileId, SeqPacket, Inode)>,
    last_source: u32,
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
        new_front_end: FrontEndSpec,
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
            front_end: new_front_end.create()?,
            new_front_end,
            connections: BTreeMap::new(),
            files: BTreeMap::new(),
            last_source: 0,
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
            self.last_source = self.last_source.wrapping_add(1) & (u32::MAX >> 1);
            let source = Source(self.last_source);
            if !self.connections.contains_key(&source) && !self.files.contains_key(&source) {
                return source;
            }
        }
    }

    /// Adds a process.
    pub fn connect(
        &mut self,
        function: &mut VirtualFunction,
        socket: SeqPacket,
        process: AttachedClient,
    ) -> Result<Changes, &'static str> {
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err("too many processes use the vGPU");
        }
        if !self.are_present() {
            function.attach();
            self.doorbell = Doorbell::start(&mut **function.client())
                .inspect_err(|error| log::warn!("The doorbell cannot be watched: {error:#}"))
                .unwrap_or(None);
        }
        let source = self.next_source();
        let budget = Budget::new(request_budget::PROCESS, Instant::now()).at_most(&self.budget);
        let connection = Connection { socket, process, greeted: false, budget, waits: false };
        self.connections.insert(source, connection);
        Ok(Changes { watch: vec![source], ..Default::default() })
    }

    /// Serves a descriptor that is readable.
    pub fn on_ready(&mut self, function: &mut VirtualFunction, source: Source) -> Changes {
        let mut changes = Changes::default();
        if self.files.contains_key(&source) {
            self.on_file(function, source, &mut changes);
        } else if let Err(error) = self.on_request(function, source, &mut changes)
            && let Some(connection) = self.connections.remove(&source)
        {
            if error.kind() != io::ErrorKind::UnexpectedEof {
                let pid = connection.process.pid;
                log::debug!("Process {pid} is cut off: {error}");
            }
            // A socket that waits is not watched.
            if !connection.waits {
                changes.unwatch.push(connection.socket.into());
            }
        }
        if !self.are_present() {
            self.leave(function);
        }
        changes
    }

    /// Notices that a program has closed a file.
    fn on_file(&mut self, function: &mut VirtualFunction, source: Source, changes: &mut Changes) {
        let Some((file, socket, _)) = self.files.get(&source) else { return };
        // A program sends nothing here.
        match socket.try_recv(&mut [0; 64]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Ok(_) | Err(_) => {}
        }
        let file = *file;
        self.front_end.close(&mut **function.client(), file);
        if let Some((_, socket, _)) = self.files.remove(&source) {
            changes.unwatch.push(socket.into());
        }
    }

    /// Notices all files that programs have closed: a program may rely on `close()` to have freed
    /// memory.
    fn on_closed_files(&mut self, function: &mut VirtualFunction, changes: &mut Changes) {
        // One call for all of them, since each request comes here.
        let sockets = self.files.values().map(|(_, socket, _)| socket.as_fd());
        let mut fds: Vec<_> = sockets.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        if !matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..)) {
            return;
        }
        let ready = self.files.keys().zip(&fds).filter(|(_, fd)| fd.any() == Some(true));
        let ready: Vec<_> = ready.map(|(source, _)| *source).collect();
        for source in ready {
            self.on_file(function, source, changes);
        }
    }

    /// Returns the file whose program's end is `fd`.
    fn identify(&self, fd: Option<OwnedFd>) -> Option<(FileId, Node)> {
        let inode = |fd: BorrowedFd<'_>| fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino));
        let asked = inode(fd?.as_fd())?;
        let (file, ..) = self.files.values().find(|(.., theirs)| *theirs == asked)?;
        Some((*file, self.front_end.node(*file)?))
    }

    /// Ends the use by programs: the vGPU gets new memory.
    fn leave(&mut self, function: &mut VirtualFunction) {
        self.doorbell = None;
        match self.new_front_end.create() {
            Ok(front_end) => self.front_end = front_end,
            Err(error) => log::error!("{error:#}"),
        }
        function.detach();
    }

    fn on_request(
        &mut self,
        function: &mut VirtualFunction,
        source: Source,
        changes: &mut Changes,
    ) -> io::Result<()> {
        let Some(connection) = self.connections.get(&source) else { return Ok(()) };
        let process = connection.process.pid;
        let mut buffer = vec![0; MAX_PACKET];
        let packet = match connection.socket.try_recv_with_fds(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            packet => packet?.ok_or(io::ErrorKind::UnexpectedEof)?,
        };
        let request = decode::<Request>(&buffer[..packet.len]).map_err(io::Error::other)?;
        let is_hello = matches!(request, Request::Hello { .. });
        if is_hello == connection.greeted {
            return Err(io::Error::other("its first message is no hello, or there is another"));
        }
        self.on_closed_files(function, changes);
        let (reply, fds) = self.answer(function, request, packet.fds, process, changes);
        let bytes = encode(&reply).map_err(io::Error::other)?;
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let Some(connection) = self.connections.get_mut(&source) else { return Ok(()) };
        connection.greeted = true;
        connection.socket.try_send(&bytes, &fds)
    }

    fn answer(
        &mut self,
        function: &mut VirtualFunction,
        request: Request,
        fds: Vec<OwnedFd>,
        process: i32,
        changes: &mut Changes,
    ) -> (Reply, Vec<OwnedFd>) {
        let failed = |errno: Errno| (Reply::Failed { errno: errno as i32 }, Vec::new());
        match request {
            Request::Hello { version: VERSION } => {
                (Reply::Welcome(self.front_end.welcome()), Vec::new())
            }
            Request::Hello { .. } => failed(Errno::EPROTO),
            Request::Open(node) => match self.open(process, node, changes) {
                Ok((file, fd)) => (Reply::Opened(file), vec![fd]),
                Err(error) => failed(error),
            },
            Request::Identify => match self.identify(fds.into_iter().next()) {
                Some((file, node)) => (Reply::Identified { file, node }, Vec::new()),
                None => failed(Errno::ENOTTY),
            },
            Request::Ioctl(request) => {
                let mut client = function.client();
                self.front_end.update_utilization(&mut **client);
                match self.front_end.ioctl(&mut **client, &request, fds.into_iter().next()) {
                    Outcome::Fetch(fetch) => (Reply::Fetch(fetch), Vec::new()),
                    Outcome::Done(done, fds) => (Reply::Done(done), fds),
                }
            }
            Request::Map(request) => match self.front_end.map(&request) {
                Ok(Mapped::File(fd, offset)) => (Reply::Mapped { offset }, vec![fd]),
                Ok(Mapped::Doorbell) => match doorbell::page(&mut **function.client()) {
                    Ok((fd, offset)) => (Reply::Mapped { offset }, vec![fd]),
                    Err(_) => failed(Errno::EIO),
                },
                // Pages of a VM are for a VM's programs.
                Ok(Mapped::Guest(_)) => failed(Errno::EIO),
                Err(error) => failed(error),
            },
        }
    }

    fn open(
        &mut self,
        process: i32,
        node: Node,
        changes: &mut Changes,
    ) -> Result<(FileId, OwnedFd), Errno> {
        let (ours, theirs) = SeqPacket::pair().map_err(|_| Errno::EMFILE)?;
        let mut id = [0; 8];
        getrandom::fill(&mut id).map_err(|_| Errno::EIO)?;
        let file = FileId(u64::from_ne_bytes(id));
        let stat = fstat(theirs.as_fd()).map_err(|_| Errno::EIO)?;
        self.front_end.open(file, node, process)?;
        let source = self.next_source();
        self.files.insert(source, (file, ours, (stat.st_dev, stat.st_ino)));
        changes.watch.push(source);
        Ok((file, theirs.into()))
    }

    /// Passes an interrupt of the GPU to the programs that wait for events.
    pub fn on_gpu_event(&mut self, function: &mut VirtualFunction, pending: Pending) {
        if self.files.is_empty() || pending.is_empty() {
            return;
        }
        let waiting = self.front_end.on_gpu_event(&mut **function.client(), pending);
        for (file, socket, _) in self.files.values() {
            if waiting.binary_search(file).is_ok() {
                // A full socket is readable already.
                let _ = socket.try_send(&[0], &[]);
            }
        }
    }
}
