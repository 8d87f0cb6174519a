//! The protocol's messages as bytes: a codec without I/O.
//!
//! [`header`] begins every message, [`message`] is what follows it in a request and [`reply`] in a reply,
//! [`caps`] is the JSON that both ends introduce themselves with, and [`wire`] has the fixed structures. All numbers
//! are in the host's byte order, as the specification has them.

pub mod caps;
pub mod header;
pub mod message;
pub mod reply;
pub mod wire;
