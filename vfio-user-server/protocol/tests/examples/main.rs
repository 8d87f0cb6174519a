//! The examples' devices, driven over a socket pair as clients drive them.
//!
//! * `scratch`, `dma_engine`: the examples
//! * `support`: the client

// Clippy knows only the functions marked as tests, not those that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod dma_engine;
mod scratch;
mod support;
