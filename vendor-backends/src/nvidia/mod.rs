//! NVIDIA GPUs, through the unmodified driver and without privileges.
//!
//! Read it in this order:
//!
//! 1. [`sys`], [`version`]: what the driver's kernel interface looks like; [`rm`]: the way to it
//! 2. [`session`]: a client of the driver and its objects; [`device`]: a GPU
//! 3. [`memory`], [`channels`], [`backoff`], [`bells`], [`trace`]: a vGPU's memory, channels, doorbells, and
//!    engine time
//! 4. [`NvidiaClient`] (in a worker), [`service`], [`signals`]: its threads, [`watch`]: kernels without an end,
//!    [`privilege`]: what it must not have
//! 5. [`fake`]: a driver without a GPU, for tests; [`record`]: what was asked of one
//! 6. [`NvidiaGpu`] (in the manager), [`wire`]: what it says to workers, `believe`: what of their answers can be true

pub mod backoff;
mod believe;
pub mod bells;
pub mod channels;
mod client;
pub mod device;
pub mod fake;
mod gpu;
pub mod memory;
pub mod privilege;
pub mod record;
pub mod rm;
pub mod service;
pub mod session;
pub mod signals;
pub mod sys;
pub mod trace;
pub mod version;
pub mod watch;
pub mod wire;

pub use client::NvidiaClient;
pub use gpu::NvidiaGpu;
pub use sys::kernel::Kernel;
pub use wire::Options;

/// The name under which an admission says that this backend opens it.
pub const BACKEND: &str = "nvidia";
