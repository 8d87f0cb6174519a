//! Crashes and hangs of managers, workers and software GPUs.

use std::fs;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::{Vgpud, is_alive, kill_process, load, wait_for};

use crate::lifecycle::{attach, pid, state, transient};

#[test]
fn a_new_manager_adopts_running_vgpus() -> Result<()> {
    for signal in [Signal::SIGKILL, Signal::SIGUSR1] {
        let mut vgpud = Vgpud::start()?;
        let uuid = vgpud
            .create(&json!({ "mdev_type": "SOFT-1Q", "attrs": [{ "core": "70" }], "run": true }))?;
        let path = format!("/v1/vgpus/{uuid}");
        let live = json!({ "attrs": [{ "core": "60" }], "target": "live" });
        vgpud.call("PATCH", &path, Some(&live))?;
        let _vm = attach(&vgpud, &uuid)?;
        let (worker, gpu) = (pid(&vgpud.show(&uuid)?)?, pid(&vgpud.get("/v1/parents")?[0])?);
        vgpud.end(signal)?;
        assert!(is_alive(worker) && is_alive(gpu), "{signal}: both processes continue");
        vgpud.start_again()?;
        let vgpu = vgpud.show(&uuid)?;
        assert_eq!(
            (pid(&vgpu)?, &vgpu["vm"]["pid"]),
            (worker, &json!(std::process::id())),
            "{signal}"
        );
        assert_eq!(vgpu["attrs"], json!([{ "core": "60" }]));
        assert_eq!(pid(&vgpud.get("/v1/parents")?[0])?, gpu);
        assert_eq!(vgpud.get("/v1/stats")?["vgpus"][0]["share_asked"], 60);
        // An adopted vGPU accepts commands.
        vgpud.call("POST", &format!("{path}/stop"), Some(&json!({ "force": true })))?;
        assert!(!is_alive(worker));
        let parent = &vgpud.get("/v1/parents")?[0];
        assert_eq!(parent["vram_free_bytes"], parent["vram_bytes"]);
    }
    Ok(())
}

#[test]
fn a_dead_anchor_is_replaced_and_a_new_vm_can_attach() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = transient(&vgpud)?;
    let _lost = attach(&vgpud, &uuid)?;
    let (anchor, worker) = (vgpud.anchor(&uuid)?, pid(&vgpud.show(&uuid)?)?);
    kill_process(anchor, Signal::SIGKILL)?;
    wait_for("another anchor runs", || {
        // Until the manager notices, the vGPU runs, and the dead anchor is its only process.
        let another = vgpud.anchor(&uuid).is_ok_and(|another| another != anchor);
        another && state(&vgpud, &uuid).is_ok_and(|state| state == "running")
    })?;
    assert!(!is_alive(worker), "it ends with its anchor");
    drop(attach(&vgpud, &uuid)?);
    Ok(())
}

#[test]
fn work_continues_when_a_dead_gpu_process_is_replaced() -> Result<()> {
    replaced_after(Signal::SIGKILL)
}

#[test]
fn work_continues_when_a_hung_gpu_process_is_replaced() -> Result<()> {
    replaced_after(Signal::SIGSTOP)
}

/// Two VMs work while their GPU process ends. They continue, and all that they compute is right.
fn replaced_after(signal: Signal) -> Result<()> {
    let vgpud = Vgpud::start()?;
    let create = |core: &str| {
        let attrs = json!([{ "core": core }]);
        vgpud.create(&json!({ "mdev_type": "SOFT-1Q", "run": true, "attrs": attrs }))
    };
    let uuids = [create("80")?, create("20")?];
    let work: Vec<_> =
        uuids.iter().map(|uuid| load::work(&vgpud, uuid, 12)).collect::<Result<_>>()?;
    let gpu = vgpud.gpu_process()?;
    let contexts =
        || Ok::<_, anyhow::Error>([vgpud.context(&uuids[0])?, vgpud.context(&uuids[1])?]);
    let before = contexts()?;
    let used = || {
        let stats = vgpud.get("/v1/stats").unwrap_or_default();
        let used = |vgpu: &Value| vgpu["engine_ns"].as_u64().unwrap_or(0);
        stats["vgpus"].as_array().into_iter().flatten().map(used).collect::<Vec<_>>()
    };
    let more = |than: &[u64]| {
        let now = used();
        now.len() == 2 && now.iter().zip(than).all(|(now, then)| *now > then + 50_000_000)
    };
    wait_for("both work", || more(&[0, 0]))?;
    assert_delays_are_counted(gpu, &before)?;
    kill_process(gpu, signal)?;
    wait_for("another GPU process runs", || {
        let parent = vgpud.get("/v1/parents").unwrap_or_default();
        parent[0]["state"] == "ready" && parent[0]["pid"] != gpu
    })?;
    assert_eq!(contexts()?, before);
    assert_delays_are_counted(vgpud.gpu_process()?, &before)?;
    let then = used();
    wait_for("both work again", || more(&then))?;
    for uuid in &uuids {
        assert_eq!(state(&vgpud, uuid)?, "running");
    }
    work.into_iter().try_for_each(load::verified)
}

