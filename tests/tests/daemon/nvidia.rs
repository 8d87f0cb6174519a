//! The daemon on a real NVIDIA GPU; skipped on machines without one.
//!
//! As root, workers run as a user without capabilities, as in production.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use nix::sys::signal::Signal;
use serde_json::json;
use system_tests::ram::Ram;
use system_tests::vfio_user_guest::VfioUserGuest;
use system_tests::{Vgpud, wait_for};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Home;
use vgpu_guest::work::{self, copy::Copy, fill::Fill};

pub(super) fn there_is_a_gpu() -> bool {
    let there = Path::new("/dev/nvidiactl").exists();
    if !there {
        system_tests::skipped("this machine has no NVIDIA GPU");
    }
    there
}

pub(super) fn attach(vgpud: &Vgpud, uuid: &str) -> Result<Device> {
    let ram = Ram::new(64 * MIB, 64 * 1024)?;
    Ok(Device::open(Box::new(VfioUserGuest::attach(&vgpud.vfio_socket(uuid), ram)?))?)
}

fn work(device: &Device) -> Result<()> {
    for engine in [EngineKind::Copy, EngineKind::Compute] {
        let mut channel = Channel::new(device, engine)?;
        println!("{engine:?}: {}", work::run(&Copy::new(device, 4 * MIB)?, &mut channel)?);
        println!(
            "{engine:?}: {}",
            work::run(&Fill::new(device, Home::Guest, 1000)?, &mut channel)?
        );
    }
    Ok(())
}

#[test]
fn a_vgpu_works_and_survives_its_manager() -> Result<()> {
    if !there_is_a_gpu() {
        return Ok(());
    }
    let mut vgpud = Vgpud::start_with(&["--parent", "nvidia"])?;
    let parents = vgpud.get("/v1/parents")?;
    println!("{parents:#}");
    let parent = parents[0]["name"].as_str().context("No parent")?;
    let model = parents[0]["model"].as_str().context("No model")?;
    let request = json!({
        "parent": parent, "mdev_type": format!("{model}-1C"), "attrs": [], "run": true,
    });
    let uuids = [vgpud.create(&request)?, vgpud.create(&request)?];
    let devices: Vec<_> = uuids.iter().map(|uuid| attach(&vgpud, uuid)).collect::<Result<_>>()?;
    let pid = vgpud.show(&uuids[0])?["pid"].as_u64().context("No worker")?;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = |name: &str| status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    println!("worker: {} {}", line("Uid"), line("CapEff"));
    assert!(line("CapEff").ends_with("0000000000000000"));
    for device in &devices {
        work(device)?;
    }
    println!("{:#}", vgpud.get("/v1/stats")?);
    vgpud.end(Signal::SIGUSR1)?;
    work(&devices[0])?;
    vgpud.start_again()?;
    wait_for("adoption", || vgpud.show(&uuids[0]).is_ok_and(|vgpu| vgpu["state"] == "running"))?;
    let adopted = vgpud.show(&uuids[0])?["pid"].as_u64();
    assert_eq!(adopted, Some(pid), "the same worker");
    work(&devices[1])?;
    Ok(())
}
