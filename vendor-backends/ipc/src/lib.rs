//! What Tessera's processes exchange with each other and with guests.
//!
//! * [`seqpacket`]: packets with file descriptors, over UNIX sockets
//! * [`mem`]: memory mapped by several processes, and all raw accesses to it
//! * [`record_file`]: records by which a process adopts the work of one that died

pub mod mem;
pub mod record_file;
pub mod seqpacket;
