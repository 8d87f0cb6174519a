//! A tenant whose processes hold the locks of its memory, so that each process that maps or touches
//! that memory waits.
//!
//! A punched hole holds the lock of a file's mappings while the kernel looks at each of them. The
//! tenant's processes have mapped one page of its memory some hundred thousand times.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mdev_core::abi::mailbox::Scatter;
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use serde_json::json;
use system_tests::Vgpud;
use system_tests::ram::Ram;
use system_tests::vfio_user_guest::VfioUserGuest;
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Home;
use vgpu_guest::work::{self, saxpy::Saxpy};

/// Processes of the tenant, and how often each of them maps the page. Linux allows 65,530 mappings.
const PROCESSES: usize = 16;
const MAPPINGS: usize = 60_000;
/// Bytes of a page.
const PAGE: i64 = 4096;

/// Processes that have mapped the first page of a file many times. They end with this.
struct Crowd(Vec<Pid>);

impl Crowd {
    fn new(file: &OwnedFd) -> Result<Self> {
        let mut crowd = Self(Vec::new());
        let (done, mapped) = nix::unistd::pipe()?;
        for _ in 0..PROCESSES {
            // SAFETY: the child makes system calls only, and never returns.
            match unsafe { fork()? } {
                ForkResult::Parent { child } => crowd.0.push(child),
                ForkResult::Child => map_and_wait(file, &mapped),
            }
        }
        for _ in 0..PROCESSES {
            nix::unistd::read(&done, &mut [0])?;
        }
        Ok(crowd)
    }
}

fn map_and_wait(file: &OwnedFd, mapped: &OwnedFd) -> ! {
    let len = PAGE as usize;
    let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
    for _ in 0..MAPPINGS {
        // SAFETY: a new mapping at an address of the kernel's choice.
        unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, file.as_raw_fd(), 0)
        };
    }
    // SAFETY: one byte from a buffer of one, then waits until it is killed.
    unsafe {
        libc::write(mapped.as_raw_fd(), [1_u8].as_ptr().cast(), 1);
        loop {
            libc::pause();
        }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for child in &self.0 {
            let _ = kill(*child, Signal::SIGKILL);
            let _ = waitpid(*child, None);
        }
    }
}

/// Punches holes until it is dropped.
struct Punching(Arc<AtomicBool>, Option<JoinHandle<Duration>>);

impl Punching {
    fn start(file: OwnedFd) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let mut longest = Duration::ZERO;
            while !stopped.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let _ = fallocate(&file, hole, 0, PAGE);
                longest = longest.max(begun.elapsed());
            }
            longest
        });
        Self(stop, Some(thread))
    }

    /// Ends. Returns how long a hole took at most.
    fn end(mut self) -> Result<Duration> {
        self.0.store(true, Ordering::Relaxed);
        let thread = self.1.take().context("It has ended")?;
        thread.join().map_err(|_| anyhow::anyhow!("The thread panicked"))
    }
}

impl Drop for Punching {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Lets a new VM of a vGPU import memory and work.
fn works(vgpud: &Vgpud, uuid: &str) -> Result<Duration> {
    let begun = Instant::now();
    let ram = Ram::new(16 * MIB, 64 * 1024)?;
    let device = Device::open(Box::new(VfioUserGuest::attach(&vgpud.vfio_socket(uuid), ram)?))?;
    let mut channel = Channel::new(&device, EngineKind::Compute)?;
    let saxpy = Saxpy::new(&device, Home::Guest, 1000)?;
    work::run(&saxpy, &mut channel)?;
    Ok(begun.elapsed())
}

#[test]
fn a_tenant_that_holds_its_memory_holds_no_other() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let create = || vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }));
    let (hostile, neighbour) = (create()?, create()?);
    let (gpu, context) = (vgpud.gpu_process()?, vgpud.context(&neighbour)?);
    let before = works(&vgpud, &neighbour)?;

    let ram = Ram::new(4 * MIB, 4 * MIB)?;
    let file = ram.fd().try_clone_to_owned()?;
    nix::unistd::write(&file, b"x")?;
    let platform = VfioUserGuest::attach(&vgpud.vfio_socket(&hostile), ram)?;
    let device = Device::open(Box::new(platform))?;
    let crowd = Crowd::new(&file)?;
    let punching = Punching::start(file.as_fd().try_clone_to_owned()?);
    thread::sleep(Duration::from_millis(50));
    let held = thread::spawn(move || {
        let begun = Instant::now();
        // The worker and the context map the memory anew.
        let mapped = device.map_guest(&[Scatter { address: Ram::BASE, length: MIB }], MIB);
        (begun.elapsed(), mapped.is_ok(), device)
    });
    let (mut longest, mut rounds) = (Duration::ZERO, 0);
    let begun = Instant::now();
    while rounds < 5 || begun.elapsed() < Duration::from_secs(3) {
        longest = longest.max(works(&vgpud, &neighbour)?);
        rounds += 1;
    }
    let started = Instant::now();
    let third = create().context("A start meanwhile")?;
    let started = started.elapsed();
    works(&vgpud, &third)?;
    let hole = punching.end()?;
    println!(
        "A hole takes {hole:?}; {rounds} VMs of the neighbour: {longest:?} each at most, \
              {before:?} before; a start: {started:?}"
    );
    ensure!(hole > Duration::from_millis(50), "the memory is not held: {hole:?}");
    ensure!(vgpud.gpu_process()? == gpu, "the GPU process was replaced");
    ensure!(vgpud.context(&neighbour)? == context, "the neighbour's context was replaced");
    ensure!(longest < before + Duration::from_millis(900), "{longest:?} for {before:?}");
    ensure!(started < Duration::from_secs(3), "a start took {started:?}");
    drop(crowd);
    let (waited, mapped, _device) = held.join().ok().context("The tenant's thread panicked")?;
    println!("The tenant's own map took {waited:?}, and succeeded: {mapped}");
    // The tenant's vGPU can be stopped.
    vgpud.call("POST", &format!("/v1/vgpus/{hostile}/stop"), Some(&json!({ "force": true })))?;
    works(&vgpud, &neighbour)?;
    Ok(())
}
