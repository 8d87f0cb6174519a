//! Kernel interface of the driver, and the only module that calls it.
//!
//! * [`abi`]: the structures
//! * [`numbers`]: the constants
//! * [`kernel_driver`]: the system calls, and the unsafe code that they need

#[allow(missing_debug_implementations, reason = "types that zerocopy derives")]
pub mod abi;
pub mod kernel_driver;
pub mod numbers;
