//! vGPUs that cannot be saved, and states that are not valid.

use std::time::{Duration, Instant};

use mdev_core::gpu::{ChannelSpec, Client, EngineKind, GpuError, Programs, SavedClient, Saving};
use mdev_core::units::MIB;
use vendor_backends::conformance::lifecycle;

use super::guest::{Guest, map, spec};
use super::{Host, busy, copy_vram, kernels, save};
use crate::{eventually, ram};

fn refusal(host: &mut Host) -> String {
    let since = Instant::now();
    let refused = host.client.pause().unwrap_err().to_string();
    assert!(since.elapsed() < Duration::from_secs(2), "{:?}: {refused}", since.elapsed());
    refused
}

#[test]
fn an_endless_kernel_is_refused_and_goes_on() {
    let (mut host, guest) = busy();
    host.rm.hold_engine(true);
    // Nothing has been fetched for a while.
    std::thread::sleep(Duration::from_millis(100));
    let refused = refusal(&mut host);
    assert!(refused.contains("a kernel has been running for 0.9 s"), "{refused}");
    assert!(host.client.save().is_err(), "it is not paused");
    host.check();
    host.rm.hold_engine(false);
    guest.wait();
    let (_, vram) = save(&mut host);
    assert_eq!(kernels(&vram), 50);
    host.check();
}

#[test]
fn a_channel_that_waits_for_another_one_is_refused_and_goes_on() {
    let mut host = Host::new();
    let mut guest = Guest::new(&mut host.client, &[EngineKind::Compute, EngineKind::Copy]);
    guest.wait();
    guest.wait_for(0, 1, 2);
    guest.launch(0, 5);
    std::thread::sleep(Duration::from_millis(60));
    let refused = refusal(&mut host);
    assert!(
        refused.contains("a kernel has been running") || refused.contains("waits"),
        "{refused}"
    );
    guest.copy(1, 0, 0, 1024);
    guest.wait();
    let (_, vram) = save(&mut host);
    assert_eq!(kernels(&vram), 5);
    host.check();
}

#[test]
fn what_cannot_be_made_again_is_refused_before_anything_is_stopped() {
    let mut host = Host::new();
    let memory = ram(MIB);
    let id = map(&mut host.client, &memory);
    let old = host.client.create_channel(&spec(EngineKind::Copy, id, 0)).unwrap();
    host.rm.take_log();
    let refused = host.client.check_save().unwrap_err().to_string();
    assert!(refused.contains("names no preamble"), "{refused}");
    assert!(refusal(&mut host).contains("names no preamble"));
    host.client.destroy_channel(old.id).unwrap();
    host.client.check_save().unwrap();
    let spec = ChannelSpec { group: Some(3), ..spec(EngineKind::Copy, id, 0) };
    let program = host.client.create_channel(&spec).unwrap();
    assert!(refusal(&mut host).contains("CUDA programs"));
    host.client.destroy_channel(program.id).unwrap();
    host.client.reset().unwrap();
    let allocated = host.client.allocate(MIB).unwrap();
    assert!(refusal(&mut host).contains("CUDA programs"));
    // As programs that are checkpointed leave the vGPU.
    host.client.release(allocated).unwrap();
    host.client.reset().unwrap();
    host.client.check_save().unwrap();
    let (_, vram) = save(&mut host);
    assert!(vram.iter().all(|byte| *byte == 0), "the partition is there again, cleared");
    host.client.resume().unwrap();
    let disabled = |line: &String| line.contains("0x2080110b");
    assert!(!host.rm.take_log().iter().any(disabled));
    host.check();
}

/// A saved client, and a guest whose memory it is restored with.
fn saved() -> (SavedClient, Guest) {
    let (mut host, guest) = busy();
    let (saved, _) = save(&mut host);
    (saved, guest)
}

fn refused(host: &mut Host, guest: &Guest, saved: &SavedClient) -> Result<(), GpuError> {
    let restored = guest.restore(&mut host.client, saved);
    host.client.reset().unwrap();
    restored
}

