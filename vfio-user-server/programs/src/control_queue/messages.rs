//! Requests and replies of a control queue, from and to their bytes.

use cuda_socket::calls::NodeKind;
use cuda_socket::{
    Block, CallShape, Done, Fetch, FileId, IoctlRequest, MAX_BLOCKS, Node, Range, Refused, Welcome,
};
use mdev_core::abi::queue::{
    self, Call, DONE, FETCH, Ioctl, MAX_FILES, MAX_MEMORIES, Memory, ProcFile, Reply, VERSION,
    call_flag, node,
};
use nix::errno::Errno;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// Major number of the resource manager's nodes, and the minor number of `/dev/nvidiactl`.
const RM_MAJOR: u32 = 195;
const CONTROL_MINOR: u32 = 255;

/// Returns the structure that a request consists of.
pub fn exact<T: FromBytes>(request: &[u8]) -> Result<T, Errno> {
    T::read_from_bytes(request).map_err(|_| Errno::EINVAL)
}

/// Returns a reply of one structure.
pub fn reply<T: IntoBytes + Immutable>(reply: &T) -> Vec<u8> {
    reply.as_bytes().to_vec()
}

/// Returns the start of a reply with this error.
pub fn result(errno: Result<(), Errno>) -> Reply {
    Reply { result: DONE, error: errno.err().map_or(0, |errno| errno as u32) }
}

/// Returns the device node of an open request.
pub fn node_of(request: &queue::Open) -> Result<Node, Errno> {
    match request.node {
        node::CONTROL => Ok(Node::Control),
        node::GPU => Ok(Node::Gpu(request.minor)),
        node::UVM => Ok(Node::Uvm),
        _ => Err(Errno::EINVAL),
    }
}

/// Returns the first `count` elements of an array.
fn first<T>(array: &[T], count: u32) -> Result<&[T], Errno> {
    array.get(..count as usize).ok_or(Errno::EINVAL)
}

/// An ioctl, and the memory that came with it.
pub fn ioctl(request: &[u8]) -> Result<(IoctlRequest, Vec<Memory>), Errno> {
    let (header, _) = Ioctl::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
    let content = |offset: u32, len: u32| {
        let (from, len) = (offset as usize, len as usize);
        let inside = from >= size_of::<Ioctl>() || len == 0;
        let end = from.checked_add(len).filter(|_| inside).ok_or(Errno::EINVAL)?;
        let bytes = if len == 0 { Some(&[][..]) } else { request.get(from..end) };
        bytes.map(<[u8]>::to_vec).ok_or(Errno::EINVAL)
    };
    let blocks = first(&header.block, header.blocks)?.iter().map(|block| {
        Ok(Block { address: block.address, bytes: content(block.offset, block.length)? })
    });
    let blocks: Vec<_> = blocks.collect::<Result<_, Errno>>()?;
    let total = blocks.iter().fold(0, |sum, block| sum + block.bytes.len());
    // Blocks may share bytes of the request, but not make more of them.
    if total + header.argument_bytes as usize > request.len() {
        return Err(Errno::EINVAL);
    }
    let files = first(&header.file, header.files)?;
    let pins = first(&header.refused_pin, header.refused_pins)?;
    let ioctl = IoctlRequest {
        file: FileId(header.request.file),
        request: header.number,
        argument: content(header.argument_offset, header.argument_bytes)?,
        blocks,
        files: files.iter().map(|file| (file.fd, FileId(file.file))).collect(),
        shared: Vec::new(),
        refused: Refused {
            files: first(&header.refused_file, header.refused_files)?.to_vec(),
            share: pins.iter().map(|pin| Range { address: pin.address, len: pin.length }).collect(),
        },
    };
    Ok((ioctl, first(&header.memory, header.memories)?.to_vec()))
}

/// Reply to an ioctl that needs more.
pub fn fetch(fetch: &Fetch, allocate: Option<u64>) -> Vec<u8> {
    let mut reply = queue::Fetch::new_zeroed();
    reply.reply.result = FETCH;
    let range = |range: &Range| queue::Range { address: range.address, length: range.len };
    reply.blocks = fill(&mut reply.block, fetch.blocks.iter().map(range));
    reply.files = fill(&mut reply.file, fetch.files.iter().copied());
    reply.pins = fill(&mut reply.pin, fetch.share.iter().map(range));
    reply.allocations = fill(&mut reply.allocate, allocate.into_iter());
    reply.as_bytes().to_vec()
}

