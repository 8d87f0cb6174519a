//! Calls of libc and the kernel, and memory of the program.
//!
//! * [`next`]: the functions of libc that the library replaces
//! * [`kernel`]: system calls
//! * [`memory`]: memory of the program
//! * [`quiet`]: sections that neither signals nor cancellation interrupt
//! * [`fork`]: handlers of `fork()`

pub mod fork;
pub mod kernel;
pub mod memory;
pub mod next;
pub mod quiet;
