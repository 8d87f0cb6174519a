//! The guest's Linux module, in VMs with Debian's kernels.
//!
//! * `loading`: the module without a vGPU
//! * `unbinding`: file operations while the vGPU goes; `endurance`: the same in kernels that look
//!   for faults
//! * `inside`: what programs in these VMs do; `driver_files`: their requests to NVIDIA's files;
//!   `withheld_page`: memory whose access waits
//! * `packages`: the packages for VMs

#![allow(clippy::unwrap_used, reason = "tests")]

mod driver_files;
mod endurance;
mod inside;
mod loading;
mod packages;
mod unbinding;
mod withheld_page;

use anyhow::Result;
use lab::guest_driver::Kernels;
use lab::progress::Progress;
use system_tests::skipped;

/// Returns the kernels, unless they cannot be fetched.
fn kernels() -> Result<Option<Kernels>> {
    match Kernels::open(&Progress::new())? {
        Ok(kernels) => Ok(Some(kernels)),
        Err(reason) => {
            skipped(&format!("no kernels of Debian: {reason}"));
            Ok(None)
        }
    }
}
