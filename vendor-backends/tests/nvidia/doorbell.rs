//! Doorbells: rings for a guest, and direct access of a trusted guest.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::mem::Mapping;
use mdev_core::abi::{doorbell, userd};
use mdev_core::gpu::{Client, GpuCapabilities};
use mdev_core::ids::MemoryId;
use nvidia_rm::fake_rm::{self, FakeRm};
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu, Options};

use super::{DRIVER, OPTIONS, eventually, gpu, set_ring, with_channels};

/// Maps the guest's doorbell page.
fn doorbell_page(client: &NvidiaClient) -> Arc<Mapping> {
    let page = client.apertures().doorbell.as_ref().unwrap();
    Mapping::new(page.fd.as_fd(), page.offset, page.len, true).unwrap()
}

#[test]
fn the_worker_rings_for_a_guest_without_the_gpu_doorbell() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    assert!(client.gpu().capabilities.contains(GpuCapabilities::NEED_WAKEUP));
    let (page, before) = (doorbell_page(&client), rm.last_ring());
    // Tokens of other vGPUs' channels, and tokens without a channel.
    for token in 0..100_000 {
        page.store_u32(doorbell::TOKEN, token).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rm.last_ring(), before, "no channel has entries");
    for (index, channel) in channels.iter().enumerate() {
        set_ring(&memory.mapping, index as u64, 0, 1);
        eventually("a ring", || rm.last_ring() == Some(channel.token.0));
    }
    // After a quiet period the poller sleeps, and sets NEED_WAKEUP.
    let need_wakeup =
        |channel: u64| memory.mapping.load_u32(channel * 512 + userd::NEED_WAKEUP).unwrap();
    eventually("sleep", || (0..3).all(|channel| need_wakeup(channel) == 1));
    set_ring(&memory.mapping, 0, 1, 2);
    client.wake(channels[0].token).unwrap();
    assert_eq!(rm.last_ring(), Some(channels[0].token.0), "at once");
    eventually("wakeup", || (0..3).all(|channel| need_wakeup(channel) == 0));
    let usage = client.usage().unwrap();
    assert!((1..=4).contains(&usage.polled_doorbells) && usage.wakeups == 1, "{usage:?}");
    // A sleeping poller also finds entries without a wakeup by the guest.
    eventually("sleep", || need_wakeup(2) == 1);
    set_ring(&memory.mapping, 2, 1, 2);
    eventually("a ring", || rm.last_ring() == Some(channels[2].token.0));
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn the_rate_of_rings_is_limited() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client, memory, _channels) = with_channels(&rm, &mut gpu);
    let (started, mut put) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_millis(300) {
        put += 1;
        (0..3).for_each(|channel| set_ring(&memory.mapping, channel, 0, put % 64));
    }
    let polled = client.usage().unwrap().polled_doorbells;
    let limit = started.elapsed().as_micros() as u64 / 3 + 3;
    assert!((10..=limit).contains(&polled), "{polled} rings, at most {limit}");
}

#[test]
fn memory_of_a_destroyed_channel_is_not_accessed() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    client.destroy_channel(channels[0].id).unwrap();
    memory.mapping.store_u32(userd::NEED_WAKEUP, 7).unwrap();
    set_ring(&memory.mapping, 0, 0, 1);
    client.wake(channels[0].token).unwrap();
    set_ring(&memory.mapping, 1, 0, 1);
    eventually("sleep", || memory.mapping.load_u32(512 + userd::NEED_WAKEUP) == Some(1));
    assert_eq!(memory.mapping.load_u32(userd::NEED_WAKEUP), Some(7));
    assert_eq!(rm.last_ring(), Some(channels[1].token.0));
    client.release(MemoryId(1)).unwrap();
    memory.mapping.store_u32(512 + userd::NEED_WAKEUP, 7).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(memory.mapping.load_u32(512 + userd::NEED_WAKEUP), Some(7));
}

#[test]
fn a_trusted_guest_has_the_gpu_doorbell() {
    let rm = FakeRm::new(DRIVER);
    let options = Options { direct_doorbell: true, ..OPTIONS };
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, options).unwrap();
    let (_, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    assert!(!client.gpu().capabilities.contains(GpuCapabilities::NEED_WAKEUP));
    let before = rm.last_ring();
    set_ring(&memory.mapping, 1, 0, 1);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rm.last_ring(), before, "the worker does not ring");
    // For a trapped write, the worker rings only if the channel has entries.
    client.wake(channels[0].token).unwrap();
    assert_eq!(rm.last_ring(), before);
    client.wake(channels[1].token).unwrap();
    assert_eq!(rm.last_ring(), Some(channels[1].token.0));
}
