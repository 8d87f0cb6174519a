//! Faults and hangs.

use std::time::{Duration, Instant};

use mdev_core::gpu::{ChannelHandle, Client, EngineKind, Gpu, GpuCapabilities, GpuError, Pending};
use nvidia_rm::fake_rm::FakeRm;
use vendor_backends::conformance::{lifecycle, readable};
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu};

use super::{DRIVER, eventually, gpu, gpu_with_hang_limit, set_ring, with_channels};

#[test]
fn a_fault_ends_the_channels_of_its_engine_and_is_signalled() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client, _memory, channels) = with_channels(&rm, &mut gpu);
    rm.fault(channels[1].token.0, 31);
    assert!(readable(&client.event(), Duration::from_secs(20)));
    assert!(client.take_pending().contains(Pending::CHANNEL_ERROR));
    let errors: Vec<_> =
        channels.iter().map(|channel| client.query_channel(channel.id).unwrap().error).collect();
    assert_eq!(errors, [0, 31, 31]);
    assert_eq!(client.usage().unwrap().faults, 2);
    assert!(!client.gpu().capabilities.contains(GpuCapabilities::CHANNEL_FAULTS));
}

#[test]
fn repeated_faults_cause_a_pause() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    for channel in &channels {
        client.destroy_channel(channel.id).unwrap();
    }
    let id = lifecycle::import(&mut client, &memory).unwrap();
    let spec = lifecycle::channel_spec(EngineKind::Compute, id, 0);
    let mut created = 0;
    let refused = loop {
        match client.create_channel(&spec) {
            Ok(channel) => {
                created += 1;
                rm.fault(channel.token.0, 31);
                client.query_channel(channel.id).unwrap();
                client.destroy_channel(channel.id).unwrap();
            }
            Err(error) => break error,
        }
        assert!(created < 10, "no pause");
    };
    assert!(matches!(refused, GpuError::Later(_)), "{refused}");
    client.create_channel(&lifecycle::channel_spec(EngineKind::Copy, id, 512)).unwrap();
}

#[test]
fn a_guest_cannot_show_progress_that_the_engine_does_not_make() {
    for endless in [true, false] {
        let rm = FakeRm::new(DRIVER);
        let (mut gpu, clock) = gpu_with_hang_limit(&rm);
        let (vgpu, _client, memory, channels) = with_channels(&rm, &mut gpu);
        let (_, _other, other_memory, _) = with_channels(&rm, &mut gpu);
        set_ring(&memory.mapping, 1, 0, 1);
        eventually("a ring", || rm.last_ring() == Some(channels[1].token.0));
        rm.hold_engine(endless);
        rm.log_residency(true, u64::from(std::process::id()), clock());
        let (begun, mut round, mut resets) = (Instant::now(), 0, 0);
        while begun.elapsed() < Duration::from_secs(2) && resets == 0 {
            round += 1;
            rm.set_clock(clock());
            // What only the GPU should write, and a GP_PUT as if nothing had ever been queued.
            set_ring(&memory.mapping, 1, round % 64, if round % 2 == 0 { 0 } else { round % 64 });
            set_ring(&other_memory.mapping, 1, round % 64, (round + 1) % 64);
            let report = gpu.usage().unwrap();
            resets = report.vgpus.iter().find(|(id, _)| *id == vgpu).unwrap().1.hang_resets;
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(resets, u64::from(endless), "endless: {endless}, after {:?}", begun.elapsed());
    }
}

#[test]
fn an_idle_vgpu_is_not_reset_while_another_one_only_copies() {
    let rm = FakeRm::new(DRIVER);
    let (mut gpu, clock) = gpu_with_hang_limit(&rm);
    let (idle, _client, memory, channels) = with_channels(&rm, &mut gpu);
    let (_, _other, other_memory, _) = with_channels(&rm, &mut gpu);
    set_ring(&memory.mapping, 1, 0, 1);
    eventually("a ring", || rm.last_ring() == Some(channels[1].token.0));
    // The kernel has ended. Its context stays resident, since no other context has work.
    set_ring(&memory.mapping, 1, 1, 1);
    rm.log_residency(true, u64::from(std::process::id()), clock());
    let begun = Instant::now();
    for round in (0..64).cycle() {
        rm.set_clock(clock());
        set_ring(&other_memory.mapping, 0, round, (round + 1) % 64);
        let report = gpu.usage().unwrap();
        let usage = report.vgpus.iter().find(|(id, _)| *id == idle).unwrap().1;
        assert_eq!(usage.hang_resets, 0, "after {:?}", begun.elapsed());
        if begun.elapsed() > Duration::from_millis(800) {
            // Once the engine has changed to the probe, the idle context is known not to have it.
            assert!(usage.compute_ns < 400_000_000, "charged {} ns", usage.compute_ns);
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn only_a_kernel_that_does_not_end_is_reset() {
    let rm = FakeRm::new(DRIVER);
    let (mut gpu, clock) = gpu_with_hang_limit(&rm);
    let own = u64::from(std::process::id());
    // A residency from before the channels were created, without a record of its end.
    let (endless, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    rm.log_residency(true, own, clock() - 900_000_000);
    set_ring(&memory.mapping, 1, 1, 1);
    let (_, mut other, other_memory, others) = with_channels(&rm, &mut gpu);
    let other_ring = other_memory.mapping.clone();
    let mut rounds = 0;
    let mut step = |gpu: &mut NvidiaGpu| {
        rounds += 1;
        rm.set_clock(clock());
        // The other vGPU fetches entries, so its long residency is not a hang.
        set_ring(&other_ring, 1, rounds % 64, (rounds + 1) % 64);
        let report = gpu.usage().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        report.vgpus.iter().find(|(id, _)| *id == endless).unwrap().1.hang_resets
    };
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        assert_eq!(step(&mut gpu), 0, "the old residency");
    }
    rm.hold_engine(true);
    rm.log_residency(true, own, clock());
    let start = Instant::now();
    eventually("reset", || step(&mut gpu) == 1);
    assert!(start.elapsed() >= Duration::from_millis(149), "{:?}", start.elapsed());
    let errors = |client: &mut NvidiaClient, channels: &[ChannelHandle]| -> Vec<u32> {
        channels.iter().map(|channel| client.query_channel(channel.id).unwrap().error).collect()
    };
    assert_eq!(errors(&mut client, &channels), [0, 43, 43], "copies continue");
    assert_eq!(errors(&mut other, &others), [0, 0, 0]);
}
