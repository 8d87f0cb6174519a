//! The guest runtime on the software GPU, through the device model: jobs have correct results, and
//! a guest's mistake costs one channel of that guest.

use std::time::{Duration, Instant};

use anyhow::Result;
use mdev_core::abi::host::GpEntry;
use mdev_core::abi::notifier;
use mdev_core::abi::qmd;
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use system_tests::parent::{Guest, Parent, Vgpu};
use vgpu_guest::GuestError;
use vgpu_guest::bench::{self, Load};
use vgpu_guest::channel::Channel;
use vgpu_guest::compute::{Launch, Shape};
use vgpu_guest::copy;
use vgpu_guest::device::Device;
use vgpu_guest::memory::{Buffer, Home};
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::{
    self, Work, copy::Copy, copy::Rectangle, factorial::Factorial, fill::Fill,
    mandelbrot::Mandelbrot, saxpy::Saxpy, sgemm::Sgemm, spin::Spin, vadd::VectorAdd,
};

/// Address without a mapping: the allocator starts at the bottom.
const NOWHERE: u64 = 0xf0_0000_0000;

fn guest() -> Result<(Parent, Guest)> {
    let mut parent = Parent::start(256 * MIB)?;
    let guest = parent.guest(Vgpu::default())?;
    Ok((parent, guest))
}

fn works(device: &Device) -> Result<()> {
    let mut channel = Channel::new(device, EngineKind::Compute)?;
    work::run(&VectorAdd::new(device, Home::Guest, 5000)?, &mut channel)?;
    work::run(&Factorial::new(device, Home::Guest, 5000)?, &mut channel)?;
    Ok(())
}

/// Returns code and details of a channel's fault.
fn fault(result: Result<(), GuestError>) -> (u32, u64) {
    match result {
        Err(GuestError::Channel { code, info }) => (code, info),
        other => panic!("should have faulted: {other:?}"),
    }
}

#[test]
fn the_device_describes_the_vgpu() -> Result<()> {
    let (_parent, guest) = guest()?;
    assert_eq!(guest.device.properties().type_name(), "SOFT-TEST");
    assert_eq!(guest.device.properties().uuid(), guest.id.to_string());
    assert_eq!(guest.device.info().vram_bytes, 64 * MIB);
    assert_eq!(guest.device.info().classes, [0xc86f, 0xc8b5, 0xcbc0]);
    Ok(())
}

#[test]
fn both_kinds_of_channel_copy() -> Result<()> {
    let (_parent, guest) = guest()?;
    for engine in [EngineKind::Copy, EngineKind::Compute] {
        let mut channel = Channel::new(&guest.device, engine)?;
        for len in [4, 4096, 300_004, 8 * MIB] {
            work::run(&Copy::new(&guest.device, len)?, &mut channel)?;
        }
        work::run(&Rectangle::new(&guest.device)?, &mut channel)?;
        for (home, words) in [(Home::Guest, 1), (Home::Guest, 70_001), (Home::Vram, 12_345)] {
            work::run(&Fill::new(&guest.device, home, words)?, &mut channel)?;
        }
    }
    Ok(())
}

#[test]
fn results_equal_those_of_a_cpu() -> Result<()> {
    let (_parent, guest) = guest()?;
    let device = &guest.device;
    let mut channel = Channel::new(device, EngineKind::Compute)?;
    for home in [Home::Guest, Home::Vram] {
        for n in [1, 255, 257, 100_000] {
            work::run(&Saxpy::new(device, home, n)?, &mut channel)?;
            work::run(&VectorAdd::new(device, home, n)?, &mut channel)?;
        }
        for n in [1, 17, 128, 200] {
            work::run(&Sgemm::new(device, home, n)?, &mut channel)?;
        }
    }
    let mut spin = Spin::new(device, 1000)?;
    work::run(&spin, &mut channel)?;
    spin.calibrate(&mut channel, Duration::from_millis(5))?;
    let report = work::run(&spin, &mut channel)?;
    let took = report.engine_seconds;
    assert!((0.0025..0.05).contains(&took), "5 ms were asked for, {took} s charged");
    Ok(())
}

