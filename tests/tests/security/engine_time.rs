//! Guests that try to take engine time without being charged, beside a neighbour with endless work.
//!
//! All bounds are ratios of one run. Time that the host took from the engine counts for no vGPU.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mdev_core::abi::host::{self, GpEntry};
use mdev_core::gpu::EngineKind;
use mdev_core::units::{MIB, PAGE_SIZE};
use serde_json::{Value, json};
use system_tests::Vgpud;
use system_tests::load::Endless;
use system_tests::ram::Ram;
use system_tests::vfio_user_guest::VfioUserGuest;
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Buffer;
use vgpu_guest::pushbuffer::Methods;

/// Channels of a hostile guest: all that the software GPU allows.
const CHANNELS: usize = 32;
/// Points by which a share may be off on a loaded machine.
const TOLERANCE: f64 = 5.0;

fn vgpu(vgpud: &Vgpud, core: &str) -> Result<String> {
    let attrs = json!([{ "core": core }, { "hang_timeout": "off" }]);
    vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "attrs": attrs, "run": true }))
}

fn attach(vgpud: &Vgpud, uuid: &str) -> Result<Device> {
    let ram = Ram::new(32 * MIB, 32 * MIB)?;
    Ok(Device::open(Box::new(VfioUserGuest::attach(&vgpud.vfio_socket(uuid), ram)?))?)
}

/// Time of one vGPU so far, in seconds.
#[derive(Clone, Copy, Debug)]
struct Used {
    engine: f64,
    waited: f64,
    stolen: f64,
}

fn used(vgpud: &Vgpud, uuid: &str) -> Result<Used> {
    let stats = vgpud.get("/v1/stats")?;
    let vgpus = stats["vgpus"].as_array().context("No statistics")?;
    let one = vgpus.iter().find(|one| one["uuid"] == uuid).context("No such vGPU")?;
    let seconds = |value: &Value| value.as_f64().map(|ns| ns / 1e9).context("No time");
    Ok(Used {
        engine: seconds(&one["engine_ns"])?,
        waited: seconds(&one["wait_ns"])?,
        stolen: seconds(&one["stolen_ns"])?,
    })
}

/// Returns the part of the engine's time, in percent, that a vGPU gets whose work never ends. Time
/// that the host takes during the hostile vGPU's runs is not the engine's.
fn share(vgpud: &Vgpud, neighbour: &str, hostile: &str) -> Result<f64> {
    let before = [used(vgpud, neighbour)?, used(vgpud, hostile)?];
    thread::sleep(Duration::from_millis(1500));
    let after = [used(vgpud, neighbour)?, used(vgpud, hostile)?];
    let engine = after[0].engine - before[0].engine;
    let waited = after[0].waited - before[0].waited;
    let stolen = after[1].stolen - before[1].stolen;
    Ok(engine * 100.0 / (engine + waited - stolen))
}

/// Fills memory with methods that give the engine back at once, and has many channels run them.
fn yields(device: &Device) -> Result<(Buffer, Vec<Channel>)> {
    let pairs = 120_000;
    let mut pair = Methods::new();
    pair.push(0, host::YIELD, &[host::YIELD_TSG]);
    let words = pair.words().repeat(pairs);
    let pushbuffer = Buffer::guest(device, 4 * words.len() as u64)?;
    pushbuffer.store(0, &words);
    let entry = GpEntry::Segment { va: pushbuffer.va(), dwords: words.len() as u32 };
    let new = |_| Ok(Channel::new(device, EngineKind::Copy)?);
    let mut channels = (0..CHANNELS).map(new).collect::<Result<Vec<_>>>()?;
    for channel in &mut channels {
        for _ in 0..200 {
            channel.submit_raw(entry.encode());
        }
    }
    Ok((pushbuffer, channels))
}

#[test]
fn giving_the_engine_back_all_the_time_gains_none() -> Result<()> {
    let vgpud = Vgpud::start()?;
    for (core, hostile_core) in [("50", "50"), ("90", "10")] {
        let neighbour = vgpu(&vgpud, core)?;
        let hostile = vgpu(&vgpud, hostile_core)?;
        let _endless = Endless::start(&vgpud, &neighbour)?;
        let device = attach(&vgpud, &hostile)?;
        let _yields = yields(&device)?;
        thread::sleep(Duration::from_millis(500));
        let share = share(&vgpud, &neighbour, &hostile)?;
        println!("{core}: {share:.1}");
        let promised: f64 = core.parse()?;
        ensure!((share - promised).abs() < TOLERANCE, "{core} promised, {share:.1} %");
        for uuid in [neighbour, hostile] {
            let path = format!("/v1/vgpus/{uuid}/stop");
            vgpud.call("POST", &path, Some(&json!({ "force": true })))?;
        }
    }
    Ok(())
}

/// Maps small pages beside multiples of 2 MiB until the GPU refuses.
#[test]
fn page_tables_of_a_guest_are_bounded_by_its_memory() -> Result<()> {
    const STEP: u64 = 128 * MIB;
    let vgpud = Vgpud::start()?;
    let uuid = vgpu(&vgpud, "50")?;
    let device = attach(&vgpud, &uuid)?;
    let parents = vgpud.get("/v1/parents")?;
    let gpu = parents[0]["pid"].as_u64().context("No GPU process")?;
    let before = anonymous_kib(gpu)?;
    // Gigabytes of page tables would take thousands of maps.
    let maps = (0..400).take_while(|_| device.map_vram(PAGE_SIZE, STEP).is_ok()).count();
    let grown = anonymous_kib(gpu)?.saturating_sub(before);
    println!("{maps} maps, {grown} KiB");
    ensure!(maps < 400, "The guest may map without end: {grown} KiB");
    ensure!(grown < 32 << 10, "{grown} KiB of page tables for a vGPU of 256 MiB");
    Ok(())
}

/// Returns the anonymous memory of a process in KiB.
fn anonymous_kib(pid: u64) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|line| line.starts_with("RssAnon")).context("No RssAnon")?;
    Ok(line.split_whitespace().nth(1).context("No number")?.parse()?)
}
