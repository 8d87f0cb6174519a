//! A VMM that keeps its descriptors and mappings after it has disconnected.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use memmap2::{MmapOptions, MmapRaw};
use serde_json::json;
use system_tests::Vgpud;
use system_tests::in_process::{DOORBELL, FRAMEBUFFER, VRAM};
use vfio_user::Client;

/// Attaches as soon as the vGPU is free.
fn attach(vgpud: &Vgpud, uuid: &str) -> Result<Client> {
    let started = Instant::now();
    loop {
        match Client::new(&vgpud.vfio_socket(uuid)) {
            Err(_) if started.elapsed() < Duration::from_secs(5) => {
                std::thread::sleep(Duration::from_millis(5));
            }
            client => return Ok(client?),
        }
    }
}

/// Maps the first page of a region, as a VMM does.
fn first_page(client: &Client, index: u32) -> Result<MmapRaw> {
    let region = client.region(index).context("The region is missing")?;
    let file = region.file_offset.as_ref().context("The region cannot be mapped")?;
    Ok(MmapOptions::new().offset(file.start()).len(4096).map_raw(file.file())?)
}

fn load(page: &MmapRaw) -> u8 {
    // SAFETY: the mapping has a page, and other accesses to it are volatile too.
    unsafe { page.as_ptr().read_volatile() }
}

fn store(page: &MmapRaw, value: u8) {
    // SAFETY: as in `load`.
    unsafe { page.as_mut_ptr().write_volatile(value) }
}

#[test]
fn the_next_vm_gets_memory_that_the_one_before_cannot_reach() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    for region in [VRAM, FRAMEBUFFER, DOORBELL] {
        let before = attach(&vgpud, &uuid)?;
        let kept = first_page(&before, region)?;
        store(&kept, 1);
        drop(before);
        let after = attach(&vgpud, &uuid)?;
        let own = first_page(&after, region)?;
        ensure!(load(&own) == 0, "region {region} is not new");
        store(&own, 2);
        ensure!(load(&kept) == 1, "region {region} shows the next VM's memory");
        store(&kept, 3);
        ensure!(load(&own) == 2, "the VM before has changed region {region}");
    }
    Ok(())
}
