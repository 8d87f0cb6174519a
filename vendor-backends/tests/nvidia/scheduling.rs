//! Time slices, the gate and charged time.

use std::time::{Duration, Instant};

use mdev_core::gpu::{ChannelHandle, Client, EngineKind, Gpu};
use vendor_backends::conformance::lifecycle;
use vendor_backends::nvidia::NvidiaGpu;
use vendor_backends::nvidia::fake_rm::FakeRm;

use super::{DRIVER, eventually, gpu, set_ring, with_channels};

#[test]
fn an_idle_vgpu_has_the_shortest_slice_while_others_work() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (idle, _client, memory, channels) = with_channels(&rm, &mut gpu);
    let (busy, _other, other_memory, others) = with_channels(&rm, &mut gpu);
    for vgpu in [idle, busy] {
        gpu.set_timeslice(vgpu, Duration::from_millis(3)).unwrap();
    }
    set_ring(&other_memory.mapping, 1, 0, 1);
    let slices = |channels: &[ChannelHandle]| -> Vec<u64> {
        channels.iter().filter_map(|channel| rm.timeslice_us(channel.token.0)).collect()
    };
    eventually("a short slice", || {
        gpu.usage().unwrap();
        slices(&channels) == [50, 50, 50]
    });
    assert_eq!(slices(&others)[1..], [3000, 3000], "the busy vGPU keeps its slice");
    // A long kernel without queued entries.
    let process = u64::from(std::process::id());
    rm.log_residency(true, process, 1);
    eventually("normal slice while the kernel runs", || slices(&channels) == [50, 3000, 3000]);
    rm.log_residency(false, process, 2);
    eventually("a short slice again", || {
        gpu.usage().unwrap();
        slices(&channels) == [50, 50, 50]
    });
    set_ring(&memory.mapping, 1, 0, 1);
    eventually("normal slice", || slices(&channels) == [50, 3000, 3000]);
    gpu.set_timeslice(idle, Duration::from_millis(4)).unwrap();
    eventually("changed slice", || slices(&channels) == [50, 4000, 4000]);
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn a_ring_that_is_never_empty_is_no_work_if_others_run_instead() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (idle, _client, memory, channels) = with_channels(&rm, &mut gpu);
    let (_, _other, other_memory, _) = with_channels(&rm, &mut gpu);
    gpu.set_timeslice(idle, Duration::from_millis(3)).unwrap();
    set_ring(&memory.mapping, 1, 0, 1);
    let (ring, mut rounds) = (other_memory.mapping.clone(), 0);
    let mut sample = |gpu: &mut NvidiaGpu| {
        rounds += 1;
        // Copies: the log has no residencies of the other vGPU.
        set_ring(&ring, 0, rounds % 64, (rounds + 1) % 64);
        let report = gpu.usage().unwrap();
        let usage = report.vgpus.into_iter().find(|(vgpu, _)| *vgpu == idle).unwrap().1;
        (usage.runnable, rm.timeslice_us(channels[1].token.0))
    };
    eventually("waits", || sample(&mut gpu) == (true, Some(3000)));
    std::thread::sleep(Duration::from_millis(200));
    eventually("still waits", || sample(&mut gpu) == (true, Some(3000)));
    // Another process becomes resident again and again.
    rm.set_clock(1_000_000_000);
    for at in 1..=4 {
        rm.log_residency(true, 1, at);
        rm.log_residency(false, 1, at);
    }
    eventually("no work", || sample(&mut gpu) == (false, Some(50)));
    // Entries that are fetched and need no engine, and a guest that writes GP_GET.
    for get in 1..50 {
        set_ring(&memory.mapping, 1, get, get + 1);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(sample(&mut gpu).1, Some(50), "no residency");
    }
    set_ring(&memory.mapping, 1, 50, 51);
    rm.log_residency(true, u64::from(std::process::id()), 1_000_000_000);
    eventually("new work", || sample(&mut gpu) == (true, Some(3000)));
}

#[test]
fn copies_are_charged_while_they_may_run() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, _client, memory, channels) = with_channels(&rm, &mut gpu);
    let ring = memory.mapping.clone();
    let copied = |gpu: &mut NvidiaGpu| gpu.usage().unwrap().vgpus[0].1.copy_ns / 1_000_000;
    let mut rounds = 0;
    let mut copy_for = |gpu: &mut NvidiaGpu, ms: u64| {
        let start = copied(gpu);
        eventually("copies are charged", || {
            rounds += 1;
            set_ring(&ring, 0, rounds % 64, (rounds + 1) % 64);
            copied(gpu) >= start + ms
        });
    };
    copy_for(&mut gpu, 300);
    gpu.set_gate(vgpu, false).unwrap();
    eventually("closed", || channels.iter().all(|channel| !rm.may_run(channel.token.0)));
    let before = copied(&mut gpu);
    std::thread::sleep(Duration::from_millis(300));
    let charged = copied(&mut gpu) - before;
    assert!(charged < 150, "{charged} ms behind a closed gate");
    gpu.set_gate(vgpu, true).unwrap();
    copy_for(&mut gpu, 50);
    // A copy that has faulted or waits for a semaphore.
    let before = copied(&mut gpu);
    std::thread::sleep(Duration::from_secs(1));
    let charged = copied(&mut gpu) - before;
    assert!(charged < 500, "{charged} ms without an entry fetched");
}

