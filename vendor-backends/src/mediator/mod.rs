//! A GPU that Tessera drives by itself: one process owns it, decodes what guests submit, and decides whose turn it is.
//!
//! NVIDIA's GPUs have engines that read rings and switch contexts; other devices have neither, and the software GPU is
//! only a CPU. For those this folder is the engine, and [`Hardware`] is what a kind of device adds to it: its memory,
//! and what moves bytes. Read it in this order:
//!
//! 1. [`wire`]: what is said between the processes
//! 2. [`MediatedGpu`] (in the manager) and [`MediatedClient`] (in a worker): the two sides that ask
//! 3. [`server`]: the side that answers, in the process that owns the device
//! 4. [`silicon`]: address spaces, channels, the runlist and the engine
//! 5. [`hardware`]: what is left to a kind of device

mod client;
mod connection;
mod gpu;
pub mod hardware;
pub mod server;
pub mod silicon;
pub mod wire;

pub use client::MediatedClient;
pub use gpu::MediatedGpu;
pub use hardware::Hardware;

/// How an admission names this backend, whatever device is behind it.
pub const BACKEND: &str = "mediated";
