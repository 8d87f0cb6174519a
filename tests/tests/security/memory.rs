//! Memory that a client withdraws while worker and GPU use it: every page size, and every way in
//! which the memory can stay in use afterwards.

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used)]

use std::ffi::CStr;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use mdev_core::abi::control::reg;
use mdev_core::abi::host::{self, GpEntry, MethodHeader, SecOp, sem};
use mdev_core::abi::mailbox::{
    ChannelCreate, ENGINE_COPY, MapGuest, Opcode, Scatter, USERD_GUEST, VA_START,
};
use mdev_core::abi::userd;
use mdev_core::units::{GIB, MIB, PAGE_SIZE};
use nix::sys::memfd::{MFdFlags, memfd_create};
use system_tests::bytes;
use system_tests::raw_client::{DMA_MAP, DMA_UNMAP, GET_INFO, RawClient};
use system_tests::skipped;
use zerocopy::IntoBytes;

use super::abuse::{CONFIG, CONTROL, Doomed, PUSHBUFFER, RAM, RING, USERD, Victim, map, memory};

/// Address of the memory that is withdrawn, for DMA.
const ADDRESS: u64 = 8 * GIB;
/// Address of the memory that is withdrawn, for the GPU.
const VA: u64 = VA_START + GIB;

fn named(name: &CStr, flags: MFdFlags, len: u64) -> nix::Result<(File, OwnedFd)> {
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | flags)?;
    let file = File::from(fd.try_clone().unwrap());
    file.set_len(len).unwrap();
    Ok((file, fd))
}

/// Returns the lines of a process' memory map that contain `what`.
fn maps(pid: u32, what: &str) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().filter(|line| line.contains(what)).count()
}

/// Attaches a client with RAM in `file`, mapped for the GPU too.
fn tenant<'a>(victim: &Victim, file: &'a File, ram: &OwnedFd) -> Doomed<'a> {
    let mut client = RawClient::attach(&victim.socket);
    client.ok_with(DMA_MAP, &map(0, RAM), &[ram]);
    client.write(CONFIG, 4, &[6, 0]);
    let mut tenant = Doomed { client, file };
    map_for_gpu(&mut tenant, VA_START, Scatter { address: 0, length: RAM });
    tenant
}

fn map_for_gpu(tenant: &mut Doomed<'_>, va: u64, range: Scatter) {
    let list = MapGuest { va, flags: 0, count: 1 };
    tenant.request(Opcode::MapGuest, &[list.as_bytes(), range.as_bytes()].concat());
}

/// Creates a channel with 16 entries and returns its token.
fn channel(tenant: &mut Doomed<'_>, gpfifo_va: u64, userd: u64) -> Vec<u8> {
    let create = ChannelCreate {
        engine: ENGINE_COPY,
        gpfifo_entries: 16,
        gpfifo_va,
        userd,
        userd_aperture: USERD_GUEST,
        vector: 0,
        ..ChannelCreate::default()
    };
    tenant.request(Opcode::ChannelCreate, create.as_bytes())[4..8].to_vec()
}

/// Lets a channel run until it has had time for all of its work.
fn run(tenant: &mut Doomed<'_>, token: &[u8]) {
    for _ in 0..20 {
        tenant.client.write(CONTROL, reg::WAKE, token);
        thread::sleep(Duration::from_millis(2));
    }
    tenant.client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
}

#[test]
fn part_of_a_huge_page_that_is_truncated_kills_neither_worker_nor_gpu() {
    let huge = || named(c"huge", MFdFlags::MFD_HUGETLB, 2 * MIB);
    if huge().is_err() {
        skipped("the kernel has no huge pages");
        return;
    }
    let victim = Victim::new();
    victim.survives("a mailbox in part of a huge page", |victim| {
        let mut client = RawClient::attach(&victim.socket);
        let (file, ram) = huge().unwrap();
        client.ok_with(DMA_MAP, &map(0, PAGE_SIZE), &[&ram]);
        file.set_len(0).unwrap();
        for _ in 0..3 {
            client.write(CONTROL, reg::MAILBOX_LO, &[0; 4]);
            client.write(CONTROL, reg::MAILBOX_DOORBELL, &[1, 0, 0, 0]);
        }
        client.ok(DMA_UNMAP, &bytes![24_u32, 0_u32, 0_u64, PAGE_SIZE]);
    });
    victim.survives("a ring in part of a huge page", |victim| {
        let (file, ram) = memory(RAM);
        let mut tenant = tenant(victim, &file, &ram);
        let (gone, fd) = huge().unwrap();
        tenant.client.ok_with(DMA_MAP, &map(ADDRESS, PAGE_SIZE), &[&fd]);
        map_for_gpu(&mut tenant, VA, Scatter { address: ADDRESS, length: PAGE_SIZE });
        let token = channel(&mut tenant, VA, USERD);
        gone.set_len(0).unwrap();
        file.write_all_at(&1_u32.to_le_bytes(), USERD + userd::GP_PUT).unwrap();
        run(&mut tenant, &token);
    });
}

