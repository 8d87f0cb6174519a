//! The remote framebuffer protocol (RFC 6143): what both ends say.
//!
//! * [`handshake`]: versions and passwords
//! * [`message`]: what a viewer says, parsed
//! * [`pixels`]: colours in the format that a viewer wants
//! * [`encode`], [`zrle`], [`tight`]: parts of a picture as a viewer gets them
//!
//! There are crates that serve RFB; they bring a listener and a copy of the picture of their own, and know no other
//! password than DES over TCP. Here connections are let in by the control API, and pictures are read while somebody
//! waits for one, so what is left is this.

pub mod encode;
pub mod handshake;
pub mod message;
pub mod pixels;
pub mod tight;
pub mod zrle;
