//! Codec of the protocol's messages, without I/O.
//!
//! * [`header`]: message headers and commands
//! * [`message`]: payloads of requests
//! * [`reply`]: payloads of replies
//! * [`caps`]: capabilities, the JSON data of VERSION
//! * [`wire`]: fixed structures
//!
//! Numbers are in the host's byte order, as in the specification.

pub mod caps;
pub mod header;
pub mod message;
pub mod reply;
pub mod wire;
