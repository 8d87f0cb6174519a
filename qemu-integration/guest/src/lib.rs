//! The runtime that runs inside a VM and drives its vGPU.
//!
//! Everything above [`platform::Platform`] is the same in a VM, in a test and beside another GPU. Read it in this
//! order:
//!
//! 1. [`platform`]: what differs between environments; [`pci`], [`pool`] and [`pinned`] are a VM's
//! 2. [`mailbox`], [`ranges`], [`device`], [`memory`]: requests, addresses, and buffers that the GPU can reach
//! 3. [`pushbuffer`], [`fence`], [`channel`]: rings of commands, and how to wait for them
//! 4. [`copy`], [`compute`]: the two classes of commands; [`programs`]: what kernels are made of, out of a [`cubin`] where
//!    the GPU runs machine code
//! 5. [`work`], [`bench`]: jobs that check their results, and a steady load made of them; [`screen`] is where one of
//!    them draws
//!
//! The program `vgpu-guest` is [`cli`].

pub mod bench;
pub mod channel;
pub mod cli;
pub mod compute;
pub mod copy;
pub mod cubin;
pub mod device;
pub mod error;
pub mod fence;
pub mod mailbox;
pub mod memory;
pub mod pci;
pub mod pinned;
pub mod platform;
pub mod pool;
pub mod programs;
pub mod pushbuffer;
pub mod ranges;
pub mod screen;
pub mod work;

pub use error::GuestError;
