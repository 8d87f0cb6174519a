//! One folder per kind of silicon, each implementing [`mdev_core::gpu`].
//!
//! * `soft`: the software GPU

pub mod seqpacket;
