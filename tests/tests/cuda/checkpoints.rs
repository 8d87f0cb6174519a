//! Checkpoints of CUDA programs by NVIDIA's libcuda, on the host and in a VM that is saved.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use system_tests::guest_vm;
use system_tests::vgpuctl::{refused, vgpuctl};
use system_tests::wait_for;

use crate::in_vm::CudaVm;
use crate::{Gpu, inside, on_vgpu};

/// `vgpuctl`'s exit status for what is not possible now.
const NOT_NOW: i32 = 5;

/// Checkpoints or restores a program on a vGPU.
fn toggle(gpu: &Gpu<'_>, pid: u32) -> Result<()> {
    let output = gpu.command("toggles")?.env(inside::PROCESS, pid.to_string()).output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Returns the video memory of a vGPU's programs and its channels, as they were a moment ago.
fn in_use(gpu: &Gpu<'_>) -> Result<(u64, u64)> {
    let stats = gpu.vgpud.get("/v1/stats")?["vgpus"][0].clone();
    let memory = stats["programs"]["vram_used_bytes"].as_u64().context("no programs")?;
    Ok((memory, stats["channels"].as_u64().context("no channels")?))
}

#[test]
fn a_checkpointed_program_has_nothing_on_the_vgpu_and_is_right_after_it() -> Result<()> {
    on_vgpu(|gpu| {
        let mut child = gpu.command("keeps_its_memory")?.stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stdout.take().context("no output")?).lines();
        let mut rounds = lines.map_while(Result::ok).filter(|line| line.starts_with("round "));
        rounds.next().context("The program has ended")?;
        let mut before = (0, 0);
        wait_for("20 channels", || {
            before = in_use(gpu).unwrap_or_default();
            before.0 > 100 << 20 && before.1 == 20
        })?;
        for _ in 0..3 {
            toggle(gpu, child.id())?;
            wait_for("nothing is in use", || in_use(gpu).is_ok_and(|now| now == (0, 0)))?;
            // All of the memory is another program's, which fills it.
            gpu.run("out_of_memory")?;
            toggle(gpu, child.id())?;
            wait_for("all of it is there again", || in_use(gpu).is_ok_and(|now| now == before))?;
            // Rounds that were written before, and two that begin now.
            for _ in 0..3 {
                rounds.next().context("The program has ended")?;
            }
        }
        child.kill()?;
        child.wait()?;
        Ok(())
    })
}

/// Program in the VM in the place of `vgpu-checkpoint`. This libcuda does two steps at once.
const TOOL: &str = "#!/bin/sh\\ncase $2 in lock|unlock) exit 0;; esac\\n\
    export LD_LIBRARY_PATH=/cuda TESSERA_TEST_INSIDE=1 TESSERA_TEST_PROCESS=$4\\n\
    exec /bin/cuda --exact inside::toggles --ignored --nocapture\\n";

