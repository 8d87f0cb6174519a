//! A VM that is saved and restored many times while it works. `cargo lab test endurance` runs it.

use lab::demo::live::Live;
use lab::host::Parent;

use crate::bench::Bench;

/// Number of restores.
const CYCLES: u32 = 100;

#[test]
#[ignore = "takes several minutes: run `cargo lab test endurance`"]
fn a_vm_is_saved_and_restored_a_hundred_times() {
    let bench = Bench::new();
    let folder = tempfile::tempdir().unwrap();
    let mut live =
        Live::boot(bench.lab, bench.programs, Parent::Soft, "256M", folder.path()).unwrap();
    for _ in 0..CYCLES {
        live.save_and_restore().unwrap();
    }
    println!("{}", live.figures().unwrap());
}