#[test]
fn drawing_works_with_any_pitch() -> Result<()> {
    let (_parent, guest) = guest()?;
    let mut channel = Channel::new(&guest.device, EngineKind::Compute)?;
    for (width, height, pitch) in [(1, 1, 4), (640, 480, 2560), (333, 77, 1344), (1920, 1200, 8192)]
    {
        let bytes = u64::from(pitch) * u64::from(height);
        let surface = Buffer::scanout(&guest.device, 0, bytes)?;
        let job = Mandelbrot::new(&guest.device, surface, (width, height), pitch)?;
        work::run(&job, &mut channel)?;
    }
    Ok(())
}

#[test]
fn a_full_ring_keeps_the_order() -> Result<()> {
    let (_parent, guest) = guest()?;
    let mut channel = Channel::with_entries(&guest.device, EngineKind::Compute, 8)?;
    let buffer = Buffer::guest(&guest.device, 8192)?;
    // Each submission changes a word and copies it elsewhere, which reveals swapped, lost and
    // repeated submissions.
    for number in 0..500 {
        let mut methods = Methods::new();
        copy::fill(&mut methods, buffer.va(), number, 1);
        copy::linear(&mut methods, buffer.va() + 4096 + u64::from(number) * 4, buffer.va(), 4);
        channel.submit(&methods)?;
    }
    let spin = Spin::new(&guest.device, 10)?;
    spin.prepare();
    let mut methods = Methods::new();
    spin.push(&mut methods);
    for _ in 0..3000 {
        channel.submit(&methods)?;
    }
    channel.wait_idle()?;
    assert_eq!(spin.launches()?, 3000);
    assert_eq!(buffer.load::<u32>(4096, 500), (0..500).collect::<Vec<u32>>());
    assert!(channel.counters().ring_full > 0, "a ring of 8 should have been full");
    Ok(())
}

#[test]
fn a_channel_waits_for_a_semaphore_of_another() -> Result<()> {
    let (_parent, guest) = guest()?;
    let mut first = Channel::new(&guest.device, EngineKind::Copy)?;
    let mut second = Channel::new(&guest.device, EngineKind::Copy)?;
    let buffer = Buffer::guest(&guest.device, 4096)?;
    let mut methods = Methods::new();
    methods.acquire(buffer.va(), 7);
    copy::fill(&mut methods, buffer.va() + 64, 0x55, 1);
    let waiting = second.submit(&methods)?;
    std::thread::sleep(Duration::from_millis(50));
    assert!(!second.is_done(waiting), "the semaphore is not released yet");
    methods.clear();
    copy::release(&mut methods, buffer.va(), 7);
    first.run(&methods)?;
    second.wait(waiting)?;
    assert_eq!(buffer.load::<u32>(64, 1), [0x55]);
    methods.clear();
    methods.release_timestamp(buffer.va() + 16, 9);
    first.run(&methods)?;
    let words: Vec<u32> = buffer.load(16, 1);
    let time: Vec<u64> = buffer.load(24, 1);
    assert!(words == [9] && time[0] > 0, "{words:?} at {time:?}");
    Ok(())
}

#[test]
fn a_bad_address_faults_the_channel_and_is_reported() -> Result<()> {
    let (_parent, guest) = guest()?;
    let buffer = Buffer::guest(&guest.device, 4096)?;
    for reads_there in [true, false] {
        let mut channel = Channel::new(&guest.device, EngineKind::Copy)?;
        let mut methods = Methods::new();
        let (to, from) = if reads_there { (buffer.va(), NOWHERE) } else { (NOWHERE, buffer.va()) };
        copy::linear(&mut methods, to, from, 4096);
        assert_eq!(fault(channel.run(&methods)), (notifier::MMU_FAULT, NOWHERE));
        // The channel stays dead and repeats the error.
        assert_eq!(fault(channel.run(&Methods::new())), (notifier::MMU_FAULT, NOWHERE));
        works(&guest.device)?;
    }
    Ok(())
}

