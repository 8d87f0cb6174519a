//! The module without a vGPU, on each of Debian's kernels.

use anyhow::{Result, ensure};
use lab::cleanup::Scratch;
use system_tests::guest_vm::{Guest, LIMIT};

use crate::kernels;

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn the_module_compiles_without_warnings_and_loads_on_debians_kernels() -> Result<()> {
    let Some(kernels) = kernels()? else { return Ok(()) };
    for target in kernels.targets()? {
        let scratch = Scratch::new()?;
        let module = kernels.build(&target)?;
        let mut guest = Guest::boot(&target.kernel, &module, &[], None, scratch.path())?;
        for _ in 0..3 {
            guest.run("insmod /module.ko")?;
            let devices = guest.run("cat /proc/devices")?;
            for name in ["195 nvidia\n", "195 nvidiactl\n", " nvidia-uvm\n"] {
                ensure!(devices.contains(name), "{}: no {name} in {devices}", target.release);
            }
            guest.run("[ ! -e /dev/nvidiactl ] && [ ! -e /proc/driver/nvidia ]")?;
            guest.run("rmmod tessera_guest")?;
        }
        guest.check_log()?;
    }
    Ok(())
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_program_that_opens_a_node_without_a_vgpu_is_told_so() -> Result<()> {
    let Some(kernels) = kernels()? else { return Ok(()) };
    let target = kernels.stable()?;
    let scratch = Scratch::new()?;
    let module = kernels.build(&target)?;
    let mut guest = Guest::boot(&target.kernel, &module, &[], None, scratch.path())?;
    guest.run("insmod /module.ko && mknod /tmp/ctl c 195 255")?;
    let output = guest.vm.guest.run("cat /tmp/ctl", LIMIT)?;
    ensure!(output.status != 0 && output.stderr.contains("No such device"), "{output:?}");
    guest.check_log()
}
