//! What a hostile guest gains on a real GPU: preemption by the driver, swapped pages, the gate.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mdev_core::abi::host::{GpEntry, sem};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::{copy, userd};
use mdev_core::gpu::{Backing, ChannelSpec, EngineKind, Gpu};
use mdev_core::ids::GpuVa;
use mdev_core::units::{GIB, MIB};
use nix::fcntl::{FallocateFlags, fallocate};
use vendor_backends::conformance::{Driver, Pushbuffer};
use vendor_backends::mem::Mapping;
use vendor_backends::nvidia::ctxsw_log::CtxswLog;
use vendor_backends::nvidia::device::{Device, cards};
use vendor_backends::nvidia::rm::{Node, Request, Rm, RmError, call};
use vendor_backends::nvidia::sys::abi::{Alloc, Call, Control, Preempt};
use vendor_backends::nvidia::sys::numbers::{class, control};
use vendor_backends::nvidia::version::Layout;
use vendor_backends::nvidia::{KernelDriver, NvidiaClient};
use zerocopy::{FromBytes, IntoBytes};

use super::{client, gpu, spec};

/// Real driver that remembers the channel groups of its clients: descriptor, client and handle.
#[derive(Debug, Default)]
struct GroupSpy(Mutex<Vec<(OwnedFd, u32, u32)>>);

impl Rm for GroupSpy {
    fn version(&self) -> io::Result<String> {
        KernelDriver.version()
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        KernelDriver.open(node)
    }

    fn ioctl(&self, fd: BorrowedFd<'_>, request: &mut Request<'_>) -> io::Result<()> {
        KernelDriver.ioctl(fd, request)?;
        if request.number == Alloc::NUMBER
            && let Ok((alloc, _)) = Alloc::read_from_prefix(request.argument)
            && alloc.class == class::GROUP
        {
            let group = (fd.try_clone_to_owned()?, alloc.root, alloc.object);
            self.0.lock().unwrap().push(group);
        }
        Ok(())
    }
}

impl GroupSpy {
    /// Preempts the last group. Without a timeout, does not wait.
    fn preempt(&self, timeout: Option<Duration>) -> Result<(), RmError> {
        let groups = self.0.lock().unwrap();
        let (fd, root, group) = groups.last().unwrap();
        let mut params = Preempt {
            wait: timeout.is_some().into(),
            manual_timeout: timeout.is_some().into(),
            timeout_us: timeout.map_or(0, |timeout| timeout.as_micros() as u32),
            ..Preempt::default()
        };
        let mut argument = Control {
            client: *root,
            object: *group,
            command: control::PREEMPT,
            params_bytes: size_of::<Preempt>() as u32,
            ..Default::default()
        };
        call(self, fd.as_fd(), &mut argument, Some(params.as_mut_bytes()), "preempt")
    }
}

/// Opens the context switch log of this process' user.
fn ctxsw_log() -> CtxswLog {
    let rm: Arc<dyn Rm> = Arc::new(KernelDriver);
    let layout = Layout::of(&rm.version().unwrap()).unwrap();
    let device = Device::open(rm.clone(), layout, &cards(&*rm).unwrap()[0]).unwrap();
    let (usermode, rm_client) = (device.usermode().unwrap(), &device.rm_client);
    let node = rm_client.gpu_node();
    let fd = rm_client.aperture(&device.device, &usermode, node, 4096, 0).unwrap();
    let clock = Mapping::new(fd.as_fd(), 0, 4096, true).unwrap();
    CtxswLog::open(&device, clock).unwrap()
}

/// A copy of `gib` GiB in one launch: the same MiB again and again.
fn long_copy(driver: &Driver, gib: u32) -> Pushbuffer {
    let (from, to) = (driver.va(12 * MIB), driver.va(24 * MIB));
    Pushbuffer::default()
        .addresses(from, to)
        .copy_method(copy::PITCH_IN, &[0, 0, 1 << 20, gib << 10])
        .launch(copy::launch::MULTI_LINE)
}

/// Prints what a preemption with a timeout returns, what it costs the channel, and what the log
/// shows: a timeout must leave the channel alive, and an idle context should leave the engine.
#[test]
fn a_group_is_preempted_with_a_timeout() {
    let Some(mut gpu) = gpu() else { return };
    let spy = Arc::new(GroupSpy::default());
    let admission = gpu.admit(&spec(GIB)).unwrap();
    let client = NvidiaClient::open(spy.clone(), admission.fd.unwrap()).unwrap();
    let mut driver = Driver::new(Box::new(client));
    let mut ring = driver.ring(EngineKind::Compute);
    let mut log = ctxsw_log();
    let mut show = |what: &str| {
        std::thread::sleep(Duration::from_millis(20));
        let records = log.read().unwrap();
        println!("{what}: {:?}", log.engine_time);
        for record in records {
            println!("    {record:?}");
        }
    };
    for timeout in [None, Some(Duration::from_millis(5)), Some(Duration::from_millis(125))] {
        show("before");
        let started = Instant::now();
        let done = spy.preempt(timeout);
        println!("idle context, timeout {timeout:?}: {done:?} in {:?}", started.elapsed());
        show("idle context preempted");
        driver.finish(&mut ring, Pushbuffer::default());
        for gib in [1, 16] {
            let push = long_copy(&driver, gib);
            let copied = driver.submit(&mut ring, push);
            std::thread::sleep(Duration::from_millis(2));
            show("while it copies");
            let started = Instant::now();
            let done = spy.preempt(timeout);
            println!("{gib} GiB copy, timeout {timeout:?}: {done:?} in {:?}", started.elapsed());
            show("copying context preempted");
            let completed = driver.wait_for(copied, Duration::from_secs(5));
            let status = driver.client().query_channel(ring.id()).unwrap();
            println!("    completed {completed} after {:?}, {status:?}", started.elapsed());
            if status.error != 0 {
                driver.destroy(ring);
                std::thread::sleep(Duration::from_secs(1));
                ring = driver.ring(EngineKind::Compute);
            }
        }
    }
}