#[test]
fn unmapped_memory_faults() -> Result<()> {
    let (_parent, guest) = guest()?;
    let kept = Buffer::guest(&guest.device, MIB)?;
    let gone = Buffer::guest(&guest.device, MIB)?;
    let mut channel = Channel::new(&guest.device, EngineKind::Copy)?;
    let va = gone.va();
    drop(gone);
    let mut methods = Methods::new();
    copy::linear(&mut methods, va, kept.va(), 8);
    assert_eq!(fault(channel.run(&methods)), (notifier::MMU_FAULT, va));
    works(&guest.device)
}

#[test]
fn an_unknown_method_faults_the_channel() -> Result<()> {
    let (_parent, guest) = guest()?;
    for (subchannel, method, code) in [
        (0, 0xf8, notifier::PBDMA_ERROR),
        (1, 0xffc, notifier::GR_ERROR),
        (4, 0x7fc, notifier::GR_ERROR),
    ] {
        let mut channel = Channel::new(&guest.device, EngineKind::Compute)?;
        let mut methods = Methods::new();
        methods.push(subchannel, method, &[0xdead]);
        let (got, _) = fault(channel.run(&methods));
        assert_eq!(got, code, "method {method:#x} on subchannel {subchannel}");
        works(&guest.device)?;
    }
    Ok(())
}

