//! Model of a vGPU, independent of GPU vendors and of the transport to the VMM.
//!
//! This crate contains no vendor code, sockets, threads or clocks. Reading order:
//!
//! 1. [`ids`], [`units`]: identifiers, addresses and sizes
//! 2. [`gpu`]: the interface to a GPU backend
//! 3. [`abi`]: the interface to a guest driver: control registers, mailbox, channels, classes
//! 4. [`mem`], [`memory_file`], [`sigbus`]: guest memory; the files that it may lie in; mappings
//!    that survive truncation of their files
//! 5. [`pci_registers`]: register tables, configuration space, interrupts by eventfd
//! 6. [`device`]: the virtual PCI function
//! 7. [`profile`], [`definition`], [`durable`], [`partition`]: vGPU types, persistent
//!    definitions, atomic file replacement, video memory
//! 8. [`sched`]: the scheduler of the GPU's time
//! 9. [`stream`]: the file format of a saved vGPU
//! 10. [`untrusted`]: text and files that less trusted processes choose
#![warn(missing_docs)]

pub mod abi;
pub mod definition;
pub mod device;
pub mod durable;
pub mod gpu;
pub mod ids;
pub mod mem;
pub mod memory_file;
pub mod partition;
pub mod profile;
pub mod sched;
pub mod sigbus;
pub mod stream;
#[cfg(any(test, feature = "test-util"))]
pub mod testing;
pub mod units;
pub mod untrusted;
