//! A worker with ioctls that try each part of the protocol.

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cuda_socket::calls::NodeKind;
use cuda_socket::{
    Block, CallShape, Done, Fetch, FileId, IoctlRequest, MAX_FDS, MAX_PACKET, Node, Place, Range,
    Reply, Request, VERSION, Welcome, decode, decode_numbered, encode, encode_numbered,
};
use nix::cmsg_space;
use nix::fcntl::OFlag;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
    UnixAddr, accept4, bind, listen, recv, recvmsg, send, sendmsg, socket, socketpair,
};
use nix::sys::uio::{pread, pwrite};
use nix::unistd::ftruncate;

/// Numbers of the ioctls on RM's nodes.
pub mod number {
    /// Adds 1 to each byte of the block at +16, with its length at +24.
    pub const BLOCK: u32 = 0x2a;
    /// Writes to +8 the file of the descriptor at +0.
    pub const FILE: u32 = 0x27;
    /// Follows the pointer at +0 with its length at +8, and the pointer at the beginning of that.
    /// Writes 7 to the 16 bytes there.
    pub const FETCH: u32 = 0x50;
    /// Places two pages at the address at +0.
    pub const PLACE: u32 = 0x51;
    /// Shares the range at +0. Writes 0x5a to its first byte and the number of parts to +16.
    pub const SHARE: u32 = 0x52;
    /// Sends two events to the file.
    pub const EVENT: u32 = 0x53;
    /// Asks for more, without end.
    pub const ENDLESS: u32 = 0x54;
    /// Fails with EBUSY and writes 9 to the argument.
    pub const ERROR: u32 = 0x55;
    /// Closes the connection.
    pub const LOST: u32 = 0x56;
    /// Writes the number of open files to +0, and of connections to +4.
    pub const COUNT: u32 = 0x57;
    /// Adds +0 to the worker's sum, which it writes to +8.
    pub const SUM: u32 = 0x58;
    /// A number of nvidia-uvm, whose argument has 9264 bytes. Writes 1 to the last.
    pub const UVM: u32 = 33;
}

/// Length of the memory behind a mapping of `/dev/nvidia0`.
pub const MAPPED: usize = 8192;

/// An open file: the worker's end of its socket, its node, and the inode of the program's end.
#[derive(Debug)]
struct OpenFile {
    socket: OwnedFd,
    node: Node,
    inode: u64,
}

#[derive(Debug, Default)]
struct State {
    files: Mutex<HashMap<FileId, OpenFile>>,
    next: AtomicU64,
    sum: AtomicU64,
    /// Each reply is sent twice.
    repeats: AtomicBool,
    /// New connections that end before a reply.
    lost: AtomicU32,
    /// Error with which new connections are refused, or 0.
    refusal: AtomicI32,
}

/// A listening worker. Its threads end with the test.
#[derive(Debug)]
pub struct FakeWorker {
    dir: tempfile::TempDir,
    state: Arc<State>,
    /// Number of connections so far.
    pub connections: Arc<AtomicUsize>,
}

impl FakeWorker {
    /// Starts a worker.
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (family, flags) = (AddressFamily::Unix, SockFlag::SOCK_CLOEXEC);
        let listener = socket(family, SockType::SeqPacket, flags, None).unwrap();
        let path = dir.path().join("cuda.sock");
        bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&listener, Backlog::new(32).unwrap()).unwrap();
        let worker = Self { dir, state: Arc::default(), connections: Arc::default() };
        let (state, connections) = (worker.state.clone(), worker.connections.clone());
        std::thread::spawn(move || {
            loop {
                let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC).unwrap();
                // SAFETY: the kernel has just created the descriptor.
                let connection = unsafe { OwnedFd::from_raw_fd(fd) };
                connections.fetch_add(1, Ordering::SeqCst);
                let (state, connections) = (state.clone(), connections.clone());
                std::thread::spawn(move || serve(&connection, &state, &connections));
            }
        });
        worker
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> PathBuf {
        Path::new(self.dir.path()).join("cuda.sock")
    }

    /// Sends each reply twice from now on.
    pub fn repeat_replies(&self) {
        self.state.repeats.store(true, Ordering::SeqCst);
    }

    /// Loses so many of the next connections before a reply.
    pub fn lose_connections(&self, count: u32) {
        self.state.lost.store(count, Ordering::SeqCst);
    }

    /// Refuses all further connections.
    pub fn refuse(&self, errno: i32) {
        self.state.refusal.store(errno, Ordering::SeqCst);
    }

    /// Returns the number of open files.
    pub fn open_files(&self) -> usize {
        self.state.sweep();
        self.state.files.lock().unwrap().len()
    }
}

impl State {
    /// Returns whether a new connection is served.
    fn greets(&self, connection: &OwnedFd) -> bool {
        let one_less = |left: u32| left.checked_sub(1);
        if self.lost.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
            return false;
        }
        let errno = self.refusal.load(Ordering::SeqCst);
        if errno != 0 {
            let refused = encode(&Reply::Failed { errno }).unwrap();
            send(connection.as_raw_fd(), &refused, MsgFlags::MSG_NOSIGNAL).unwrap();
        }
        errno == 0
    }

    /// Removes files that the program has closed.
    fn sweep(&self) {
        let mut byte = [0];
        self.files.lock().unwrap().retain(|_, file| {
            recv(file.socket.as_raw_fd(), &mut byte, MsgFlags::MSG_DONTWAIT) != Ok(0)
        });
    }
}

