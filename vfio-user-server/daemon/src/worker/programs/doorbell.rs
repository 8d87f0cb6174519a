//! Wake-up of the engine for programs.
//!
//! libcuda writes a channel's token to the doorbell page and never looks whether the engine sleeps.
//! A thread looks at the page instead, and wakes the engine of a vGPU whose programs have rung. The
//! engine then looks at all channels of the vGPU, so one word suffices for all of them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::{self, JoinHandle};
use std::time::Duration;

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
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
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
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        page.store_u32(TOKEN, SEEN);
        let thread = thread::Builder::new().name("cuda-doorbell".into()).spawn(move || {
            let mut pause = SHORTEST;
            while !stopped.load(Ordering::Relaxed) {
                if page.load_u32(TOKEN) == Some(SEEN) {
                    thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST);
                    continue;
                }
                // Before the wake-up: a ring in between is then seen by the engine.
                page.store_u32(TOKEN, SEEN);
                fence(Ordering::SeqCst);
                // A full counter wakes as well.
                let _ = nix::unistd::write(&wake, &1_u64.to_ne_bytes());
                pause = SHORTEST;
            }
        })?;
        Ok(Some(Self { stop, thread: Some(thread) }))
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic was logged already.
            let _ = thread.join();
        }
    }
}