#[test]
fn garbage_in_the_ring_faults_the_channel() -> Result<()> {
    let (_parent, guest) = guest()?;
    let wait = |channel: &Channel| -> Result<(), GuestError> {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(5) {
            channel.check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    };
    let mut channel = Channel::new(&guest.device, EngineKind::Compute)?;
    channel.kick_raw(0xdead_beef);
    assert_eq!(fault(wait(&channel)).0, notifier::PBDMA_ERROR, "GP_PUT beyond the ring");

    let mut channel = Channel::new(&guest.device, EngineKind::Compute)?;
    channel.submit_raw(GpEntry::Segment { va: NOWHERE, dwords: 8 }.encode());
    assert_eq!(
        fault(wait(&channel)),
        (notifier::MMU_FAULT, NOWHERE),
        "no pushbuffer at the address"
    );

    let mut channel = Channel::new(&guest.device, EngineKind::Compute)?;
    channel.submit_raw(GpEntry::Control { opcode: 0x7f }.encode());
    assert_eq!(fault(wait(&channel)).0, notifier::PBDMA_ERROR, "unknown control entry");

    let noise = Buffer::guest(&guest.device, 4096)?;
    noise.store(0, &[0xdfff_ffffu32, 0, 0x1234_5678]);
    let mut channel = Channel::new(&guest.device, EngineKind::Compute)?;
    channel.submit_raw(GpEntry::Segment { va: noise.va(), dwords: 3 }.encode());
    fault(wait(&channel));
    works(&guest.device)
}

#[test]
fn a_bad_launch_faults_the_channel() -> Result<()> {
    let (_parent, guest) = guest()?;
    let device = &guest.device;
    let shape = Shape { grid: [1, 1, 1], block: [32, 1, 1] };
    let out = Buffer::guest(device, 4096)?;
    let parameters = mdev_core::abi::program::Spin { out: out.va(), iterations: 1, reserved: 0 };
    let launch = Launch::new(device, mdev_core::abi::program::Kernel::Spin, shape, &parameters)?;
    let good = launch.descriptor(shape);
    let bad = [
        ("an empty descriptor", qmd::Qmd::default()),
        ("another version", good.clone().with(qmd::QMD_MAJOR_VERSION, 9)),
        ("a program that is nowhere", good.clone().with(qmd::PROGRAM_ADDRESS_UPPER, 0xf0)),
        ("constants that are nowhere", good.clone().with(qmd::CONSTANT_BUFFER_ADDR_UPPER_0, 3)),
        ("no constants", good.clone().with(qmd::CONSTANT_BUFFER_SIZE_0, 0)),
        ("a program that is none", good.clone().with(qmd::PROGRAM_ADDRESS_LOWER, out.va() as u32)),
    ];
    for (what, descriptor) in bad {
        launch.set_descriptor(&descriptor);
        let mut channel = Channel::new(device, EngineKind::Compute)?;
        let mut methods = Methods::new();
        launch.push(&mut methods);
        let result = channel.run(&methods);
        let faulted = matches!(result, Err(GuestError::Channel { .. }));
        assert!(faulted, "{what}: {result:?}");
    }
    launch.set_descriptor(&good);
    works(device)
}

#[test]
fn an_endless_kernel_ends_with_its_channel() -> Result<()> {
    let (mut parent, guest) = guest()?;
    let other = parent.guest(Vgpu::default())?;
    let spin = Spin::new(&guest.device, u32::MAX)?;
    let mut channel = Channel::new(&guest.device, EngineKind::Compute)?;
    let mut methods = Methods::new();
    spin.push(&mut methods);
    let fence = channel.submit(&methods)?;
    works(&other.device)?;
    assert!(!channel.is_done(fence));
    drop(channel);
    works(&guest.device)?;
    works(&other.device)
}

#[test]
fn faults_of_one_vgpu_do_not_affect_another() -> Result<()> {
    let (mut parent, guest) = guest()?;
    let other = parent.guest(Vgpu::default())?;
    let load = Load { duration: Duration::from_secs(2), ..Load::default() };
    std::thread::scope(|scope| -> Result<()> {
        let bystander = scope.spawn(|| bench::run(&other.device, &load));
        let start = Instant::now();
        let mut faults = 0;
        while start.elapsed() < Duration::from_millis(1800) {
            let mut channel = Channel::new(&guest.device, EngineKind::Copy)?;
            let mut methods = Methods::new();
            copy::linear(&mut methods, NOWHERE, NOWHERE, 4096);
            fault(channel.run(&methods));
            faults += 1;
        }
        let measured = bystander.join().expect("the bystander should not panic")?;
        assert!(faults > 3, "{faults} faults");
        assert!(measured.units > 100 && measured.verified == measured.units, "{measured}");
        Ok(())
    })
}

#[test]
fn a_busy_channel_takes_no_exits() -> Result<()> {
    let (_parent, guest) = guest()?;
    let load = Load { duration: Duration::from_secs(1), ..Load::default() };
    let measured = bench::run(&guest.device, &load)?;
    assert_eq!(measured.wakes_while_busy, 0, "{measured}");
    assert!(u64::from(measured.trapped) <= measured.wakes, "{measured}");
    assert!(measured.wakes <= 3, "{measured}");
    assert_eq!(measured.verified, measured.units);
    Ok(())
}

#[test]
fn a_trapped_doorbell_works() -> Result<()> {
    let mut parent = Parent::start(128 * MIB)?;
    let guest = parent.guest(Vgpu { doorbell_mapped: false, ..Vgpu::default() })?;
    works(&guest.device)?;
    assert!(guest.device.trapped_doorbells() > 0);
    Ok(())
}

#[test]
fn reopening_a_device_discards_its_old_state() -> Result<()> {
    let (_parent, guest) = guest()?;
    let spin = Spin::new(&guest.device, u32::MAX)?;
    let mut channel = Channel::new(&guest.device, EngineKind::Compute)?;
    let mut methods = Methods::new();
    spin.push(&mut methods);
    channel.submit(&methods)?;
    // As after a kill of the process: nothing is torn down.
    std::mem::forget((spin, channel));
    let device = Device::open(Box::new(guest.platform.clone()))?;
    works(&device)
}