#[test]
fn states_of_another_gpu_or_driver_are_refused() {
    let (saved, guest) = saved();
    let mut other = Host::with_driver("580.95");
    let error = refused(&mut other, &guest, &saved).unwrap_err().to_string();
    assert!(error.contains("it was saved with the NVIDIA driver 580.142"), "{error}");
    let mut host = Host::new();
    let mut foreign = saved.clone();
    // Any letter of the model's name.
    let state = &mut foreign.channels[0].state;
    let at = state.windows(4).position(|word| word == b"H100").unwrap();
    state[at] = b'A';
    let error = refused(&mut host, &guest, &foreign).unwrap_err().to_string();
    assert!(error.contains("another model"), "{error}");
    refused(&mut host, &guest, &saved).unwrap();
    host.check();
}

#[test]
fn damaged_states_are_refused_or_are_those_of_a_guest() {
    let (saved, guest) = saved();
    let mut host = Host::new();
    for len in 0..saved.channels[0].state.len() {
        let mut cut = saved.clone();
        cut.channels[0].state.truncate(len);
        refused(&mut host, &guest, &cut).unwrap_err();
    }
    let with = |change: &dyn Fn(&mut SavedClient)| {
        let mut changed = saved.clone();
        change(&mut changed);
        changed
    };
    let bad: [&dyn Fn(&mut SavedClient); 7] = [
        &|saved| saved.channels[1].id = saved.channels[0].id,
        &|saved| saved.channels[0].id.0 = u32::MAX,
        &|saved| saved.channels[0].id.0 = 0,
        &|saved| saved.channels[0].spec.gpfifo_entries = 1,
        &|saved| saved.channels[0].spec.gpfifo.0 += 1 << 20,
        &|saved| saved.channels[0].spec.group = Some(1),
        &|saved| saved.spaces = vec![mdev_core::ids::SpaceId::DEFAULT],
    ];
    for (number, change) in bad.into_iter().enumerate() {
        let restored = refused(&mut host, &guest, &with(change));
        assert!(restored.is_err(), "{number}");
    }
    for at in 0..saved.channels[0].state.len() {
        let changed = with(&|saved| saved.channels[0].state[at] ^= 0x41);
        // A guest can cause what is accepted.
        let _ = refused(&mut host, &guest, &changed);
    }
    assert_eq!(host.client.usage().unwrap().channels, 0);
    host.check();
}

/// A ring that a guest fills with invalid entries, or that does not come to its place.
#[test]
fn a_channel_that_does_not_come_to_its_place_is_reset() {
    let (saved, guest) = saved();
    let mut host = Host::new();
    let failing = saved.channels[0].id;
    // Its preamble is no pushbuffer.
    guest.ram.mapping.store_u32(0x2000, u32::MAX).unwrap();
    guest.restore(&mut host.client, &saved).unwrap();
    host.client.resume().unwrap();
    eventually("the fault", || host.client.query_channel(failing).unwrap().error != 0);
    let untouched = saved.channels[1].id;
    assert_eq!(host.client.query_channel(untouched).unwrap().error, 0);
    host.check();
}

#[test]
fn memory_is_copied_within_its_limits() {
    use mdev_core::gpu::StagedCopy;
    let mut host = Host::new();
    let copy = StagedCopy { offset: 0, len: 4096, at: 0, fills: false };
    assert!(host.client.copy_staged(copy).is_err(), "it is not paused");
    host.client.pause().unwrap();
    let staging = host.client.staging().unwrap().len;
    for bad in [
        StagedCopy { len: 0, ..copy },
        StagedCopy { offset: super::VRAM, ..copy },
        StagedCopy { offset: u64::MAX, ..copy },
        StagedCopy { len: staging + 1, ..copy },
        StagedCopy { at: staging - 1, ..copy },
        StagedCopy { at: u64::MAX, ..copy },
    ] {
        assert!(host.client.copy_staged(bad).is_err(), "{bad:?}");
    }
    let mut vram = vec![7; super::VRAM as usize];
    copy_vram(&mut host.client, &mut vram, true);
    host.client.scrub().unwrap();
    copy_vram(&mut host.client, &mut vram, false);
    assert!(vram.iter().all(|byte| *byte == 0));
    host.client.resume().unwrap();
    let id = lifecycle::import(&mut host.client, &ram(MIB)).unwrap();
    host.client.release(id).unwrap();
    host.check();
}
