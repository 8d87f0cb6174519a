//! GPU backends: one folder for each kind of GPU, with implementations of [`mdev_core::gpu`].
//!
//! * [`backend`]: the trait that every backend implements, and the list of backends
//! * [`nvidia`]: NVIDIA GPUs, through the unmodified driver
//! * [`vfio`]: physical PCI devices, through VFIO
//! * [`soft`]: the software GPU
//! * [`mediator`]: the part of a GPU process that gives each vGPU its own address spaces, channels
//!   and time slices, for `vfio` and `soft`
//!
//! The features `nvidia` and `vfio` select the dependencies of these two. Without them there is the
//! software GPU alone, which then has no CUDA programs: they use NVIDIA's device files.
//!
//! * `conformance` (feature `test-util`): checks that every backend must pass

pub mod backend;
#[cfg(feature = "test-util")]
pub mod conformance;
pub mod mediator;
#[cfg(feature = "nvidia")]
pub mod nvidia;
mod parent_options;
pub mod soft;
#[cfg(feature = "vfio")]
pub mod vfio;

/// The guide for authors of backends, whose code is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../docs/writing-a-backend.md")]
struct WritingABackend;
