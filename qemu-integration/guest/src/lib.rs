//! Runtime that drives a vGPU from inside a VM.
//!
//! All code above [`platform::Platform`] is the same in a VM, in a test and beside another GPU.
//! Reading order:
//!
//! 1. [`platform`]: abstraction of the environment; [`pci`], [`pool`] and [`pinned`] implement it
//!    for a VM, where [`lock_owner`] tells which process has the vGPU; [`direct`]: the node of the
//!    kernel driver, if one has the vGPU
//! 2. [`properties`], [`mailbox`], [`ranges`], [`device`], [`memory`]: registers, requests, address
//!    ranges, and buffers that the GPU can access
//! 3. [`pushbuffer`], [`fence`], [`channel`]: rings of commands and waits for their completion
//! 4. [`copy`], [`compute`]: the two classes of methods; [`programs`]: loaded kernels, read from a
//!    [`cubin`] if the GPU executes machine code
//! 5. [`work`], [`mod@bench`]: jobs that check their results, and a steady load of such jobs;
//!    [`mod@access`]: time of an access to a register; [`screen`]: the framebuffer and its mode,
//!    for drawing on the screen
//!
//! [`cli`] is the program `vgpu-guest`; [`doctor`] is its checks of the VM, [`checkpoint`] its
//! agent for saves of a VM with CUDA programs.

pub mod access;
pub mod bench;
pub mod channel;
pub mod checkpoint;
pub mod cli;
pub mod compute;
pub mod copy;
pub mod cubin;
pub mod device;
pub mod direct;
pub mod doctor;
mod error;
pub mod fence;
pub mod lock_owner;
pub mod mailbox;
pub mod memory;
pub mod pci;
pub mod pinned;
pub mod platform;
pub mod pool;
pub mod programs;
pub mod properties;
pub mod pushbuffer;
pub mod ranges;
pub mod screen;
pub mod work;

pub use error::GuestError;
