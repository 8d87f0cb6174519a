//! The races of [`crate::unbinding`] in kernels that look for faults. `cargo lab test endurance`
//! runs these tests; `cargo lab test` leaves them out, since the kernels take long to compile, and
//! slow the VM down.

use anyhow::Result;
use lab::debug_kernel::{Checker, DebugKernel};
use lab::progress::Progress;
use system_tests::guest_vm::Size;
use system_tests::skipped;

use crate::unbinding::RaceVm;

/// Times that the vGPU goes.
const ROUNDS: u32 = 60;

/// Size of the VM: the checkers need memory of their own.
const SIZE: Size = Size { memory_mib: 2048, cpus: 2 };

/// Runs the races in a kernel with a checker, unless what it needs cannot be fetched.
fn race_with(checker: Checker) -> Result<()> {
    let debug = match DebugKernel::open(checker, &Progress::new())? {
        Ok(debug) => debug,
        Err(reason) => {
            skipped(&format!("no sources of a kernel: {reason}"));
            return Ok(());
        }
    };
    let mut vm = RaceVm::boot(&debug.kernel, &debug.module()?, SIZE)?;
    vm.withheld()?;
    vm.race(ROUNDS)
}

#[test]
#[ignore = "takes long: run `cargo lab test endurance`"]
fn the_module_accesses_no_freed_memory_and_orders_its_locks() -> Result<()> {
    race_with(Checker::AddressesAndLocks)
}

#[test]
#[ignore = "takes long: run `cargo lab test endurance`"]
fn the_module_orders_its_accesses() -> Result<()> {
    race_with(Checker::Races)
}
