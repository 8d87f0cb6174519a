//! One folder per kind of silicon, each implementing [`mdev_core::gpu`].
//!
//! * [`soft`]: the software GPU
//! * [`nvidia`]: NVIDIA GPUs, through the unmodified driver
//! * [`conformance`]: what every backend must do, as assertions
//! * [`seqpacket`]: packets with file descriptors between Tessera's own processes

pub mod conformance;
pub mod nvidia;
pub mod seqpacket;
pub mod soft;
