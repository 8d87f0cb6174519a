//! Remote framebuffer protocol (RFC 6143) for a server.
//!
//! * [`handshake`]: protocol versions and security types
//! * [`message`]: parser of client messages
//! * [`picture`], [`canvas`]: pixels in memory, and changes by tile
//! * [`pixels`]: colours in a client's pixel format
//! * [`encode`], [`zrle`], [`tight`]: framebuffer updates
//!
//! Existing crates for RFB servers include a listener and a copy of the picture, and support no
//! authentication besides DES over TCP. This crate leaves connections, authorization and reading of
//! pictures to its user.

pub mod canvas;
pub mod encode;
pub mod handshake;
pub mod message;
pub mod picture;
pub mod pixels;
pub mod tight;
pub mod zrle;
