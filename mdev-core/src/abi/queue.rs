//! Control queue: the device files of NVIDIA's driver, for programs in a VM.
//!
//! The guest's driver sends what programs do with the files in requests, and knows no command of
//! NVIDIA's driver. `qemu-integration/guest-driver/tessera_queue.h` has the same definitions in C.

#![allow(missing_debug_implementations, reason = "zerocopy's hidden types in the macro have none")]

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Version of the queue: major in the upper half, minor in the lower. A guest refuses an unknown
/// major version.
pub const VERSION: u32 = 0x0001_0001;
/// Length of a page of buffers and lists, in bytes.
pub const PAGE_BYTES: usize = 4096;
/// Maximum number of pages of a buffer. Hello and ioctls need all of them.
pub const MAX_PAGES: usize = 32;
/// Maximum length of a request or reply, in bytes.
pub const MAX_BYTES: usize = MAX_PAGES * PAGE_BYTES;
/// Minimum number of slots.
pub const MIN_SLOTS: u32 = 8;
/// Maximum number of slots.
pub const MAX_SLOTS: u32 = 256;
/// Completions for each slot.
pub const COMPLETIONS_PER_SLOT: u32 = 4;
/// Offset of the submissions in the queue's memory. Completions follow them.
pub const SUBMISSIONS: u64 = 0x1000;
/// Bit of `QUEUE_CONTROL`: the queue is to run.
pub const CONTROL_ENABLE: u32 = 1 << 0;
/// Maximum number of blocks of a request or reply.
pub const MAX_BLOCKS: usize = 16;
/// Maximum number of files of a request or reply.
pub const MAX_FILES: usize = 16;
/// Maximum number of memories, pins, allocations or places of a request or reply.
pub const MAX_MEMORIES: usize = 16;
/// Maximum number of replies [`Fetch`] for one ioctl.
pub const MAX_FETCHES: usize = 8;
/// Maximum number of ranges of a [`List`] page.
pub const LIST_RANGES: usize = 255;
/// Maximum number of ranges of one memory.
pub const MAX_RANGES: usize = 1 << 18;

/// Offsets of the indices in the queue's memory. They count up and wrap at 2^32.
pub mod index {
    /// Submissions that the guest has written.
    pub const SUBMIT_TAIL: u64 = 0x00;
    /// Submissions that the device has read.
    pub const SUBMIT_HEAD: u64 = 0x40;
    /// Completions that the device has written.
    pub const COMPLETE_TAIL: u64 = 0x80;
    /// Completions that the guest has read.
    pub const COMPLETE_HEAD: u64 = 0xc0;
}

/// State of the queue, in bits 7:0 of `QUEUE_STATUS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Nothing is served. The device uses no memory of the guest.
    Off = 0,
    /// The queue is being started.
    Starting = 1,
    /// Requests are served.
    Running = 2,
    /// The queue is being stopped.
    Stopping = 3,
    /// Nothing is served until the queue was stopped.
    Failed = 4,
}

/// Reason of [`State::Failed`], in bits 15:8 of `QUEUE_STATUS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Failure {
    /// Base or number of slots is invalid.
    #[error("its base or number of slots is invalid, or not in the VM's memory")]
    Config = 1,
    /// An index is impossible.
    #[error("an index is impossible")]
    Ring = 2,
    /// A buffer is not in memory that the device can read and write.
    #[error("a buffer is not in the VM's memory")]
    Access = 3,
    /// A submission has an invalid form.
    #[error("a submission has an invalid form")]
    Submission = 4,
    /// The GPU is lost.
    #[error("the GPU is lost")]
    Lost = 5,
    /// The host failed.
    #[error("the host failed")]
    Host = 6,
}

/// Returns the value of `QUEUE_STATUS`.
pub const fn status(state: State, failure: Option<Failure>) -> u32 {
    let reason = match failure {
        Some(failure) => failure as u32,
        None => 0,
    };
    state as u32 | reason << 8
}

