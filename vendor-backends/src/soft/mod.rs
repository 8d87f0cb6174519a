//! The software GPU: a process that executes an NVIDIA channel's commands on the CPU, and its two kinds of client.
//!
//! Read it in this order:
//!
//! 1. [`wire`]: what is said between the processes
//! 2. [`SoftGpu`] (in the manager) and [`SoftClient`] (in a worker): the two sides that ask
//! 3. [`server`]: the side that answers
//! 4. [`silicon`]: memory, address spaces, channels, the runlist and the engine

mod client;
mod connection;
mod gpu;
pub mod server;
pub mod silicon;
pub mod wire;

pub use client::SoftClient;
pub use gpu::SoftGpu;
