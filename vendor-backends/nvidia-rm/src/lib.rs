//! Protocol of NVIDIA's resource manager (RM) and of nvidia-uvm.
//!
//! Reading order:
//!
//! 1. [`version`]: series of the driver, and what differs between them
//! 2. [`table`]: what a row of the protocol is; [`escapes`], [`uvm`], [`classes`], [`controls`]:
//!    the rows; [`abi`]: structures; [`numbers`]: constants; [`ctxsw_record`]: records of the
//!    context switch log
//! 3. [`rm`]: the trait that reaches the driver; [`kernel_driver`]: the driver of this machine;
//!    [`rm_client`]: a client of the driver, and its objects; [`bytes`]: numbers in bytes
//! 4. [`generation`]: classes that differ between GPUs
//! 5. [`recording`]: recorded answers of a driver
//! 6. with the feature `test-util`, `rm_recorder`: recorder of driver calls; `fake_rm`: a driver
//!    without a GPU

#[macro_use]
pub mod table;

#[allow(missing_debug_implementations, reason = "types that zerocopy derives")]
pub mod abi;
pub mod bytes;
pub mod classes;
pub mod controls;
pub mod ctxsw_record;
pub mod escapes;
#[cfg(feature = "test-util")]
pub mod fake_rm;
pub mod generation;
pub mod kernel_driver;
pub mod numbers;
pub mod recording;
pub mod rm;
pub mod rm_client;
#[cfg(feature = "test-util")]
pub mod rm_recorder;
pub mod uvm;
pub mod version;

pub use kernel_driver::KernelDriver;
