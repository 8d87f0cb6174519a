//! What the fuzz targets share.
//!
//! * [`input`]: numbers that are likely to matter, out of the fuzzer's bytes
//! * [`silicon`]: a channel of the software silicon, with memory that it may and may not write

pub mod input;
pub mod silicon;