/// Defines structures of the queue's memory: little-endian, without padding.
macro_rules! wire {
    ($($(#[$doc:meta])* struct $name:ident { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
            #[repr(C)]
            pub struct $name { $($(#[$field_doc])* pub $field: $ty,)* }
        )*
    };
}

wire! {
    /// Submission of a request.
    struct Submission {
        /// Guest-physical address of the array of the buffer's page addresses (64 bits each).
        list: u64,
        /// Number of pages of the buffer.
        pages: u32,
        /// Length of the request in bytes.
        bytes: u32,
        /// Value for the completion.
        cookie: u64,
        /// Zero.
        reserved: u64,
    }

    /// Completion of a request, or an event.
    struct Completion {
        /// A constant of [`completion`].
        kind: u32,
        /// Length of the reply in bytes.
        bytes: u32,
        /// By kind.
        value: u64,
        /// Zero.
        reserved: [u64; 2],
    }

    /// Start of a request.
    struct Request {
        /// A constant of [`op`].
        opcode: u32,
        /// Zero.
        reserved: u32,
        /// Id of the file, or 0.
        file: u64,
    }

    /// Start of a reply.
    struct Reply {
        /// [`DONE`] or [`FETCH`].
        result: u32,
        /// `errno`, or 0.
        error: u32,
    }

    /// Reply to [`op::HELLO`]. Offsets are from its start.
    struct Welcome {
        /// The reply.
        reply: Reply,
        /// [`VERSION`].
        version: u32,
        /// Major number of `/dev/nvidiactl` and `/dev/nvidiaN`.
        rm_major: u32,
        /// Minor number of `/dev/nvidiactl`.
        control_minor: u32,
        /// Number of minor numbers of `/dev/nvidiaN`, 32 bits each.
        minors: u32,
        /// Their offset.
        minors_offset: u32,
        /// Number of [`Call`].
        calls: u32,
        /// Their offset.
        calls_offset: u32,
        /// Number of [`ProcFile`].
        proc_files: u32,
        /// Their offset.
        proc_files_offset: u32,
        /// Zero.
        reserved: u32,
    }

    /// Where the argument of an ioctl has a pointer and a descriptor.
    struct Call {
        /// [`CALL_RM`] or [`CALL_UVM`].
        nodes: u32,
        /// Low byte of the request of RM's nodes, or all of it.
        number: u32,
        /// Constants of [`call_flag`].
        flags: u32,
        /// Length of the argument in bytes.
        argument_bytes: u32,
        /// Offset of a 64-bit address.
        pointer: u32,
        /// Offset of the 32-bit length of what is there, in bytes.
        length: u32,
        /// Offset of a 32-bit descriptor.
        fd: u32,
        /// Zero.
        reserved: u32,
    }

    /// File below `/proc/driver/nvidia`.
    struct ProcFile {
        /// Offset of the path, relative to the folder.
        path_offset: u32,
        /// Length of the path.
        path_bytes: u32,
        /// Offset of the content.
        content_offset: u32,
        /// Length of the content.
        content_bytes: u32,
    }

    /// Request [`op::OPEN`].
    struct Open {
        /// The request.
        request: Request,
        /// A constant of [`node`].
        node: u32,
        /// Minor number of [`node::GPU`].
        minor: u32,
        /// Id of the process.
        process: u32,
        /// Effective user id of the process plus 1, or 0 from guests that do not tell.
        user: u32,
    }

    /// Reply to [`op::OPEN`].
    struct Opened {
        /// The reply.
        reply: Reply,
        /// Id of the file.
        file: u64,
    }

    /// Range of a program.
    struct Range {
        /// First address.
        address: u64,
        /// Length in bytes.
        length: u64,
    }

    /// Content of memory of a program.
    struct Block {
        /// First address.
        address: u64,
        /// Length in bytes.
        length: u32,
        /// Offset of the content in the request or reply.
        offset: u32,
    }

    /// Descriptor of a program that is a file of the device.
    struct File {
        /// The descriptor.
        fd: i32,
        /// Zero.
        reserved: u32,
        /// Id of the file.
        file: u64,
    }

    /// Pages for the device.
    struct Memory {
        /// Id that the guest has chosen, not 0.
        id: u64,
        /// Address of pinned pages in the program.
        address: u64,
        /// Length in bytes.
        length: u64,
        /// Guest-physical address of the first [`List`].
        list: u64,
        /// [`ALLOCATED`] or [`PINNED`].
        kind: u32,
        /// Zero.
        reserved: u32,
    }

    /// Page with a part of a list of pages.
    struct List {
        /// Guest-physical address of the next page of the list, or 0.
        next: u64,
        /// Number of ranges.
        count: u32,
        /// Zero.
        reserved: u32,
        /// Guest-physical ranges.
        ranges: [Range; LIST_RANGES],
    }

    /// Request [`op::IOCTL`]. The argument and the contents of blocks follow.
    struct Ioctl {
        /// The request.
        request: Request,
        /// Request number, as the program passed it.
        number: u32,
        /// Length of the argument in bytes.
        argument_bytes: u32,
        /// Offset of the argument.
        argument_offset: u32,
        /// Number of blocks.
        blocks: u32,
        /// Number of files.
        files: u32,
        /// Number of memories.
        memories: u32,
        /// Number of descriptors that are no files of the device.
        refused_files: u32,
        /// Number of ranges that cannot be pinned.
        refused_pins: u32,
        /// Memory that the argument points to.
        block: [Block; MAX_BLOCKS],
        /// Files of descriptors.
        file: [File; MAX_FILES],
        /// Memory that the device asked for.
        memory: [Memory; MAX_MEMORIES],
        /// Descriptors that are no files of the device.
        refused_file: [i32; MAX_FILES],
        /// Ranges that cannot be pinned.
        refused_pin: [Range; MAX_MEMORIES],
    }

    /// Reply [`FETCH`] to [`op::IOCTL`]: what to send in addition. Nothing has changed.
    struct Fetch {
        /// The reply.
        reply: Reply,
        /// Number of blocks.
        blocks: u32,
        /// Number of descriptors.
        files: u32,
        /// Number of ranges to pin.
        pins: u32,
        /// Number of allocations.
        allocations: u32,
        /// Ranges to send as blocks.
        block: [Range; MAX_BLOCKS],
        /// Descriptors to send with their files.
        file: [i32; MAX_FILES],
        /// Page-aligned ranges to pin.
        pin: [Range; MAX_MEMORIES],
        /// Page-aligned numbers of bytes to allocate.
        allocate: [u64; MAX_MEMORIES],
    }

    /// Memory to show to a program in place of what is there.
    struct Place {
        /// Page-aligned address of the program.
        address: u64,
        /// Length in bytes.
        length: u64,
        /// Id of the memory.
        memory: u64,
        /// Offset in the memory, in bytes.
        offset: u64,
    }

    /// Reply [`DONE`] to [`op::IOCTL`]. The argument and the contents of writes follow.
    struct Done {
        /// The reply.
        reply: Reply,
        /// Length of the argument in bytes, as in the request.
        argument_bytes: u32,
        /// Its offset.
        argument_offset: u32,
        /// Number of writes.
        writes: u32,
        /// Number of places.
        places: u32,
        /// Memory of the program to write.
        write: [Block; MAX_BLOCKS],
        /// Memory to show to the program.
        place: [Place; MAX_MEMORIES],
    }

    /// Request [`op::MAP`].
    struct Map {
        /// The request.
        request: Request,
        /// Length in bytes.
        length: u64,
        /// Offset in the file, in bytes.
        offset: u64,
        /// 0 or [`MAP_WRITABLE`].
        flags: u32,
        /// Zero.
        reserved: u32,
    }

    /// Reply to [`op::MAP`].
    struct Mapped {
        /// The reply.
        reply: Reply,
        /// A constant of [`mapped`].
        kind: u32,
        /// Zero.
        reserved: u32,
        /// Id of the memory.
        memory: u64,
        /// Offset in the memory, in bytes.
        offset: u64,
    }

    /// Request [`op::WITHDRAWN`].
    struct Withdrawn {
        /// The request.
        request: Request,
        /// Value of the completion [`completion::WITHDRAW`].
        generation: u64,
    }
}

/// Kinds of completions.
pub mod completion {
    /// A request is complete; the value is its cookie.
    pub const DONE: u32 = 1;
    /// A file is ready for `poll()`; the value is its id.
    pub const EVENT: u32 = 2;
    /// The device does not use a memory; the value is its id.
    pub const MEMORY: u32 = 3;
    /// The doorbell page is to be withdrawn from programs; the value is a generation.
    pub const WITHDRAW: u32 = 4;
}

/// Operations of requests.
pub mod op {
    /// [`Request`](super::Request); reply [`Welcome`](super::Welcome).
    pub const HELLO: u32 = 1;
    /// [`Open`](super::Open); reply [`Opened`](super::Opened).
    pub const OPEN: u32 = 2;
    /// [`Request`](super::Request); reply [`Reply`](super::Reply).
    pub const CLOSE: u32 = 3;
    /// [`Ioctl`](super::Ioctl); reply [`Done`](super::Done) or [`Fetch`](super::Fetch).
    pub const IOCTL: u32 = 4;
    /// [`Map`](super::Map); reply [`Mapped`](super::Mapped).
    pub const MAP: u32 = 5;
    /// [`Withdrawn`](super::Withdrawn); reply [`Reply`](super::Reply).
    pub const WITHDRAWN: u32 = 6;
}

/// Result of a request that was carried out.
pub const DONE: u32 = 0;
/// Result of an ioctl that needs more: [`Fetch`].
pub const FETCH: u32 = 1;

/// Nodes of a [`Call`]: `/dev/nvidiactl` and `/dev/nvidiaN`.
pub const CALL_RM: u32 = 1;
/// Nodes of a [`Call`]: `/dev/nvidia-uvm`.
pub const CALL_UVM: u32 = 2;

/// Flags of a [`Call`].
pub mod call_flag {
    /// `argument_bytes` is there.
    pub const HAS_LENGTH: u32 = 1 << 0;
    /// `pointer` and `length` are there.
    pub const HAS_BLOCK: u32 = 1 << 1;
    /// `fd` is there.
    pub const HAS_FD: u32 = 1 << 2;
}

/// Device nodes.
pub mod node {
    /// `/dev/nvidiactl`.
    pub const CONTROL: u32 = 1;
    /// `/dev/nvidiaN`.
    pub const GPU: u32 = 2;
    /// `/dev/nvidia-uvm`.
    pub const UVM: u32 = 3;
}

/// Kind of a [`Memory`]: zeroed pages that the device asked for.
pub const ALLOCATED: u32 = 1;
/// Kind of a [`Memory`]: pages of the program.
pub const PINNED: u32 = 2;

/// Flag of a [`Map`].
pub const MAP_WRITABLE: u32 = 1 << 0;

/// Kinds of a [`Mapped`].
pub mod mapped {
    /// Nothing yet.
    pub const EMPTY: u32 = 0;
    /// The doorbell page.
    pub const DOORBELL: u32 = 1;
    /// Pages of a memory.
    pub const MEMORY: u32 = 2;
}

#[cfg(test)]
mod tests;
