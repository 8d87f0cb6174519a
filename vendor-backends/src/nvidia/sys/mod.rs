//! What the driver's kernel interface looks like, and the one place that speaks to it.
//!
//! * [`abi`]: its structures; [`numbers`]: its constants
//! * [`kernel`]: the system calls, and all that is unsafe about them

#[allow(missing_debug_implementations, reason = "what zerocopy derives beside them")]
pub mod abi;
pub mod kernel;
pub mod numbers;
