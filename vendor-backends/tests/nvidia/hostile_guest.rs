//! Guests that write to everything they can write to, and destroy what they can.

use mdev_core::abi::userd;
use mdev_core::gpu::{Client, EngineKind, Gpu};
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::FakeRm;
use vendor_backends::conformance::lifecycle;

use super::{
    DRIVER, create_until_refused, eventually, gpu, ram, resets, set_ring, spec, try_client,
    with_channels,
};

#[test]
fn faults_cause_a_pause_if_the_guest_does_not_ask_for_them() {
    for by_reset in [false, true] {
        let rm = FakeRm::new(DRIVER);
        let mut gpu = gpu(&rm);
        let mut client = try_client(&rm, &mut gpu, &spec(64 * MIB)).unwrap();
        let created = create_until_refused(&mut client, &ram(MIB), 1000, |client, channel| {
            rm.fault(channel.token.0, 31);
            if by_reset {
                client.reset().unwrap();
            } else {
                client.destroy_channel(channel.id).unwrap();
            }
        });
        assert!(created <= 3, "{created} faults without a pause");
        assert_eq!(client.usage().unwrap().faults, u64::from(created));
    }
}

#[test]
fn short_work_that_is_destroyed_again_and_again_causes_a_pause() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = try_client(&rm, &mut gpu, &spec(64 * MIB)).unwrap();
    let memory = ram(MIB);
    rm.take_log();
    let created = create_until_refused(&mut client, &memory, 1000, |client, channel| {
        set_ring(&memory.mapping, 0, 0, 1);
        client.destroy_channel(channel.id).unwrap();
        set_ring(&memory.mapping, 0, 0, 0);
    });
    let resets = resets(&rm);
    assert!((16..=48).contains(&created) && resets <= 48, "{created} channels, {resets} resets");
}

#[test]
fn channels_without_work_are_created_and_destroyed_without_a_pause() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = try_client(&rm, &mut gpu, &spec(64 * MIB)).unwrap();
    let created = create_until_refused(&mut client, &ram(MIB), 1000, |client, channel| {
        client.destroy_channel(channel.id).unwrap();
    });
    assert_eq!(created, 1000);
}

#[test]
fn a_channel_that_is_created_behind_a_closed_gate_never_runs() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, mut client, _memory, channels) = with_channels(&rm, &mut gpu);
    gpu.set_gate(vgpu, false).unwrap();
    eventually("closed", || channels.iter().all(|channel| !rm.may_run(channel.token.0)));
    // The ring is full before the channel exists. A group that exists, and a new one.
    let memory = ram(MIB);
    set_ring(&memory.mapping, 0, 0, 1);
    let id = lifecycle::import(&mut client, &memory).unwrap();
    client.destroy_channel(channels[2].id).unwrap();
    client.destroy_channel(channels[0].id).unwrap();
    let (started, before) = (rm.started(), rm.last_ring());
    let late = [EngineKind::Compute, EngineKind::Copy]
        .map(|engine| client.create_channel(&lifecycle::channel_spec(engine, id, 0)).unwrap());
    for channel in &late {
        client.wake(channel.token).unwrap();
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(rm.started(), started, "no channel was enabled when its group was scheduled");
    assert_eq!(rm.last_ring(), before, "the worker does not ring");
    assert!(late.iter().all(|channel| !rm.may_run(channel.token.0)));
    gpu.set_gate(vgpu, true).unwrap();
    eventually("open", || late.iter().all(|channel| rm.may_run(channel.token.0)));
    eventually("rings", || {
        rm.last_ring().is_some_and(|token| late.iter().any(|l| l.token.0 == token))
    });
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn a_closed_gate_holds_while_the_guest_rewrites_its_rings() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    gpu.set_gate(vgpu, false).unwrap();
    eventually("closed", || channels.iter().all(|channel| !rm.may_run(channel.token.0)));
    let (polled, ring) = (client.usage().unwrap().polled_doorbells, memory.mapping.clone());
    for round in 0..20_000_u32 {
        for channel in 0..3 {
            let word = |seed: u32| round.wrapping_mul(seed) % 64;
            set_ring(&ring, channel, word(2_654_435_761), word(40_503));
            ring.store_u32(channel * 512 + userd::NEED_WAKEUP, round % 2).unwrap();
        }
        if round % 100 == 0 {
            client.wake(channels[1].token).unwrap();
            gpu.usage().unwrap();
        }
    }
    assert!(channels.iter().all(|channel| !rm.may_run(channel.token.0)), "the gate stays closed");
    assert_eq!(client.usage().unwrap().polled_doorbells, polled, "no ring");
    gpu.set_gate(vgpu, true).unwrap();
    eventually("open", || channels.iter().all(|channel| rm.may_run(channel.token.0)));
}
