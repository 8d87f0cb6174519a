//! The protocol's messages as bytes: a codec without I/O.
//!
//! All numbers are in the host's byte order, as the specification has them.

pub mod message;