#[test]
fn a_gate_does_not_wait_for_a_kernel_that_may_be_endless() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, _client, memory, channels) = with_channels(&rm, &mut gpu);
    set_ring(&memory.mapping, 1, 1, 1);
    rm.hold_engine(true);
    std::thread::sleep(Duration::from_millis(150));
    rm.log_residency(true, u64::from(std::process::id()), 1000);
    rm.set_clock(200_000_000);
    gpu.set_gate(vgpu, false).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(channels.iter().all(|channel| rm.may_run(channel.token.0)));
    // The guest shows that entries are fetched.
    let until = Instant::now() + Duration::from_millis(300);
    for get in (0..64).cycle().take_while(|_| Instant::now() < until) {
        set_ring(&memory.mapping, 1, get, get);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(channels.iter().all(|channel| rm.may_run(channel.token.0)));
    rm.hold_engine(false);
    rm.log_residency(false, u64::from(std::process::id()), 200_000_000);
    eventually("closed", || channels.iter().all(|channel| !rm.may_run(channel.token.0)));
}

#[test]
fn a_gate_closes_although_the_guest_shows_an_endless_kernel() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, _client, memory, channels) = with_channels(&rm, &mut gpu);
    // GP_GET never changes, and kernels end.
    set_ring(&memory.mapping, 1, 1, 1);
    std::thread::sleep(Duration::from_millis(150));
    rm.log_residency(true, u64::from(std::process::id()), 1000);
    rm.set_clock(200_000_000);
    gpu.set_gate(vgpu, false).unwrap();
    eventually("closed", || channels.iter().all(|channel| !rm.may_run(channel.token.0)));
}

#[test]
fn a_vgpu_that_hides_its_work_is_charged() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_vgpu, _client, memory, channels) = with_channels(&rm, &mut gpu);
    let (own, start) = (u64::from(std::process::id()), Instant::now());
    let clock = || start.elapsed().as_nanos() as u64 + 1_000_000_000;
    let charged = |gpu: &mut NvidiaGpu| {
        rm.set_clock(clock());
        gpu.usage().unwrap().vgpus[0].1.compute_ns / 1_000_000
    };
    // One ring. The guest clears GP_PUT and writes GP_GET, as if nothing had been queued.
    rm.set_clock(clock());
    set_ring(&memory.mapping, 1, 0, 1);
    eventually("a ring", || rm.last_ring() == Some(channels[1].token.0));
    set_ring(&memory.mapping, 1, 1, 1);
    rm.log_residency(true, own, clock());
    // The context comes back after each probe.
    let before = charged(&mut gpu);
    let (begun, mut probes) = (Instant::now(), rm.probes());
    while begun.elapsed() < Duration::from_secs(1) {
        if rm.probes() > probes {
            probes = rm.probes();
            rm.log_residency(true, own, clock() + 1000);
        }
        charged(&mut gpu);
        std::thread::sleep(Duration::from_millis(2));
    }
    let work = charged(&mut gpu) - before;
    assert!(work > 600, "{work} ms of 1000 are charged, {probes} probes");
    // The work ends: an idle context does not come back, and is neither charged nor probed again.
    eventually("a probe", || {
        charged(&mut gpu);
        rm.probes() > probes
    });
    std::thread::sleep(Duration::from_millis(100));
    let (before, probes) = (charged(&mut gpu), rm.probes());
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((charged(&mut gpu) - before, rm.probes()), (0, probes));
}

#[test]
fn a_gate_disables_each_channel_once_and_enables_it_once() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, mut client, memory, channels) = with_channels(&rm, &mut gpu);
    let all_enabled = |channels: &[ChannelHandle], enabled: bool| {
        channels.iter().all(|channel| rm.may_run(channel.token.0) == enabled)
    };
    for round in 0..3 {
        gpu.set_gate(vgpu, false).unwrap();
        eventually("closed", || all_enabled(&channels, false));
        if round == 1 {
            // A channel that is created behind a closed gate is disabled too.
            client.destroy_channel(channels[2].id).unwrap();
            let id = lifecycle::import(&mut client, &memory).unwrap();
            let late = client
                .create_channel(&lifecycle::channel_spec(EngineKind::Compute, id, 0))
                .unwrap();
            assert!(!rm.may_run(late.token.0));
            gpu.set_gate(vgpu, true).unwrap();
            eventually("open", || rm.may_run(late.token.0) && all_enabled(&channels[..2], true));
            break;
        }
        gpu.set_gate(vgpu, true).unwrap();
        eventually("open", || all_enabled(&channels, true));
    }
    assert_eq!(rm.violations(), Vec::<String>::new());
}
