//! What an operator sees of the programs on a vGPU: processes, and video memory in use.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use system_tests::vgpuctl::vgpuctl;

use crate::{Gpu, on_vgpu, wait_for};

/// Video memory that [`crate::inside::waits`] allocates, in bytes.
const ALLOCATED: u64 = 64 << 20;

/// Returns the programs on the vGPU, as the control API reports them.
fn programs(gpu: &Gpu<'_>) -> Result<Value> {
    let stats = gpu.vgpud.call("GET", "/v1/stats", None)?;
    let all = stats["vgpus"].as_array().context("No vGPUs")?;
    let vgpu = all.iter().find(|vgpu| vgpu["uuid"] == gpu.uuid.as_str()).context("No vGPU")?;
    ensure!(vgpu["vm_pid"].is_null(), "A program is reported as a VM: {vgpu}");
    Ok(vgpu["programs"].clone())
}

#[test]
fn statistics_show_processes_and_memory_in_use() -> Result<()> {
    on_vgpu(|gpu| {
        ensure!(programs(gpu)?.is_null(), "Programs before the first one");
        let mut children = [gpu.start_waiting()?, gpu.start_waiting()?];
        let found = programs(gpu)?;
        let processes = found["processes"].as_array().context("No processes")?;
        ensure!(processes.len() == children.len(), "{found}");
        let name = std::fs::read_to_string(format!("/proc/{}/comm", children[0].id()))?;
        let name = name.trim_end();
        let mut total = 0;
        for child in &children {
            let process = processes.iter().find(|process| process["pid"] == child.id());
            let process = process.with_context(|| format!("{}: {found}", child.id()))?;
            let used = process["vram_used_bytes"].as_u64().context("No memory")?;
            ensure!(process["name"] == name && used >= ALLOCATED, "{process}");
            total += used;
        }
        ensure!(found["vram_used_bytes"] == total, "{total}: {found}");

        let text = vgpuctl(gpu.vgpud, &format!("stats -u {}", gpu.uuid))?;
        ensure!(text.contains(", 2 programs, worker ") && text.contains(" in use; "), "{text}");
        ensure!(text.contains(&format!("process {} {name}: ", children[0].id())), "{text}");
        let metrics = String::from_utf8(gpu.vgpud.request("GET", "/metrics", None)?.1)?;
        let uuid = &gpu.uuid;
        let labels = format!("name=\"{name}\",process=\"{}\",vgpu=\"{uuid}\"", children[0].id());
        for line in [
            format!("tessera_vgpu_processes{{vgpu=\"{uuid}\"}} 2"),
            format!("tessera_vgpu_video_memory_used_bytes{{vgpu=\"{uuid}\"}} {total}"),
            format!("tessera_vgpu_process_video_memory_bytes{{{labels}}} {}", total / 2),
            format!("tessera_vgpu_attached{{vgpu=\"{uuid}\"}} 0"),
        ] {
            ensure!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
        }
        for child in &mut children {
            child.kill()?;
            child.wait()?;
        }
        wait_for(|| Ok(programs(gpu)?.is_null().then_some(())))
    })
}
