//! Time slices, the gate and charged time.

use std::time::{Duration, Instant};

use mdev_core::gpu::{ChannelHandle, Client, EngineKind, Gpu};
use nvidia_rm::fake_rm::{self, FakeRm};
use vendor_backends::conformance::lifecycle;
use vendor_backends::nvidia::{NvidiaGpu, Options};

use super::{DRIVER, OPTIONS, eventually, gpu, set_ring, with_channels};

#[test]
fn a_vgpu_has_its_whole_slice_for_the_first_request_after_a_rest() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (resting, _client, memory, channels) = with_channels(&rm, &mut gpu);
    let (_, _other, other_memory, _) = with_channels(&rm, &mut gpu);
    gpu.set_timeslice(resting, Duration::from_millis(3)).unwrap();
    set_ring(&memory.mapping, 1, 1, 1);
    let slice = || rm.timeslice_us(channels[1].token.0);
    eventually("a slice", || slice() == Some(3000));
    let until = Instant::now() + Duration::from_millis(400);
    for get in (0..64).cycle().take_while(|_| Instant::now() < until) {
        set_ring(&other_memory.mapping, 1, get, (get + 1) % 64);
        gpu.usage().unwrap();
        assert_eq!(slice(), Some(3000));
    }
}

#[test]
fn brief_requests_neither_wait_for_long_nor_are_they_preempted() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (service, _client, memory, _) = with_channels(&rm, &mut gpu);
    let (_, _other, other_memory, _) = with_channels(&rm, &mut gpu);
    gpu.set_timeslice(service, Duration::from_millis(3)).unwrap();
    set_ring(&other_memory.mapping, 1, 0, 1);
    let (own, start) = (u64::from(std::process::id()), Instant::now());
    let clock = || start.elapsed().as_nanos() as u64 + 1_000_000_000;
    let usage = |gpu: &mut NvidiaGpu| {
        rm.set_clock(clock());
        gpu.usage().unwrap().vgpus.iter().find(|(vgpu, _)| *vgpu == service).unwrap().1
    };
    let before = usage(&mut gpu);
    for request in 1..=20 {
        rm.set_clock(clock());
        set_ring(&memory.mapping, 1, request, request + 1);
        eventually("a wait", || usage(&mut gpu).runnable);
        std::thread::sleep(Duration::from_millis(2));
        let at = clock();
        rm.log_residency(true, own, at);
        rm.log_residency(false, own, at + 300_000);
        std::thread::sleep(Duration::from_millis(10));
    }
    let after = usage(&mut gpu);
    assert_eq!(after.preemptions, before.preemptions);
    let waits = after.waits.since(&before.waits);
    // The other vGPU's engine time is this process', too: its residencies are not told apart.
    assert!((20..=40).contains(&waits.total()), "{waits:?}");
    let waited_ms = (after.wait_ns - before.wait_ns) / 1_000_000;
    let elapsed_ms = start.elapsed().as_millis() as u64;
    assert!(waited_ms >= 30 && waited_ms <= elapsed_ms * 3 / 4, "{waited_ms} of {elapsed_ms} ms");
}

#[test]
fn an_idle_vgpu_that_rings_itself_has_the_shortest_slice_while_others_work() {
    let rm = FakeRm::new(DRIVER);
    // The worker does not count the rings.
    let options = Options { direct_doorbell: true, ..OPTIONS };
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, options).unwrap();
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
        slices(&channels) == [200, 200, 200]
    });
    assert_eq!(slices(&others)[1..], [3000, 3000], "the busy vGPU keeps its slice");
    // A long kernel without queued entries.
    let process = u64::from(std::process::id());
    rm.log_residency(true, process, 1);
    eventually("normal slice while the kernel runs", || slices(&channels) == [200, 3000, 3000]);
    rm.log_residency(false, process, 2);
    eventually("a short slice again", || {
        gpu.usage().unwrap();
        slices(&channels) == [200, 200, 200]
    });
    set_ring(&memory.mapping, 1, 0, 1);
    eventually("normal slice", || slices(&channels) == [200, 3000, 3000]);
    gpu.set_timeslice(idle, Duration::from_millis(4)).unwrap();
    eventually("changed slice", || slices(&channels) == [200, 4000, 4000]);
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
    eventually("no work", || sample(&mut gpu) == (false, Some(3000)));
    // Entries that are fetched and need no engine, and a guest that writes GP_GET: each ring takes
    // time from others.
    let mut get = 0;
    let mut ring_again = || {
        get = (get + 1) % 63;
        set_ring(&memory.mapping, 1, get, get + 1);
        std::thread::sleep(Duration::from_millis(2));
    };
    eventually("a short slice", || {
        ring_again();
        sample(&mut gpu) == (false, Some(200))
    });
    for _ in 0..50 {
        ring_again();
        assert_eq!(sample(&mut gpu).1, Some(200), "no residency");
    }
    ring_again();
    rm.log_residency(true, u64::from(std::process::id()), 1_000_000_000);
    eventually("new work", || sample(&mut gpu) == (true, Some(3000)));
}

