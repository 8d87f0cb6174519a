//! Mediator: drives a device that cannot share itself. One GPU process owns the device, decodes the
//! work that guests submit, and schedules it.
//!
//! NVIDIA's GPUs have engines that read rings and switch contexts. Other devices do not, and the
//! software GPU is only a CPU. For these devices the mediator emulates the engine, and [`Hardware`]
//! adds what is specific to the device: its memory, and the means of moving bytes. In reading
//! order:
//!
//! 1. [`wire`]: the protocol between the processes
//! 2. [`MediatedGpu`] (in the manager) and [`MediatedClient`] (in a worker): the protocol's clients
//! 3. [`server`]: the protocol's server, in the GPU process
//! 4. [`emulation`]: address spaces, channels, the runlist and the engine
//! 5. [`arbiter`] and [`context_process`]: engines in a process for each vGPU, which get turns;
//!    [`turn_page`]: the memory that they share
//! 6. `saved_state`: files with saved states
//! 7. [`hardware`], [`fault`]: the interface to a device; [`factorial`]: a fixed function

pub mod arbiter;
mod client;
mod connection;
pub mod context_process;
pub mod emulation;
pub mod factorial;
pub mod fault;
mod gpu;
pub mod hardware;
mod saved_state;
pub mod server;
pub mod turn_page;
pub mod wire;

pub use client::MediatedClient;
pub use gpu::MediatedGpu;
pub use hardware::Hardware;

/// Backend name in admissions, for all mediated devices.
pub const BACKEND: &str = "mediated";
