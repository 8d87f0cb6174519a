//! Wake-up of the engine for programs.
//!
//! libcuda writes a channel's token to the doorbell page and never looks whether the engine sleeps.
//! A thread looks at the page instead, and wakes the engine of a vGPU whose programs have rung. The
//! engine then looks at all channels of the vGPU, so one word suffices for all of them.
//!
//! When no program has the page, as in a VM that withdraws it, the thread sleeps until it is told that
//! programs have the page again.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mdev_core::abi::doorbell::{PAGE_BYTES, TOKEN};
use mdev_core::gpu::Client;
use vendor_backends::mem::Mapping;

/// Value of the word after it was seen. No channel has this token.
const SEEN: u32 = u32::MAX;

/// Shortest and longest pause between two looks. The pause doubles while nothing is rung.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// Thread that watches the doorbell page. It ends when this is dropped.
#[derive(Debug)]
pub struct Doorbell {
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

/// State of the watching thread.
#[derive(Debug)]
struct Watch {
    stopped: AtomicBool,
    asleep: AtomicBool,
    start: Instant,
    /// Time of the last ring since the start, in nanoseconds.
    last_ring: AtomicU64,
}

/// Ends the sleep of a [`Doorbell`]'s thread.
#[derive(Clone, Debug)]
pub struct Waker {
    watch: Arc<Watch>,
    thread: Thread,
}

impl Waker {
    /// Watches the page again. Does not wait.
    pub fn wake(&self) {
        if self.watch.asleep.swap(false, Ordering::SeqCst) {
            self.watch.note_ring();
            self.thread.unpark();
        }
    }
}

impl Watch {
    fn note_ring(&self) {
        self.last_ring.store(self.start.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// Watches the page until the thread is to end.
    fn run(&self, page: &Mapping, wake: &OwnedFd) {
        let mut pause = SHORTEST;
        while !self.stopped.load(Ordering::Relaxed) {
            if page.load_u32(TOKEN) == Some(SEEN) {
                if self.asleep.load(Ordering::SeqCst) {
                    thread::park();
                } else {
                    thread::sleep(pause);
                }
                pause = (pause * 2).min(LONGEST);
                continue;
            }
            // Before the wake-up: a ring in between is then seen by the engine.
            page.store_u32(TOKEN, SEEN);
            fence(Ordering::SeqCst);
            // A full counter wakes as well.
            let _ = nix::unistd::write(wake, &1_u64.to_ne_bytes());
            self.note_ring();
            pause = SHORTEST;
        }
    }
}

/// Returns the doorbell page's file and its offset there.
pub fn page(client: &mut dyn Client) -> io::Result<(OwnedFd, u64)> {
    let missing = || io::Error::from(io::ErrorKind::Unsupported);
    let aperture = client.apertures().doorbell.as_ref().ok_or_else(missing)?;
    Ok((aperture.fd.try_clone()?, aperture.offset))
}

impl Doorbell {
    /// Starts to watch the doorbell page of a client. `None` if its engine needs no wake-up.
    pub fn start(client: &mut dyn Client) -> Result<Option<Self>> {
        let (page, offset) = page(client).context("It cannot be mapped")?;
        let page = Mapping::new(std::os::fd::AsFd::as_fd(&page), offset, PAGE_BYTES, true)?;
        let Some(wake) = client.wake_event() else { return Ok(None) };
        let wake = wake.try_clone_to_owned()?;
        let watch = Arc::new(Watch {
            stopped: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            start: Instant::now(),
            last_ring: AtomicU64::new(0),
        });
        page.store_u32(TOKEN, SEEN);
        let shared = Arc::clone(&watch);
        let thread = thread::Builder::new().name("cuda-doorbell".into());
        let thread = thread.spawn(move || shared.run(&page, &wake))?;
        Ok(Some(Self { watch, thread: Some(thread) }))
    }

    /// Returns the time since the last ring, or since the page was last given back.
    pub fn quiet_for(&self) -> Duration {
        let last = Duration::from_nanos(self.watch.last_ring.load(Ordering::Relaxed));
        self.watch.start.elapsed().saturating_sub(last)
    }

    /// Lets the thread sleep after another look: no program has the page.
    pub fn sleep(&self) {
        self.watch.asleep.store(true, Ordering::SeqCst);
    }

    /// Returns what ends the sleep.
    pub fn waker(&self) -> Option<Waker> {
        let thread = self.thread.as_ref()?.thread().clone();
        Some(Waker { watch: Arc::clone(&self.watch), thread })
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        self.watch.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic was logged already.
            let _ = thread.join();
        }
    }
}