/// A channel that is created behind a closed gate runs when the gate opens, and not before.
#[test]
fn a_channel_behind_a_closed_gate_does_not_run() {
    let Some(mut gpu) = gpu() else { return };
    let spec = spec(GIB);
    let admission = gpu.admit(&spec).unwrap();
    let client = NvidiaClient::open(Arc::new(KernelDriver), admission.fd.unwrap()).unwrap();
    let mut driver = Driver::new(Box::new(client));
    let mut first = driver.ring(EngineKind::Compute);
    for engine in [EngineKind::Compute, EngineKind::Copy] {
        gpu.set_gate(spec.vgpu, false).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let mut late = driver.bare_ring(engine);
        let done = driver.submit(&mut late, Pushbuffer::default());
        let gated = driver.submit(&mut first, Pushbuffer::default());
        assert!(!driver.wait_for(done, Duration::from_millis(200)), "{engine:?}: the new one");
        assert!(!driver.wait_for(gated, Duration::from_millis(1)), "{engine:?}: the old one");
        gpu.set_gate(spec.vgpu, true).unwrap();
        assert!(driver.wait_for(done, Duration::from_secs(1)), "{engine:?}: the new one");
        assert!(driver.wait_for(gated, Duration::from_secs(1)), "{engine:?}: the old one");
    }
}

/// A ring whose USERD page the VMM has replaced: the GPU keeps the page that it has pinned, and the
/// worker reads the new one. Prints what runs, and what is charged.
#[test]
fn a_swapped_userd_does_not_hide_work() {
    let Some(mut gpu) = gpu() else { return };
    let mut driver = Driver::new(client(&mut gpu, GIB));
    let (ram, memory) = driver.import(MIB);
    let va = VA_START + (1 << 36);
    driver.map(va, MIB, memory);
    let spec = ChannelSpec {
        engine: EngineKind::Compute,
        gpfifo: GpuVa(va),
        gpfifo_entries: 16,
        userd: Backing::Guest { memory, offset: 4096 },
        vector: 0,
    };
    let channel = driver.client().create_channel(&spec).unwrap();
    let semaphore = |number: u64| 0x3000 + number * 16;
    for number in 0..4 {
        let push = Pushbuffer::default().semaphore(va + semaphore(number), 1, sem::RELEASE);
        let bytes: Vec<u8> = push.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        ram.mapping.write(0x4000 + number * 256, &bytes).unwrap();
        let dwords = push.words().len() as u32;
        let entry = GpEntry::Segment { va: va + 0x4000 + number * 256, dwords };
        ram.mapping.store_u64(number * 8, entry.encode()).unwrap();
    }
    let ran = |number: u64| {
        std::thread::sleep(Duration::from_millis(100));
        ram.mapping.load_u32(semaphore(number)) == Some(1)
    };
    let put = |driver: &mut Driver, value: u32| {
        ram.mapping.store_u32(4096 + userd::GP_PUT, value).unwrap();
        driver.client().wake(channel.token).unwrap();
    };
    put(&mut driver, 1);
    assert!(ran(0), "the ring works");
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&ram.fd, hole, 4096, 4096).unwrap();
    put(&mut driver, 2);
    println!("the worker sees a new GP_PUT and the GPU the old one; runs: {}", ran(1));
    // The guest's own GPU work writes GP_PUT into the page that the GPU has pinned.
    let mut ring = driver.ring(EngineKind::Copy);
    let hidden = va + 4096 + userd::GP_PUT;
    driver.finish(&mut ring, Pushbuffer::default().semaphore(hidden, 3, sem::RELEASE));
    let without_a_ring = ran(2);
    println!("the GPU sees a new GP_PUT and no ring; runs: {without_a_ring}");
    put(&mut driver, 4);
    println!("after a ring for another GP_PUT; runs: {} {}", ran(1), ran(2));
    println!("GP_GET for the worker: {:?}", ram.mapping.load_u32(4096 + userd::GP_GET));
    println!("{:?}", driver.client().query_channel(channel.id));
    println!("charged: {:?}", gpu.usage());
    assert!(!without_a_ring, "work runs without a ring of the worker");
}