/// Checks that a GPU process has the kernel's count of the delays of each context.
fn assert_delays_are_counted(gpu: u32, contexts: &[u32]) -> Result<()> {
    let files = match fs::read_dir(format!("/proc/{gpu}/fd")) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            eprintln!("skipped: only root sees the files of a GPU process");
            return Ok(());
        }
        files => files?,
    };
    let open: Vec<_> = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok()).collect();
    for pid in contexts {
        assert!(open.contains(&format!("/proc/{pid}/schedstat").into()), "{open:?}");
    }
    Ok(())
}

#[test]
fn a_dead_context_costs_its_vgpu_alone() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let create = || vgpud.create(&json!({ "mdev_type": "SOFT-1Q", "define": true, "run": true }));
    let (uuid, neighbour) = (create()?, create()?);
    let _vm = attach(&vgpud, &uuid)?;
    let gpu = pid(&vgpud.get("/v1/parents")?[0])?;
    kill_process(vgpud.context(&uuid)?, Signal::SIGKILL)?;
    wait_for("the vGPU has failed", || state(&vgpud, &uuid).is_ok_and(|state| state == "failed"))?;
    let reason = vgpud.show(&uuid)?["reason"].to_string();
    assert!(reason.contains("stop it and start it"), "{reason}");
    assert_eq!(state(&vgpud, &neighbour)?, "running");
    drop(attach(&vgpud, &neighbour)?);
    assert_eq!(pid(&vgpud.get("/v1/parents")?[0])?, gpu);
    vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), Some(&json!({ "force": true })))?;
    let vgpu = vgpud.call("POST", &format!("/v1/vgpus/{uuid}/start"), None)?;
    assert_eq!(vgpu["state"], "running");
    drop(attach(&vgpud, &uuid)?);
    Ok(())
}

#[test]
fn a_start_after_all_processes_were_killed_restores_running_vgpus() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let uuid = transient(&vgpud)?;
    let roles = vgpud.roles();
    vgpud.end(Signal::SIGKILL)?;
    for pid in &roles {
        kill_process(*pid, Signal::SIGKILL)?;
    }
    wait_for("all processes are gone", || roles.iter().all(|pid| !is_alive(*pid)))?;
    // Unknown folders must not disturb the start.
    fs::create_dir_all(vgpud.run_dir().join("vgpus/not-a-uuid"))?;
    fs::create_dir_all(vgpud.run_dir().join("parents/gone"))?;
    fs::write(vgpud.run_dir().join("parents/gone/run.json"), "{")?;
    vgpud.start_again()?;
    assert_eq!(state(&vgpud, &uuid)?, "running");
    drop(attach(&vgpud, &uuid)?);
    assert!(!vgpud.run_dir().join("vgpus/not-a-uuid").exists());
    assert!(!vgpud.run_dir().join("parents/gone").exists());
    Ok(())
}

#[test]
fn a_hung_worker_does_not_block_the_manager() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let (wedged, other) = (transient(&vgpud)?, transient(&vgpud)?);
    kill_process(pid(&vgpud.show(&wedged)?)?, Signal::SIGSTOP)?;
    let begun = Instant::now();
    assert_eq!(state(&vgpud, &other)?, "running");
    assert!(begun.elapsed() < Duration::from_millis(500), "other requests do not wait");
    let warnings = vgpud.show(&wedged)?["warnings"].to_string();
    assert!(warnings.contains("does not answer"), "{warnings}");
    let stop = format!("/v1/vgpus/{wedged}/stop");
    assert_eq!(vgpud.refused("POST", &stop, None)?.1, "unavailable");
    vgpud.call("POST", &stop, Some(&json!({ "force": true })))?;
    Ok(())
}