/// Fills the start of an array, and returns the number of elements.
fn fill<T>(array: &mut [T], elements: impl Iterator<Item = T>) -> u32 {
    array.iter_mut().zip(elements).map(|(target, element)| *target = element).count() as u32
}

/// Reply to an ioctl that is done. `None` if it does not fit.
pub fn done(done: &Done, memory: &[u64], capacity: usize) -> Option<Vec<u8>> {
    let mut reply = queue::Done::new_zeroed();
    if done.writes.len() > MAX_BLOCKS || done.places.len() > MAX_MEMORIES {
        return None;
    }
    reply.reply.error = done.errno.unsigned_abs();
    let mut bytes = vec![0; size_of::<queue::Done>()];
    let mut append = |content: &[u8]| {
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let offset = bytes.len() as u32;
        bytes.extend_from_slice(content);
        offset
    };
    reply.argument_bytes = done.argument.len() as u32;
    reply.argument_offset = append(&done.argument);
    let writes = done.writes.iter().map(|Block { address, bytes }| queue::Block {
        address: *address,
        length: bytes.len() as u32,
        offset: append(bytes),
    });
    reply.writes = fill(&mut reply.write, writes);
    let places = done.places.iter().zip(memory).map(|(place, memory)| queue::Place {
        address: place.range.address,
        length: place.range.len,
        memory: *memory,
        offset: place.offset,
    });
    reply.places = fill(&mut reply.place, places);
    bytes[..size_of::<queue::Done>()].copy_from_slice(reply.as_bytes());
    (bytes.len() <= capacity).then_some(bytes)
}

/// Reply to a hello. `None` if it does not fit.
pub fn welcome(welcome: &Welcome, capacity: usize) -> Option<Vec<u8>> {
    let mut header = queue::Welcome::new_zeroed();
    (header.version, header.rm_major) = (VERSION, RM_MAJOR);
    header.control_minor = CONTROL_MINOR;
    let mut bytes = vec![0; size_of::<queue::Welcome>()];
    header.minors = welcome.minors.len() as u32;
    header.minors_offset = bytes.len() as u32;
    bytes.extend(welcome.minors.iter().flat_map(|minor| minor.to_le_bytes()));
    header.calls = welcome.calls.len() as u32;
    header.calls_offset = bytes.len() as u32;
    bytes.extend(welcome.calls.iter().flat_map(|shape| call(shape).as_bytes().to_vec()));
    header.proc_files = welcome.proc_files.len() as u32;
    header.proc_files_offset = bytes.len() as u32;
    let mut at = bytes.len() + welcome.proc_files.len() * size_of::<ProcFile>();
    for (path, content) in &welcome.proc_files {
        let file = ProcFile {
            path_offset: at as u32,
            path_bytes: path.len() as u32,
            content_offset: (at + path.len()) as u32,
            content_bytes: content.len() as u32,
        };
        at += path.len() + content.len();
        bytes.extend(file.as_bytes());
    }
    for (path, content) in &welcome.proc_files {
        bytes.extend(path.as_bytes());
        bytes.extend(content.as_bytes());
    }
    bytes[..size_of::<queue::Welcome>()].copy_from_slice(header.as_bytes());
    (bytes.len() <= capacity).then_some(bytes)
}

fn call(shape: &CallShape) -> Call {
    let flag = |there: bool, flag: u32| if there { flag } else { 0 };
    let (pointer, length) = shape.block.unwrap_or_default();
    Call {
        nodes: match shape.node {
            NodeKind::Rm => queue::CALL_RM,
            NodeKind::Uvm => queue::CALL_UVM,
        },
        number: shape.number,
        flags: flag(shape.argument_bytes.is_some(), call_flag::HAS_LENGTH)
            | flag(shape.block.is_some(), call_flag::HAS_BLOCK)
            | flag(shape.fd.is_some(), call_flag::HAS_FD),
        argument_bytes: shape.argument_bytes.unwrap_or(0),
        pointer,
        length,
        fd: shape.fd.unwrap_or(0),
        reserved: 0,
    }
}

const _: () = assert!(MAX_BLOCKS == queue::MAX_BLOCKS && MAX_FILES >= MAX_BLOCKS);
