//! A VM that is saved and restored many times while it works. `cargo lab test endurance` runs it.

use std::time::Duration;

use crate::bench::{A, Bench, LIMIT, eventually, job};
use crate::saving::{check_picture, move_to_another_host, save};

/// Number of restores.
const CYCLES: u32 = 100;

/// Jobs of all kinds, each of which checks its results, one after the other.
pub const WORK: &str = "(while :; do for job in 'sgemm --n 96' 'vadd --n 200000' 'copy --size 8' \
                    'spin --seconds 0.3'; do \
                    vgpu-guest $job > /tmp/last 2>&1 || cat /tmp/last >> /tmp/bad; \
                    echo $job >> /tmp/done; done; done) > /dev/null 2>&1 &";

#[test]
#[ignore = "takes several minutes: run `cargo lab test endurance`"]
fn a_vm_is_saved_and_restored_a_hundred_times() {
    let mut bench = Bench::new();
    let socket = bench.vgpu(A);
    let spec = bench.spec("endurance");
    let mut vm = bench.boot(&spec.clone().with_vgpu(&socket));
    job(&mut vm, "mandelbrot");
    check_picture(&bench, A);
    vm.guest.run(WORK, LIMIT).unwrap().success().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.saved");
    let (mut saves, mut restores, mut jobs) = (Vec::new(), Vec::new(), 0);
    for cycle in 0..CYCLES {
        // A different moment of the work each time.
        std::thread::sleep(Duration::from_millis(u64::from(cycle * 37 % 500)));
        saves.push(save(&bench, A, &vm, &file, &[]));
        eventually("QEMU has ended", || !vm.is_running());
        let (restored, time) = move_to_another_host(&mut bench, &spec, A, &file);
        vm = restored;
        restores.push(time);
        check_picture(&bench, A);
        let before = jobs;
        eventually("the guest works", || {
            let done = vm.guest.run("wc -l < /tmp/done", LIMIT).unwrap().stdout;
            jobs = done.trim().parse::<u32>().unwrap_or(before);
            jobs > before
        });
        let bad = vm.guest.run("cat /tmp/bad 2> /dev/null", LIMIT).unwrap().stdout;
        assert!(bad.is_empty(), "cycle {cycle}: {bad}");
    }
    saves.sort_unstable();
    restores.sort_unstable();
    let figures = |times: &[Duration]| {
        let at = |index: usize| times[index].as_millis();
        format!("p50 {} ms, longest {} ms", at(times.len() / 2), at(times.len() - 1))
    };
    let bytes = file.metadata().unwrap().len();
    println!(
        "{CYCLES} restores, {jobs} jobs; saved in {}, restored in {}, {} MiB",
        figures(&saves),
        figures(&restores),
        bytes >> 20
    );
    vm.quit().unwrap();
}