#[test]
fn others_that_ran_while_a_vgpu_rested_do_not_hide_its_work() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (resting, _client, memory, channels) = with_channels(&rm, &mut gpu);
    let (_, _other, other_memory, _) = with_channels(&rm, &mut gpu);
    gpu.set_timeslice(resting, Duration::from_millis(3)).unwrap();
    let start = Instant::now();
    let clock = || start.elapsed().as_nanos() as u64 + 1_000_000_000;
    let mut rounds = 0;
    // Another process has the engine again and again, and the other vGPU copies.
    let mut others_run = |gpu: &mut NvidiaGpu| {
        rounds += 1;
        rm.set_clock(clock());
        rm.log_residency(true, 1, clock());
        rm.log_residency(false, 1, clock());
        set_ring(&other_memory.mapping, 0, rounds % 64, (rounds + 1) % 64);
        let usage = gpu.usage().unwrap().vgpus.into_iter().find(|(vgpu, _)| *vgpu == resting);
        (usage.unwrap().1.runnable, rm.timeslice_us(channels[1].token.0))
    };
    eventually("rest", || others_run(&mut gpu) == (false, Some(3000)));
    let resting_since = Instant::now();
    while resting_since.elapsed() < Duration::from_millis(400) {
        assert_eq!(others_run(&mut gpu), (false, Some(3000)));
        std::thread::sleep(Duration::from_millis(10));
    }
    // The GPU fetches the entry at once, and the engine is not free.
    set_ring(&memory.mapping, 1, 1, 1);
    eventually("work", || others_run(&mut gpu).0);
    let submitted = Instant::now();
    while submitted.elapsed() < Duration::from_millis(60) {
        assert_eq!(others_run(&mut gpu), (true, Some(3000)), "{:?}", submitted.elapsed());
        std::thread::sleep(Duration::from_millis(5));
    }
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
fn the_usage_of_a_vgpu_alone_is_what_the_engine_worked() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (_vgpu, _client, memory, _channels) = with_channels(&rm, &mut gpu);
    let (own, start) = (u64::from(std::process::id()), Instant::now());
    let clock = || start.elapsed().as_nanos() as u64 + 1_000_000_000;
    rm.set_clock(clock());
    set_ring(&memory.mapping, 1, 0, 1);
    // The context stays on the engine: no other one needs it.
    rm.log_residency(true, own, clock());
    rm.add_utilization(clock(), 10_000);
    let (mut requests, mut samples) = (1, 1);
    let mut used_until = |gpu: &mut NvidiaGpu, end: Duration| {
        while start.elapsed() < end {
            // A hundred requests a second, which the engine works on for 4 % of the time.
            std::thread::sleep(Duration::from_millis(10));
            requests += 1;
            set_ring(&memory.mapping, 1, (requests - 1) % 64, requests % 64);
            rm.set_clock(clock());
            if clock() > 1_000_000_000 + samples * 200_000_000 {
                rm.add_utilization(clock(), 400);
                samples += 1;
            }
            gpu.usage().unwrap();
        }
        let used = gpu.usage().unwrap().vgpus[0].1.compute_ns;
        (used as f64 / 1e6, start.elapsed().as_secs_f64() * 1e3)
    };
    let (before, from) = used_until(&mut gpu, Duration::from_millis(1500));
    let (after, until) = used_until(&mut gpu, Duration::from_secs(4));
    let part = (after - before) / (until - from);
    assert!((0.03..0.05).contains(&part), "{part}: {before} to {after} ms");
    assert!(before < 900.0, "{before} ms were charged until the first samples");
}

#[test]
fn a_turn_between_two_looks_at_the_rings_is_charged() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let (vgpu, _client, _memory, _channels) = with_channels(&rm, &mut gpu);
    let own = u64::from(std::process::id());
    let slice = Duration::from_millis(3);
    gpu.set_timeslice(vgpu, slice).unwrap();
    let charged = |gpu: &mut NvidiaGpu| gpu.usage().unwrap().vgpus[0].1.compute_ns;
    rm.set_clock(1_000_000_000);
    let before = charged(&mut gpu);
    // One of many vGPUs has its turn. The work was submitted long before.
    let start_ns = 5_000_000_000;
    rm.log_residency(true, own, start_ns);
    rm.log_residency(true, own + 1, start_ns + slice.as_nanos() as u64);
    rm.set_clock(start_ns + 50_000_000);
    let turn = Duration::from_nanos(charged(&mut gpu) - before);
    assert!(turn > slice.mul_f64(0.9) && turn <= slice, "{turn:?} of {slice:?}");
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
