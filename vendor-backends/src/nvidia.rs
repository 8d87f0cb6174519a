//! NVIDIA GPUs, through the unmodified driver and without privileges.
//!
//! Reading order:
//!
//! 1. crate [`nvidia_rm`]: the driver's protocol, the trait that reaches the driver
//!    ([`Rm`](nvidia_rm::rm::Rm)), a client of the driver with its objects
//!    ([`nvidia_rm::rm_client`]), what differs between GPUs ([`nvidia_rm::generation`]), and a
//!    driver without a GPU (`fake_rm`, feature `test-util`)
//! 2. [`device`]: a GPU; [`usermode_page`]: its doorbell and clock; [`error_notifier`]: errors of
//!    channels
//! 3. [`memory`], [`fault_backoff`], [`doorbell_poller`], [`channels`]: memory, doorbells and
//!    channels of a vGPU; [`observers`]: its engine time, and what of that time was used;
//!    [`observed_channels`]: both together
//! 4. [`NvidiaClient`] (in a worker), [`adoption`] (by the next worker), [`vgpu_state`],
//!    [`activity`], [`hang_detector`], [`signals`], [`privilege`]; its threads: [`manager_thread`],
//!    [`interrupt_thread`]
//! 5. `saving`: stopping a vGPU's work; `vram_copier`: copies of its video memory
//! 6. [`frontend`]: the driver's device files for CUDA programs; [`driver_queries`]: what they ask
//!    the driver
//! 7. [`NvidiaGpu`] (in the manager), [`wire`]: its messages to workers, `usage_reconcile`: the
//!    check of the usage that workers report

pub mod activity;
pub mod adoption;
mod backend;
pub mod channels;
mod client;
pub mod device;
pub mod doorbell_poller;
pub mod driver_queries;
pub mod error_notifier;
pub mod fault_backoff;
pub mod frontend;
mod gpu;
pub mod hang_detector;
pub mod interrupt_thread;
pub mod manager_thread;
pub mod memory;
pub mod observed_channels;
pub mod observers;
pub mod privilege;
mod saving;
pub mod signals;
mod usage_reconcile;
pub mod usermode_page;
pub mod vgpu_state;
mod vram_copier;
pub mod wire;
mod work_time;

pub use backend::NvidiaBackend;
pub use client::NvidiaClient;
pub use gpu::NvidiaGpu;
pub use wire::Options;

/// Name of this backend in admissions.
pub const BACKEND: &str = "nvidia";
