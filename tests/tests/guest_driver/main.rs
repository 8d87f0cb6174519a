//! The guest's Linux module, in VMs with Debian's kernels.
//!
//! * `loading`: the module without a vGPU
//! * `packages`: the packages for VMs

#![allow(clippy::unwrap_used, reason = "tests")]

mod loading;
mod packages;

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
