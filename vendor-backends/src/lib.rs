//! One folder per kind of silicon, each implementing [`mdev_core::gpu`].
//!
//! * [`soft`]: the software GPU
//! * [`seqpacket`]: packets with file descriptors between Tessera's own processes

pub mod seqpacket;
pub mod soft;
