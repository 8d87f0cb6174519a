//! CUDA programs on a vGPU, as its worker serves them.
//!
//! Programs use the device files of a GPU's driver. A worker gets their requests from `cuda.sock`
//! (crate [`cuda_socket`]) or from the control queue of a VM, and passes them to a [`FrontEnd`],
//! which implements the files. This crate knows no driver: backends implement the trait.
//!
//! * [`front_end`]: the trait, and what its methods take and return
//! * [`control_queue`]: programs in a VM
//! * [`guest_memory`]: memory of a VM for its programs
//! * [`ring_clock`]: time since programs last rang a doorbell page
//! * [`change_map`]: a map that notes what changes, for journals

pub mod change_map;
pub mod control_queue;
pub mod front_end;
pub mod guest_memory;
pub mod ring_clock;

pub use front_end::FrontEnd;
