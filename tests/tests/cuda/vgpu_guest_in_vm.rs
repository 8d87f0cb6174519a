//! `vgpu-guest` in a VM whose vGPU the module has: it drives the vGPU itself, with interrupts.

use anyhow::{Context, Result, ensure};
use system_tests::guest_vm;

use crate::in_vm::CudaVm;

/// Returns how often the vGPU has interrupted the VM.
fn interrupts(vm: &mut CudaVm) -> Result<u64> {
    let lines = vm.guest.run("grep tessera_guest /proc/interrupts")?;
    let count = lines.split_whitespace().nth(1).context("no count")?;
    Ok(count.parse()?)
}

/// Fails unless a command ends with an error that contains `reason`.
fn refused(vm: &mut CudaVm, command: &str, reason: &str) -> Result<()> {
    let output = vm.guest.vm.guest.run(command, guest_vm::LIMIT)?;
    let told = format!("{}{}", output.stdout, output.stderr);
    ensure!(output.status != 0 && told.contains(reason), "{command}: {output:?}");
    Ok(())
}

#[test]
#[ignore = "boots a VM: run `cargo lab test`"]
fn vgpu_guest_waits_for_interrupts_and_has_the_vgpu_alone() -> Result<()> {
    const WORKS: &str = "vgpu-guest bench --seconds 300 > /tmp/bench 2>&1 & echo $!";
    let Some(mut vm) = CudaVm::boot("")? else { return Ok(()) };
    ensure!(vm.guest.run("ls -l /dev/tessera-vgpu")?.starts_with("crw-------"));

    // Kernels of 50 ms, and copies: each wait ends with an interrupt, and not with a look at the
    // semaphore 100 ms later.
    vm.guest.run("vgpu-guest vadd")?;
    let before = interrupts(&mut vm)?;
    let bench = "vgpu-guest --json bench --seconds 3 --kernel-us 50000 --depth 1";
    let report = vm.guest.run(bench)?;
    let report: serde_json::Value = serde_json::from_str(&report)?;
    let (units, came) =
        (report["units"].as_u64().context("no units")?, interrupts(&mut vm)? - before);
    println!("{units} units, {came} interrupts");
    ensure!(units >= 20 && came >= units, "{units} units, {came} interrupts");
    let before = interrupts(&mut vm)?;
    vm.guest.run("vgpu-guest copy --size 64K")?;
    ensure!(interrupts(&mut vm)? > before, "no interrupt of copies");
    vm.run("copies")?;

    // One or the other has the vGPU.
    let program = vm.start_waiting("/tmp/waits")?;
    refused(&mut vm, "vgpu-guest vadd", "is in use by a CUDA program")?;
    vm.guest.run(&format!("kill -9 {program}; while kill -0 {program}; do sleep 0.1; done"))?;
    let bench = vm.guest.run(WORKS)?;
    let bench = bench.trim().to_owned();
    vm.guest.run("while ! cat /dev/nvidiactl 2>&1 | grep -q busy; do sleep 0.1; done")?;
    refused(&mut vm, "cat /dev/tessera-vgpu", "busy")?;
    vm.guest.run(&format!("kill -9 {bench}; while kill -0 {bench}; do sleep 0.1; done"))?;
    vm.run("copies")?;

    // A program that loses the vGPU ends, and the next one has it.
    let device = vm.guest.run("cd /sys/bus/pci/drivers/tessera_guest && echo 0000:*")?;
    let (device, driver) = (device.trim(), "/sys/bus/pci/drivers/tessera_guest");
    for lost in [
        format!("echo {device} > {driver}/unbind; echo {device} > {driver}/bind"),
        format!("echo 1 > /sys/bus/pci/devices/{device}/reset"),
    ] {
        let bench = vm.guest.run(WORKS)?;
        vm.guest.run("while ! cat /dev/nvidiactl 2>&1 | grep -q busy; do sleep 0.1; done")?;
        vm.guest.run(&format!("{lost}; while kill -0 {}; do sleep 0.1; done", bench.trim()))?;
        vm.guest.run("vgpu-guest vadd")?;
    }
    vm.run("copies")?;
    vm.guest.run("rmmod tessera_guest && insmod /module.ko msi=0")?;
    vm.guest.run("vgpu-guest vadd && rmmod tessera_guest && vgpu-guest vadd")?;
    vm.guest.check_log()
}
