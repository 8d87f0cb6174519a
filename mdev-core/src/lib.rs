//! What a vGPU is, whoever makes the GPU and whoever speaks to it.
//!
//! This crate knows no vendor, no socket, no thread and no clock. Read it in this order:
//!
//! 1. [`ids`], [`units`]: the newtypes everything else speaks in
//! 2. [`gpu`]: what Tessera needs of a physical GPU, in the words of a GPU driver
//! 3. [`abi`]: what a guest driver programs: control registers, mailbox, channels, command classes
//! 4. [`irq`], [`mem`], [`sigbus`]: interrupts by eventfd; guest memory; mappings that outlive truncation
//! 5. [`regs`], [`pci`]: registers as data; configuration space
//! 6. [`device`]: the virtual PCI function made of all that
//! 7. [`profile`], [`definition`], [`durable`], [`partition`], [`lifecycle`]: types, vGPUs that persist, files that last,
//!    video memory, states
//! 8. [`sched`]: who gets how much of the GPU's time
#![warn(missing_docs)]

pub mod abi;
pub mod definition;
pub mod device;
pub mod durable;
pub mod gpu;
pub mod ids;
pub mod irq;
pub mod lifecycle;
pub mod mem;
pub mod partition;
pub mod pci;
pub mod profile;
pub mod regs;
pub mod sched;
pub mod sigbus;
#[doc(hidden)]
pub mod testing;
pub mod units;
