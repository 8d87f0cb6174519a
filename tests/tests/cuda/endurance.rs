//! Many starts, kills, reloads and hot-unplugs in a VM. `cargo lab test endurance` runs these
//! tests; `cargo lab test` leaves them out, since they take long.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use super::in_vm::CudaVm;

/// Programs that start, modules that are loaded and vGPUs that are unplugged.
const STARTS: u32 = 1000;
const RELOADS: u32 = 100;
const UNPLUGS: u32 = 50;

/// Programs between two that run to their end.
const BATCH: u32 = 10;

/// Growth that counts as a leak: of unreclaimable memory of the guest's kernel, and of the worker's
/// own memory, both in KiB. A program that leaked a page at each start would exceed it.
const MOST_GROWTH: u64 = 2048;
/// Descriptors of the worker that come and go: connections of the manager.
const CONNECTIONS: usize = 2;

/// What the vGPU costs while no program runs.
#[derive(Clone, Copy, Debug)]
struct Footprint {
    /// Unreclaimable memory of the guest's kernel, in KiB.
    kernel_kib: u64,
    /// Memory of the worker without the guest's, in KiB.
    worker_kib: u64,
    /// Open descriptors of the worker.
    worker_fds: usize,
}

/// Returns a number of KiB in a file such as `/proc/meminfo`.
fn kib(text: &str, name: &str) -> Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)).context("no such line")?;
    Ok(line.trim_start_matches(':').trim().trim_end_matches(" kB").parse()?)
}

impl Footprint {
    fn measure(vm: &mut CudaVm) -> Result<Self> {
        let info = vm.guest.run("cat /proc/meminfo")?;
        let worker = PathBuf::from(format!("/proc/{}", vm.worker()?));
        Ok(Self {
            kernel_kib: kib(&info, "SUnreclaim")?,
            worker_kib: kib(&fs::read_to_string(worker.join("status"))?, "RssAnon")?,
            worker_fds: fs::read_dir(worker.join("fd"))?.count(),
        })
    }
}

/// Footprint after the first batch, which later ones may not exceed.
#[derive(Debug, Default)]
struct Leaks(Option<Footprint>);

impl Leaks {
    /// Runs a program to its end and checks that nothing has leaked since the first call.
    fn check(&mut self, vm: &mut CudaVm, round: u32) -> Result<()> {
        vm.run("identity").with_context(|| format!("After {round} rounds"))?;
        let now = Footprint::measure(vm)?;
        println!("{round}: {now:?}");
        let first = *self.0.get_or_insert(now);
        let grown = now.worker_fds > first.worker_fds + CONNECTIONS
            || now.worker_kib > first.worker_kib + MOST_GROWTH
            || now.kernel_kib > first.kernel_kib + MOST_GROWTH;
        ensure!(!grown, "After {round} rounds: {now:?}, at first {first:?}");
        Ok(())
    }
}

/// Returns times in hundredths of a second, spread evenly from 0.05 s to 1.5 s.
fn delays() -> impl Iterator<Item = String> {
    (0_u32..).map(|n| 5 + n.wrapping_mul(97) % 146).map(|n| format!("{}.{:02}", n / 100, n % 100))
}

#[test]
#[ignore = "takes long: run `cargo lab test endurance`"]
fn a_thousand_programs_start_and_are_killed() -> Result<()> {
    let Some(mut vm) = CudaVm::boot("")? else { return Ok(()) };
    let mut leaks = Leaks::default();
    let (copies, mut delays) = (CudaVm::command("copies"), delays());
    for batch in 1..=STARTS / BATCH {
        let times: Vec<_> = delays.by_ref().take(BATCH as usize - 1).collect();
        vm.guest.run(&format!(
            "for delay in {}; do env {copies} > /tmp/log 2>&1 & sleep $delay; kill -9 $!; \
             wait $! 2> /dev/null; done; true",
            times.join(" ")
        ))?;
        leaks.check(&mut vm, batch * BATCH)?;
    }
    vm.run("out_of_memory").context("The killed programs' memory is not free")?;
    vm.guest.check_log()
}

#[test]
#[ignore = "takes long: run `cargo lab test endurance`"]
fn the_module_is_reloaded_under_load() -> Result<()> {
    const DRIVER: &str = "/sys/bus/pci/drivers/tessera_guest";
    let Some(mut vm) = CudaVm::boot("")? else { return Ok(()) };
    let mut leaks = Leaks::default();
    let device = vm.guest.run(&format!("cd {DRIVER} && echo 0000:*"))?;
    let device = device.trim();
    let copies = CudaVm::command("copies");
    for (round, delay) in (1..=RELOADS).zip(delays()) {
        // Open files keep the module until their programs have seen that the vGPU is gone.
        vm.guest.run(&format!(
            "env {copies} > /tmp/log 2>&1 & sleep {delay}; echo {device} > {DRIVER}/unbind; wait $!; \
             rmmod tessera_guest && insmod /module.ko"
        ))?;
        if round.is_multiple_of(BATCH) {
            leaks.check(&mut vm, round)?;
        }
    }
    vm.guest.check_log()
}

#[test]
#[ignore = "takes long: run `cargo lab test endurance`"]
fn the_vgpu_is_unplugged_under_load() -> Result<()> {
    let Some(mut vm) = CudaVm::boot_unplugged("")? else { return Ok(()) };
    let copies = CudaVm::command("copies");
    let mut leaks = Leaks::default();
    vm.plug(0)?;
    for (round, delay) in (1..=UNPLUGS).zip(delays()) {
        vm.guest.run(&format!("env {copies} > /tmp/log 2>&1 & sleep {delay}"))?;
        vm.unplug(round - 1)?;
        vm.guest.run("while pidof cuda > /dev/null; do sleep 0.1; done; [ ! -e /dev/nvidia0 ]")?;
        vm.plug(round)?;
        if round.is_multiple_of(BATCH) {
            leaks.check(&mut vm, round)?;
        }
    }
    vm.guest.check_log()
}
