//! A vGPU that another process of its VM takes over, by requests of the control API.

#![allow(clippy::unwrap_used, reason = "tests")]

use anyhow::Result;
use mdev_core::abi::mailbox::{MapGuest, MapVram, Opcode, Scatter, Status, VA_START};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::raw_client::RESET;
use system_tests::{Vgpud, is_alive, kill_process, wait_for};
use zerocopy::IntoBytes;

use crate::migration::{DISPLAY, Guest, VRAM, start};

fn step(vgpud: &Vgpud, uuid: &str, step: &str) -> Result<Value> {
    vgpud.call("POST", &format!("/v1/vgpus/{uuid}/handover"), Some(&json!({ "step": step })))
}

/// Checks that a step is refused with these words.
fn refused(vgpud: &Vgpud, uuid: &str, name: &str, words: &str) {
    let said = format!("{:?}", step(vgpud, uuid, name));
    assert!(said.contains(words), "{name}: {said}");
}

/// Maps a page of guest memory for the GPU, at an offset in the address space.
fn map_ram(guest: &mut Guest, offset: u64) -> Status {
    let map = MapGuest { va: VA_START + offset, flags: 0, count: 1 };
    let page = Scatter { address: 0x1000, length: 0x1000 };
    guest.request(Opcode::MapGuest, &[map.as_bytes(), page.as_bytes()].concat())
}

/// Returns a guest with mappings, a display mode and video memory.
fn busy(vgpud: &Vgpud, uuid: &str) -> Guest {
    let mut guest = Guest::attach(vgpud, uuid);
    guest.client.write(VRAM, 0x1000, &[0x77; 64]);
    guest.client.write(DISPLAY, 0x502, &320_u16.to_le_bytes());
    let vram = MapVram { va: VA_START, offset: 0x3000, length: 0x1000, ..MapVram::default() };
    assert_eq!(guest.request(Opcode::MapVram, vram.as_bytes()), Status::Ok);
    assert_eq!(map_ram(&mut guest, 0x10_0000), Status::Ok);
    guest
}

/// Checks that a process has the vGPU as [`busy`] has left it.
fn has_the_vgpu(guest: &mut Guest) {
    assert_eq!(guest.client.read(VRAM, 0x1000, 64), [0x77; 64]);
    assert_eq!(guest.client.read(DISPLAY, 0x502, 2), 320_u16.to_le_bytes());
    let again = MapVram { va: VA_START, offset: 0x3000, length: 0x1000, ..MapVram::default() };
    assert_ne!(guest.request(Opcode::MapVram, again.as_bytes()), Status::Ok, "it is mapped");
    assert_eq!(guest.request(Opcode::GetInfo, &[]), Status::Ok);
}

/// Kills the worker.
fn replace_worker(vgpud: &Vgpud, uuid: &str) -> Result<()> {
    let worker = u32::try_from(vgpud.show(uuid)?["pid"].as_u64().unwrap())?;
    kill_process(worker, Signal::SIGKILL)?;
    wait_for("the worker has died", || !is_alive(worker))
}

#[test]
fn a_second_process_takes_the_vgpu_over_or_leaves_it() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = start(&vgpud, "SOFT-256MQ")?;
    refused(&vgpud, &uuid, "begin", "has no VM; its state is that of a VM");
    let mut old = busy(&vgpud, &uuid);
    refused(&vgpud, &uuid, "adopt", "No process is taking over");
    refused(&vgpud, &uuid, "abandon", "No process is taking over");
    let resume = format!("/v1/vgpus/{uuid}/resume");

    // Given up before and after a second process has it, and when that one has ended.
    for adopted in [false, true] {
        step(&vgpud, &uuid, "begin")?;
        refused(&vgpud, &uuid, "adopt", "No other process of its VM has attached");
        refused(&vgpud, &uuid, "begin", "Another process of the VM is taking over already");
        let mut new = Guest::attach(&vgpud, &uuid);
        new.client.ok(RESET, &[]);
        if adopted {
            step(&vgpud, &uuid, "adopt")?;
            drop(new);
        }
        step(&vgpud, &uuid, "abandon")?;
        vgpud.call("POST", &resume, None)?;
        has_the_vgpu(&mut old);
        // The next worker has the old process' connection and guest memory.
        replace_worker(&vgpud, &uuid)?;
        has_the_vgpu(&mut old);
        let offset = if adopted { 0x40_0000 } else { 0x30_0000 };
        assert_eq!(map_ram(&mut old, offset), Status::Ok);
    }
    // An operator's `resume` gives it back, too.
    step(&vgpud, &uuid, "begin")?;
    vgpud.call("POST", &resume, None)?;
    has_the_vgpu(&mut old);

    step(&vgpud, &uuid, "begin")?;
    let mut new = Guest::attach(&vgpud, &uuid);
    new.client.ok(RESET, &[]);
    let adopted = step(&vgpud, &uuid, "adopt")?;
    assert_eq!(adopted["config"].as_array().unwrap().last().unwrap()["offset"], 4);
    vgpud.call("POST", &resume, None)?;
    has_the_vgpu(&mut new);
    old.client.is_closed();
    // The new process has guest memory of its own, which the next worker takes up.
    replace_worker(&vgpud, &uuid)?;
    has_the_vgpu(&mut new);
    assert_eq!(map_ram(&mut new, 0x20_0000), Status::Ok);
    // The next VM gets nothing of it.
    drop(new);
    wait_for("the VM is gone", || vgpud.show(&uuid).is_ok_and(|vgpu| vgpu["vm"].is_null()))?;
    let mut next = Guest::attach(&vgpud, &uuid);
    assert_eq!(next.client.read(VRAM, 0x1000, 64), [0; 64]);
    Ok(())
}