/// Returns a shell command that succeeds once a program has done two more rounds.
fn two_more(log: &str) -> String {
    format!(
        "n=$(grep -c round {log}); for i in $(seq 600); do \
         [ $(grep -c round {log}) -ge $((n + 2)) ] && exit 0; sleep 0.2; done; cat {log}; exit 1"
    )
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_vm_is_saved_and_restored_with_its_cuda_programs() -> Result<()> {
    let Some(mut vm) = CudaVm::boot_with_memory(2048)? else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("vm.saved");
    let save = format!(
        "vm save {} --monitor {} -o {}",
        vm.uuid,
        vm.guest.vm.keys().display(),
        file.display()
    );
    let program = CudaVm::command("keeps_its_memory");
    vm.guest.run(&format!("env {program} > /tmp/log 2>&1 & true"))?;
    vm.guest.run(&two_more("/tmp/log"))?;
    refused(&vm.vgpud, &save, NOT_NOW, "no agent there can checkpoint them")?;
    vm.guest.run(&two_more("/tmp/log"))?;

    // A process that is no CUDA program: all continue, and the reason names it.
    vm.guest.run(&format!("mkdir -p /run && printf '{TOOL}' > /bin/tool && chmod +x /bin/tool"))?;
    vm.guest.run("vgpu-guest agent --tool /bin/tool > /tmp/agent 2>&1 & true")?;
    let waits = "for i in $(seq 100); do grep -q Waiting /tmp/agent && exit 0; sleep 0.1; done";
    vm.guest.run(&format!("{waits}; cat /tmp/agent; exit 1"))?;
    let other = vm.guest.run("sleep 1000 < /dev/nvidiactl > /dev/null 2>&1 & echo $!")?;
    let reason = format!("process {} (\"sleep\"): checkpoint failed: ", other.trim());
    refused(&vm.vgpud, &save, NOT_NOW, &reason)?;
    ensure!(!file.exists());
    vm.guest.run(&format!("kill {}", other.trim()))?;
    vm.guest.run(&two_more("/tmp/log"))?;

    // A program with managed memory is refused before libcuda is asked.
    let managed = CudaVm::command("keeps_managed_memory");
    let managed = vm.guest.run(&format!("env {managed} > /tmp/managed 2>&1 & echo $!"))?;
    let (managed, begun) =
        (managed.trim(), "while ! grep -q round /tmp/managed; do sleep 0.1; done");
    vm.guest.run(&format!("{begun}; sleep 0.3"))?;
    let reason = format!("process {managed} in the VM has managed memory");
    refused(&vm.vgpud, &save, NOT_NOW, &reason)?;
    vm.guest.run(&format!("kill {managed}; while kill -0 {managed}; do sleep 0.1; done"))?;
    vm.guest.run(&two_more("/tmp/log"))?;

    // A program that begins while the others are checkpointed waits.
    let begun = Instant::now();
    vgpuctl(&vm.vgpud, &format!("checkpoint {}", vm.uuid))?;
    println!("checkpointed in {} ms", begun.elapsed().as_millis());
    let late = CudaVm::command("identity");
    vm.guest.run(&format!(
        "n=$(grep -c round /tmp/log); (env {late} > /tmp/late 2>&1) & sleep 3; \
        [ $(grep -c round /tmp/log) = $n ] && ! grep -q passed /tmp/late"
    ))?;
    vgpuctl(&vm.vgpud, &format!("resume {}", vm.uuid))?;
    vm.guest.run(
        "for i in $(seq 300); do grep -q '1 passed' /tmp/late && exit 0; sleep 0.2; done; \
        cat /tmp/late /tmp/agent; exit 1",
    )?;
    vm.guest.run(&two_more("/tmp/log"))?;

    vgpuctl(&vm.vgpud, &format!("{save} --keep-running"))?;
    vm.guest.run(&two_more("/tmp/log"))?;
    let begun = Instant::now();
    vgpuctl(&vm.vgpud, &save)?;
    let mib = std::fs::metadata(&file)?.len() >> 20;
    println!("saved in {} ms: {mib} MiB", begun.elapsed().as_millis());
    vm.restart_on_another()?;
    let monitor = vm.guest.vm.keys();
    let restore =
        format!("vm restore {} --monitor {} -i {}", vm.uuid, monitor.display(), file.display());
    vgpuctl(&vm.vgpud, &restore)?;
    vm.guest.vm.wait_running()?;
    vm.guest.run(&two_more("/tmp/log"))?;
    vm.run("identity")?;
    let ended = vm.guest.vm.guest.run("cat /tmp/agent; pidof vgpu-guest", guest_vm::LIMIT)?;
    ensure!(ended.status == 0, "the agent has ended: {ended:?}");
    vm.guest.check_log()?;
    moves_and_gets_a_new_qemu(&mut vm, folder.path())
}

/// Moves a VM with a CUDA program to "another host", and gives it a new QEMU.
fn moves_and_gets_a_new_qemu(vm: &mut CudaVm, folder: &Path) -> Result<()> {
    let begun = Instant::now();
    vm.migrate_to_another()?;
    println!("moved in {} ms", begun.elapsed().as_millis());
    vm.guest.run(&two_more("/tmp/log"))?;
    let begun = Instant::now();
    let mut new = vm.guest.upgrade(&vm.vgpud, &vm.uuid, &folder.join("new"))?;
    println!("in a new QEMU after {} ms", begun.elapsed().as_millis());
    new.guest.run(&two_more("/tmp/log"), guest_vm::LIMIT)?.success()?;
    Ok(())
}
