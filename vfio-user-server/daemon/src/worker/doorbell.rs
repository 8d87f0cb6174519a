//! Wake-up of the engine for programs.
//!
//! libcuda writes a channel's token to the doorbell page and never looks whether the engine sleeps.
//! A thread looks at the page instead, and wakes the engine of a vGPU whose programs have rung. The
//! engine then looks at all channels of the vGPU, so one word suffices for all of them.
//!
//! When no program has the page, as in a VM that withdraws it, the thread sleeps until it is told
//! that programs have the page again.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::Duration;

use anyhow::{Context, Result};
use ipc::mem::Mapping;
use mdev_core::abi::doorbell::{PAGE_BYTES, TOKEN};
use mdev_core::gpu::{Client, DoorbellWatch};
use programs::ring_clock::RingClock;

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
    thread: OnceLock<Thread>,
    clock: RingClock,
}

impl DoorbellWatch for Watch {
    fn quiet_for(&self) -> Duration {
        self.clock.quiet_for()
    }

    fn pause(&self) {
        self.asleep.store(true, Ordering::SeqCst);
    }

    fn resume(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.clock.note_ring();
            if let Some(thread) = self.thread.get() {
                thread.unpark();
            }
        }
    }
}

impl Watch {
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
            self.clock.note_ring();
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
            thread: OnceLock::new(),
            clock: RingClock::default(),
        });
        page.store_u32(TOKEN, SEEN);
        let shared = Arc::clone(&watch);
        let thread = thread::Builder::new().name("cuda-doorbell".into());
        let thread = thread.spawn(move || shared.run(&page, &wake))?;
        let _ = watch.thread.set(thread.thread().clone());
        Ok(Some(Self { watch, thread: Some(thread) }))
    }

    /// Returns the watch of the page.
    pub fn watch(&self) -> Arc<dyn DoorbellWatch> {
        Arc::clone(&self.watch) as _
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
