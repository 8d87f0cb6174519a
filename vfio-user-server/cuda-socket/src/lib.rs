//! Protocol of a vGPU's socket for CUDA programs (`cuda.sock`).
//!
//! NVIDIA's user-mode driver opens `/dev/nvidiactl`, `/dev/nvidia0` and `/dev/nvidia-uvm`. A
//! transport in the program's process (the preload library) forwards what happens to these files;
//! the vGPU's worker implements them. The transport knows no command of the driver: the worker
//! tells which memory of the process it needs ([`Fetch`]) and which to write ([`Done`]).
//!
//! * [`messages`]: requests and replies
//! * [`calls`]: where ioctl arguments have pointers and file descriptors
//! * [`packet`]: their encoding, postcard in `SOCK_SEQPACKET` packets
//!
//! A connection belongs to one process, carries alternating requests and replies, and begins with
//! [`Request::Hello`]. Requests after it have numbers, and a reply has its request's; that to the
//! hello has number 0. A worker that adopts the programs of another may send the last reply
//! again.
//! A process drops replies with numbers before that of its request. A hello, and the refusal of a
//! process or of its version, have no number: they are the same in all versions. A process whose
//! connection ends before any reply connects again, since the worker may have died before it passed
//! the connection on.
//!
//! Each open file has a socket of its own besides: the program holds one end as
//! the file's descriptor, the worker the other. The file is closed when all copies of the program's
//! end are closed, also if the process is killed. Before each request, the worker looks for files
//! that were closed: a process may rely on `close()` to have freed memory.
//!
//! A packet on a file's socket is an event for `poll()`, of any content. The program's `poll()`
//! takes all packets that have arrived, as the driver's clears its event.
//!
//! A child of `fork()` has connections of its own. It keeps using the files that it inherited.

pub mod calls;
pub mod messages;
pub mod packet;

pub use calls::CallShape;
pub use messages::{
    Block, Done, Fetch, FileId, IoctlRequest, MAX_BLOCKS, MAX_FDS, MAX_FETCHES, MapRequest, Node,
    Place, Range, Refused, Reply, Request, SharedRange, Welcome,
};
pub use packet::{DecodeError, MAX_PACKET, decode, decode_numbered, encode, encode_numbered};

/// Protocol version. Both ends must have the same.
pub const VERSION: u32 = 1;