fn serve(connection: &OwnedFd, state: &State, connections: &AtomicUsize) {
    let mut buffer = vec![0; MAX_PACKET];
    while let Some((number, request, fds)) = receive(connection, &mut buffer) {
        state.sweep();
        if number == 0 && !state.greets(connection) {
            return;
        }
        let Some((reply, fds)) = answer(state, connections, request, &fds) else { return };
        let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let rights = if raw.is_empty() { &[][..] } else { &rights };
        let bytes = encode_numbered(number, &reply).unwrap();
        let flags = MsgFlags::MSG_NOSIGNAL;
        let slices = [IoSlice::new(&bytes)];
        // As by a worker that continues.
        let repeats = 1 + usize::from(state.repeats.load(Ordering::SeqCst));
        for _ in 0..repeats {
            if sendmsg::<()>(connection.as_raw_fd(), &slices, rights, flags, None).is_err() {
                return;
            }
        }
    }
}

/// Returns a request with its number, which is 0 for a hello.
fn receive(connection: &OwnedFd, buffer: &mut [u8]) -> Option<(u64, Request, Vec<OwnedFd>)> {
    let mut space = cmsg_space!([i32; MAX_FDS]);
    let mut slices = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message =
        recvmsg::<()>(connection.as_raw_fd(), &mut slices, Some(&mut space), flags).ok()?;
    let mut fds = Vec::new();
    for part in message.cmsgs().unwrap() {
        if let ControlMessageOwned::ScmRights(raw) = part {
            // SAFETY: the kernel has just created the descriptors.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    let len = message.bytes;
    let bytes = &buffer[..len];
    let numbered = || decode_numbered(bytes).unwrap();
    let (number, request) = match decode(bytes) {
        Ok(hello @ Request::Hello { .. }) => (0, hello),
        _ if bytes.is_empty() => return None,
        _ => numbered(),
    };
    Some((number, request, fds))
}

fn shape(number: u32) -> CallShape {
    CallShape { node: NodeKind::Rm, number, argument_bytes: None, block: None, fd: None }
}

fn welcome() -> Welcome {
    let text = |name: &str, content: &str| (name.to_owned(), content.to_owned());
    Welcome {
        version: VERSION,
        minors: vec![0],
        proc_files: vec![
            text("params", "ResmanDebugLevel: 4294967295\n"),
            text("gpus/0000:01:00.0/information", "Model: vGPU\n"),
        ],
        calls: vec![
            CallShape { block: Some((16, 24)), ..shape(number::BLOCK) },
            CallShape { fd: Some(0), ..shape(number::FILE) },
            CallShape { node: NodeKind::Uvm, argument_bytes: Some(9264), ..shape(number::UVM) },
        ],
    }
}

fn memory(content: &[u8], len: usize) -> OwnedFd {
    let fd = memfd_create(c"worker", MFdFlags::MFD_CLOEXEC).unwrap();
    ftruncate(&fd, len.cast_signed() as i64).unwrap();
    pwrite(&fd, content, 0).unwrap();
    fd
}

type Answer = Option<(Reply, Vec<OwnedFd>)>;

fn answer(state: &State, connections: &AtomicUsize, request: Request, fds: &[OwnedFd]) -> Answer {
    let failed = |errno| Some((Reply::Failed { errno }, vec![]));
    match request {
        Request::Hello { .. } => Some((Reply::Welcome(welcome()), vec![])),
        Request::Open(node) => {
            let flags = SockFlag::SOCK_CLOEXEC;
            let (ours, theirs) =
                socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
            let id = FileId(state.next.fetch_add(1, Ordering::SeqCst) << 32 | 5);
            let inode = inode(theirs.as_fd());
            state.files.lock().unwrap().insert(id, OpenFile { socket: ours, node, inode });
            Some((Reply::Opened(id), vec![theirs]))
        }
        Request::Map(map) if map.offset == 4096 => failed(libc::EINVAL),
        Request::Map(map) => {
            assert!(map.writable && map.len == MAPPED as u64);
            let mut content = vec![0; 4096];
            content.extend(b"mapped");
            Some((Reply::Mapped { offset: 4096 }, vec![memory(&content, 4096 + MAPPED)]))
        }
        Request::Identify => {
            let inode = inode(fds[0].as_fd());
            let files = state.files.lock().unwrap();
            let found = files.iter().find(|(_, file)| file.inode == inode);
            match found {
                Some((id, file)) => {
                    Some((Reply::Identified { file: *id, node: file.node }, vec![]))
                }
                None => failed(libc::EBADF),
            }
        }
        Request::Ioctl(request) => ioctl(state, connections, &request, fds),
    }
}

fn inode(fd: BorrowedFd<'_>) -> u64 {
    nix::sys::stat::fstat(fd).unwrap().st_ino
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().unwrap())
}

fn ioctl(
    state: &State,
    connections: &AtomicUsize,
    request: &IoctlRequest,
    fds: &[OwnedFd],
) -> Answer {
    let node = state.files.lock().unwrap().get(&request.file).map(|file| file.node);
    let Some(node) = node else { return Some((Reply::Failed { errno: libc::EBADF }, vec![])) };
    let mut done = Done { argument: request.argument.clone(), ..Done::default() };
    if node == Node::Uvm {
        let known = request.request == number::UVM;
        assert_eq!(request.argument.len(), if known { 9264 } else { 0 });
        done.argument.last_mut().into_iter().for_each(|last| *last = 1);
        return Some((Reply::Done(done), vec![]));
    }
    let mut attached = vec![];
    match request.request & 0xff {
        number::BLOCK => {
            for Block { address, bytes } in &request.blocks {
                let bytes = bytes.iter().map(|byte| byte.wrapping_add(1)).collect();
                done.writes.push(Block { address: *address, bytes });
            }
        }
        number::FILE => {
            let file = request.files.first().map_or(0, |(_, file)| file.0);
            done.argument[8..16].copy_from_slice(&file.to_le_bytes());
        }
        number::FETCH => return Some((fetch(request, done), vec![])),
        number::PLACE => {
            let range = Range { address: word(&request.argument, 0), len: 8192 };
            done.places = vec![Place { range, offset: 4096 }];
            let mut content = vec![0; 4096];
            content.extend(b"placed");
            attached = vec![memory(&content, 3 * 4096)];
        }
        number::SHARE => return Some((share(request, fds, done), vec![])),
        number::EVENT => {
            let files = state.files.lock().unwrap();
            for _ in 0..2 {
                send(files[&request.file].socket.as_raw_fd(), b"e", MsgFlags::empty()).unwrap();
            }
        }
        number::ENDLESS => return Some((Reply::Fetch(Fetch::default()), vec![])),
        number::ERROR => {
            done.errno = libc::EBUSY;
            done.argument[0] = 9;
        }
        number::LOST => return None,
        number::COUNT => {
            let counts = [state.files.lock().unwrap().len(), connections.load(Ordering::SeqCst)];
            for (at, count) in counts.into_iter().enumerate() {
                done.argument[4 * at..][..4].copy_from_slice(&(count as u32).to_le_bytes());
            }
        }
        number::SUM => {
            let added = word(&request.argument, 0);
            let sum = state.sum.fetch_add(added, Ordering::SeqCst) + added;
            done.argument[8..16].copy_from_slice(&sum.to_le_bytes());
        }
        _ => done.errno = libc::ENOTTY,
    }
    Some((Reply::Done(done), attached))
}

fn fetch(request: &IoctlRequest, mut done: Done) -> Reply {
    let need = |address, len| {
        Reply::Fetch(Fetch { blocks: vec![Range { address, len }], ..Fetch::default() })
    };
    if !request.refused.files.is_empty() {
        done.errno = libc::EBADF;
        return Reply::Done(done);
    }
    match &request.blocks[..] {
        // No address: a descriptor that the program does not have.
        [] if word(&request.argument, 0) == 0 => {
            Reply::Fetch(Fetch { files: vec![1000], ..Fetch::default() })
        }
        [] => need(word(&request.argument, 0), word(&request.argument, 8)),
        [first] => need(word(&first.bytes, 0), 16),
        [_, second, ..] => {
            done.writes = vec![Block { address: second.address, bytes: vec![7; 16] }];
            Reply::Done(done)
        }
    }
}

fn share(request: &IoctlRequest, fds: &[OwnedFd], mut done: Done) -> Reply {
    let range = Range { address: word(&request.argument, 0), len: word(&request.argument, 8) };
    if !request.refused.share.is_empty() {
        done.errno = libc::EFAULT;
        return Reply::Done(done);
    }
    if request.shared.is_empty() {
        return Reply::Fetch(Fetch { share: vec![range], ..Fetch::default() });
    }
    assert_eq!(fds.len(), 1);
    let seals = nix::fcntl::fcntl(&fds[0], nix::fcntl::FcntlArg::F_GET_SEALS).unwrap();
    assert_eq!(seals & libc::F_SEAL_SHRINK, libc::F_SEAL_SHRINK);
    let flags = nix::fcntl::fcntl(&fds[0], nix::fcntl::FcntlArg::F_GETFL).unwrap();
    assert!(OFlag::from_bits_truncate(flags).contains(OFlag::O_RDWR));
    let len: u64 = request.shared.iter().map(|part| part.range.len).sum();
    assert_eq!(len, range.len);
    let first = request.shared[0];
    assert_eq!(first.range.address, range.address);
    let mut byte = [0];
    pread(&fds[0], &mut byte, first.offset.cast_signed()).unwrap();
    done.argument[20] = byte[0];
    pwrite(&fds[0], &[0x5a], first.offset.cast_signed()).unwrap();
    done.argument[16] = request.shared.len() as u8;
    Reply::Done(done)
}
