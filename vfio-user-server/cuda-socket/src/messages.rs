//! Requests of a program and replies of a worker.

use serde::{Deserialize, Serialize};

use crate::calls::CallShape;

/// Maximum number of file descriptors in one packet.
pub const MAX_FDS: usize = 16;

/// Maximum number of blocks in one request or reply.
pub const MAX_BLOCKS: usize = 16;

/// Maximum number of [`Reply::Fetch`] for one ioctl.
pub const MAX_FETCHES: usize = 4;

/// Number of an open file: unpredictable, so that a process cannot name another's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileId(pub u64);

/// A device node of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Node {
    /// `/dev/nvidiactl`.
    Control,
    /// `/dev/nvidiaN`.
    Gpu(u32),
    /// `/dev/nvidia-uvm`.
    Uvm,
}

/// Range of the process's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Range of the process that is shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedRange {
    /// Page-aligned range of the process.
    pub range: Range,
    /// Page-aligned offset of the range in the attached memfd, in bytes.
    pub offset: u64,
}

/// Content of memory of the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// First address.
    pub address: u64,
    /// Content.
    pub bytes: Vec<u8>,
}

/// Requests of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Must be sent first. Reply: [`Reply::Welcome`].
    Hello {
        /// [`VERSION`](crate::VERSION).
        version: u32,
    },
    /// Opens a device node. Reply: [`Reply::Opened`].
    Open(Node),
    /// Carries out an ioctl. Replies: [`Reply::Fetch`], [`Reply::Done`].
    Ioctl(IoctlRequest),
    /// Maps a file. Reply: [`Reply::Mapped`].
    Map(MapRequest),
    /// Identifies a file that the process got from another process, for example over a UNIX
    /// socket. The descriptor is attached, which proves that the process may use the file. The
    /// worker knows its sockets by their inodes. Reply: [`Reply::Identified`].
    Identify,
}

/// An ioctl of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoctlRequest {
    /// The file.
    pub file: FileId,
    /// Request number, as the program passed it.
    pub request: u32,
    /// The argument. Empty if its length is unknown.
    pub argument: Vec<u8>,
    /// Memory that the argument points to, as far as [`CallShape`] and [`Fetch`] tell.
    pub blocks: Vec<Block>,
    /// Descriptors in the argument and the blocks, with their files. Other descriptors are left
    /// out.
    pub files: Vec<(i32, FileId)>,
    /// Shared memory that the ranges of [`Fetch::share`] consist of. A range that is not shared
    /// memory, and cannot be made so, is left out; a range can have several parts. The process has
    /// one memfd for all of its parts, which is attached if there are any.
    pub shared: Vec<SharedRange>,
    /// What the worker asked for and the process does not have: descriptors that are no files of
    /// the driver, and ranges that cannot be shared.
    pub refused: Refused,
}

/// Parts of a [`Fetch`] that a process does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Descriptors of [`Fetch::files`].
    pub files: Vec<i32>,
    /// Ranges of [`Fetch::share`].
    pub share: Vec<Range>,
}

/// A mapping of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRequest {
    /// The file.
    pub file: FileId,
    /// Length in bytes.
    pub len: u64,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Whether the mapping is writable.
    pub writable: bool,
}

/// Replies of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Reply to [`Request::Hello`].
    Welcome(Welcome),
    /// Reply to [`Request::Open`]. The program's end of the file's socket is attached.
    Opened(FileId),
    /// The request is to be sent again with more of the process's memory, besides what it had. A
    /// request has at most [`MAX_FETCHES`] of these replies.
    Fetch(Fetch),
    /// The ioctl is done.
    Done(Done),
    /// Reply to [`Request::Map`]. The memory's file is attached.
    Mapped {
        /// Offset in the attached file, in bytes.
        offset: u64,
    },
    /// The request failed.
    Failed {
        /// `errno`.
        errno: i32,
    },
    /// Reply to [`Request::Identify`].
    Identified {
        /// The file.
        file: FileId,
        /// The file's device node.
        node: Node,
    },
}

/// What a program has to know of the vGPU's driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// [`VERSION`](crate::VERSION).
    pub version: u32,
    /// Minor numbers of the `/dev/nvidiaN` that exist.
    pub minors: Vec<u32>,
    /// Files below `/proc/driver/nvidia` with their content; paths relative to it.
    pub proc_files: Vec<(String, String)>,
    /// Where arguments have pointers and descriptors.
    pub calls: Vec<CallShape>,
}

/// Memory of the process that the worker needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    /// Ranges to send as blocks.
    pub blocks: Vec<Range>,
    /// Descriptors to send with their files.
    pub files: Vec<i32>,
    /// Page-aligned ranges to make shared memory and to send as memfds.
    pub share: Vec<Range>,
}

/// Result of an ioctl.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// `errno`, or 0.
    pub errno: i32,
    /// New content of the argument, as long as the request's.
    pub argument: Vec<u8>,
    /// Memory of the process to write.
    pub writes: Vec<Block>,
    /// Memory to map into the process, with its files attached in this order.
    pub places: Vec<Place>,
}

/// Shared memory to map into the process, in place of what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Page-aligned range of the process.
    pub range: Range,
    /// Page-aligned offset in the attached file, in bytes.
    pub offset: u64,
}
