//! What the fuzz targets share.
//!
//! * [`input`]: numbers that are likely to matter, out of the fuzzer's bytes
//! * [`client`]: a GPU client that only keeps books, and fails now and then
//! * [`device`]: a device that trusts nobody, behind a session
//! * [`silicon`]: a channel of the software silicon, with memory that it may and may not write

pub mod client;
pub mod device;
pub mod input;
pub mod silicon;
