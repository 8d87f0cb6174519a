//! One folder per kind of silicon, each implementing [`mdev_core::gpu`].
//!
//! * [`mediator`]: the process that drives a device which cannot be shared by itself
//! * [`soft`]: the software GPU
//! * [`nvidia`]: NVIDIA GPUs, through the unmodified driver
//! * [`vfio`]: physical PCI devices through VFIO
//! * [`conformance`]: what every backend must do, as assertions
//! * [`mem`]: mapped memory that others write to, for any of them
//! * [`seqpacket`]: packets with file descriptors between Tessera's own processes

pub mod conformance;
pub mod mediator;
pub mod mem;
pub mod nvidia;
pub mod seqpacket;
pub mod soft;
pub mod vfio;