#[test]
fn huge_pages_are_given_back_after_dma_unmap() -> Result<()> {
    let victim = Victim::new();
    let Ok((_file, fd)) = named(c"huge-guest", MFdFlags::MFD_HUGETLB, 4 * MIB) else {
        skipped("the kernel has no huge pages");
        return Ok(());
    };
    victim.survives("RAM below the VGA hole", |victim| {
        let mut client = RawClient::attach(&victim.socket);
        for (address, size) in [(0, 0xa_0000), (4 * MIB, PAGE_SIZE)] {
            client.ok_with(DMA_MAP, &map(address, size), &[&fd]);
            assert_eq!(maps(victim.worker, "huge-guest"), 1, "it is mapped");
            client.ok(DMA_UNMAP, &bytes![24_u32, 0_u32, address, size]);
            assert_eq!(maps(victim.worker, "huge-guest"), 0, "{size:#x} bytes are still mapped");
        }
        client.ok_with(DMA_MAP, &map(0, 0xa_0000), &[&fd]);
    });
    system_tests::wait_for("the memory of a client that left is unmapped", || {
        maps(victim.worker, "huge-guest") == 0
    })
}

#[test]
fn truncated_memory_does_not_use_up_the_ranges_of_the_gpu_process() {
    const PAGES: u64 = 600;
    let victim = Victim::new();
    victim.survives("semaphores in every second page", |victim| {
        let (file, ram) = memory(RAM);
        let mut tenant = tenant(victim, &file, &ram);
        let len = 2 * PAGES * PAGE_SIZE;
        let (gone, fd) = named(c"gone", MFdFlags::empty(), len).unwrap();
        tenant.client.ok_with(DMA_MAP, &map(ADDRESS, len), &[&fd]);
        map_for_gpu(&mut tenant, VA, Scatter { address: ADDRESS, length: len });
        let release =
            MethodHeader { op: SecOp::Inc, subchannel: 0, method: host::SEM_ADDR_LO, count: 5 };
        let words: Vec<u32> = (0..PAGES)
            .map(|page| VA + 2 * page * PAGE_SIZE)
            .flat_map(|at| [release.encode(), at as u32, (at >> 32) as u32, 1, 0, sem::RELEASE])
            .collect();
        file.write_all_at(words.as_bytes(), PUSHBUFFER).unwrap();
        let dwords = words.len() as u32;
        let entry = GpEntry::Segment { va: VA_START + PUSHBUFFER, dwords }.encode();
        file.write_all_at(&entry.to_le_bytes(), RING).unwrap();
        let token = channel(&mut tenant, VA_START + RING, USERD);
        let before = maps(victim.context, "");
        gone.set_len(0).unwrap();
        file.write_all_at(&1_u32.to_le_bytes(), USERD + userd::GP_PUT).unwrap();
        run(&mut tenant, &token);
        let after = maps(victim.context, "");
        assert!(after < before + PAGES as usize / 10, "{before} ranges, then {after}");
        assert_eq!(maps(victim.context, "memfd:gone"), 0, "the file is still mapped");
    });
}

#[test]
fn a_failed_channel_keeps_no_memory_that_was_withdrawn() {
    let victim = Victim::new();
    victim.survives("USERD in withdrawn memory", |victim| {
        let (file, ram) = memory(RAM);
        let mut tenant = tenant(victim, &file, &ram);
        for round in 0..4 {
            let (_gone, fd) = named(c"withdrawn", MFdFlags::empty(), MIB).unwrap();
            tenant.client.ok_with(DMA_MAP, &map(ADDRESS, MIB), &[&fd]);
            channel(&mut tenant, VA_START, ADDRESS);
            assert_eq!(maps(victim.context, "withdrawn"), 1, "round {round}: not imported");
            tenant.client.ok(DMA_UNMAP, &bytes![24_u32, 0_u32, ADDRESS, MIB]);
            assert_eq!(maps(victim.context, "withdrawn"), 0, "round {round}: still mapped");
        }
    });
}
