//! Common parts of the fuzz targets.
//!
//! * [`input`]: decodes the fuzzer's bytes to numbers that are likely to matter
//! * [`requests`]: requests of CUDA programs
//! * [`emulation`]: a channel of the emulated GPU with writable and protected memory

pub mod books;
pub mod emulation;
pub mod input;
pub mod requests;
