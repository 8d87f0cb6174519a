//! Screenshots, limited by a vGPU's `refresh` and shared by concurrent requests.
//!
//! The host's cost of a screenshot is reading rows of video memory and encoding a PNG. `refresh`
//! limits this cost (see [`ReadoutLimiter`]). A request that comes too early waits for the next
//! screenshot, and all requests that wait by then get the same one: a thousand clients cost as much
//! as one.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use mdev_core::ids::VgpuId;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tokio::time::Instant;

use super::readout_limiter::{self, ReadoutLimiter, ScreenLimit};
use super::{screenshot, thumbnail};
use crate::blocking;
use crate::manager::{Result, Screen};
use vgpud_api::{ErrorCode, ErrorDetail};

/// Concurrent renderings. Each takes up to tens of megabytes.
const MAX_RENDERINGS: usize = 2;

/// Limit of the time in which a screenshot is rendered.
const RENDER_TIMEOUT: Duration = Duration::from_secs(5);

fn busy(id: VgpuId) -> ErrorDetail {
    let message = format!(
        "The screen of vGPU {id} cannot be read: its worker keeps an earlier reader waiting"
    );
    ErrorDetail::new(ErrorCode::Unavailable, message)
}

/// Screenshots of one size, for all vGPUs.
#[derive(Debug)]
pub struct SharedScreenshots {
    renderings: Semaphore,
    limiter: Arc<ReadoutLimiter>,
    /// [`RENDER_TIMEOUT`]; shorter in tests.
    render_timeout: Duration,
    screens: Mutex<HashMap<VgpuId, Arc<SharedScreenshot>>>,
}

impl SharedScreenshots {
    /// Creates screenshots that share `limiter` with all other readers of screens.
    pub fn new(limiter: Arc<ReadoutLimiter>) -> Self {
        Self {
            renderings: Semaphore::new(MAX_RENDERINGS),
            limiter,
            render_timeout: RENDER_TIMEOUT,
            screens: Mutex::default(),
        }
    }

    /// Returns a PNG of a screen, rendered after this call.
    pub async fn full_size(&self, id: VgpuId, screen: Screen) -> Result<Bytes> {
        self.take(id, screen, screenshot::take).await
    }

    /// Returns a small PNG of a screen, rendered after this call; empty if the screen is off.
    pub async fn thumbnail(&self, id: VgpuId, screen: Screen) -> Result<Bytes> {
        self.take(id, screen, thumbnail::take).await
    }

    async fn take(
        &self,
        id: VgpuId,
        screen: Screen,
        render: fn(&Path) -> Result<Vec<u8>>,
    ) -> Result<Bytes> {
        let shared = self.screen(id);
        let rendering = Arc::clone(&shared.rendering);
        let (limit, interval) =
            (self.limiter.screen(id), readout_limiter::interval(screen.refresh));
        let render = async move || {
            // The thread holds the screen until its end, and this request only until the time
            // limit.
            let Ok(screen_permit) = Arc::clone(&rendering).try_lock_owned() else {
                return Err(busy(id));
            };
            // The semaphore is never closed.
            let _permit = self.renderings.acquire().await;
            let rendered = blocking::run(move || {
                let _permit = screen_permit;
                render(&screen.control)
            });
            let rendered = tokio::time::timeout(self.render_timeout, rendered).await;
            rendered.map_err(|_| busy(id))??.map(Bytes::from)
        };
        shared.take(&limit, interval, render).await
    }

    fn screen(&self, id: VgpuId) -> Arc<SharedScreenshot> {
        let mut screens = self.screens.lock().unwrap_or_else(PoisonError::into_inner);
        screens.retain(|_, screen| {
            Arc::strong_count(screen) > 1 || Arc::strong_count(&screen.rendering) > 1
        });
        Arc::clone(screens.entry(id).or_default())
    }
}

/// Last screenshot of one screen, and the number of requests that wait.
#[derive(Debug, Default)]
struct SharedScreenshot {
    last: AsyncMutex<LastScreenshot>,
    /// Requests that wait for the lock.
    waiting: AtomicUsize,
    /// Held by the thread that renders, which a worker may keep waiting.
    rendering: Arc<AsyncMutex<()>>,
}

#[derive(Debug, Default)]
struct LastScreenshot {
    /// Start of the last rendering.
    started: Option<Instant>,
    /// Result of the last rendering, while other requests wait.
    png: Option<Bytes>,
}

impl SharedScreenshot {
    async fn take(
        &self,
        limit: &ScreenLimit,
        interval: Duration,
        render: impl AsyncFnOnce() -> Result<Bytes>,
    ) -> Result<Bytes> {
        let requested = Instant::now();
        let waiting = WaitingRequest::new(&self.waiting);
        let mut last = self.last.lock().await;
        drop(waiting);
        let is_newer = last.started.is_some_and(|started| started >= requested);
        let png = if let Some(png) = last.png.clone().filter(|_| is_newer) {
            png
        } else {
            limit.wait(interval).await;
            let started = Instant::now();
            let png = render().await?;
            last.started = Some(started);
            png
        };
        let others_wait = self.waiting.load(Ordering::Relaxed) > 0;
        last.png = others_wait.then(|| png.clone());
        Ok(png)
    }
}

/// Entry in the count of waiting requests; also removed when the request is cancelled.
struct WaitingRequest<'a>(&'a AtomicUsize);

impl<'a> WaitingRequest<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Renders the number of renderings so far.
    async fn number(count: &AtomicUsize) -> Result<Bytes> {
        tokio::task::yield_now().await;
        let number = count.fetch_add(1, Ordering::Relaxed);
        Ok(Bytes::from(number.to_string()))
    }

    #[test]
    fn renderings_keep_the_interval() {
        runtime().block_on(async {
            let (screen, limit) = (SharedScreenshot::default(), ScreenLimit::default());
            let count = AtomicUsize::new(0);
            let start = Instant::now();
            for expected in 0..4 {
                let png = screen.take(&limit, Duration::from_millis(30), || number(&count)).await;
                assert_eq!(png.unwrap(), expected.to_string());
            }
            assert!(start.elapsed() >= Duration::from_millis(90), "{:?}", start.elapsed());
            assert!(screen.last.lock().await.png.is_none(), "no request waits: no PNG is kept");
        });
    }

    #[test]
    fn waiting_requests_share_a_screenshot_newer_than_themselves() {
        runtime().block_on(async {
            let screen = Arc::new(SharedScreenshot::default());
            let (limit, count) = (Arc::new(ScreenLimit::default()), Arc::new(AtomicUsize::new(0)));
            let request = || {
                let (screen, limit) = (Arc::clone(&screen), Arc::clone(&limit));
                let count = Arc::clone(&count);
                tokio::spawn(async move {
                    screen.take(&limit, Duration::from_millis(20), || number(&count)).await.unwrap()
                })
            };
            assert_eq!(request().await.unwrap(), "0");
            let requests: Vec<_> = (0..500).map(|_| request()).collect();
            for request in requests {
                assert_eq!(request.await.unwrap(), "1");
            }
            assert_eq!(count.load(Ordering::Relaxed), 2, "500 requests, one rendering");
            assert_eq!(request().await.unwrap(), "2", "a later request gets a later screenshot");
            assert!(screen.last.lock().await.png.is_none());
        });
    }

    /// Renderings wait until this flag is set.
    static ANSWERS: AtomicBool = AtomicBool::new(false);

    #[test]
    fn worker_that_keeps_a_reader_waiting_costs_one_thread_and_no_other_screen() {
        let render = |_: &Path| {
            while !ANSWERS.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(Vec::new())
        };
        runtime().block_on(async {
            let mut screenshots = SharedScreenshots::new(Arc::default());
            screenshots.render_timeout = Duration::from_millis(50);
            let screen = || Screen { refresh: NonZeroU32::MAX, control: "/no-worker".into() };
            let (hostile, neighbour) = (VgpuId::random(), VgpuId::random());
            for _ in 0..2 * MAX_RENDERINGS {
                let error = screenshots.take(hostile, screen(), render).await.unwrap_err();
                let message = format!(
                    "The screen of vGPU {hostile} cannot be read: its worker keeps an earlier reader waiting"
                );
                assert_eq!((error.code, error.message), (ErrorCode::Unavailable, message));
            }
            let picture = |_: &Path| Ok(b"picture".to_vec());
            let png = screenshots.take(neighbour, screen(), picture).await.unwrap();
            assert_eq!(png, b"picture"[..], "a neighbour's screen has a permit");
            assert!(screenshots.take(hostile, screen(), picture).await.is_err(), "still blocked");
            ANSWERS.store(true, Ordering::Relaxed);
            while screenshots.take(hostile, screen(), picture).await.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    }

    #[test]
    fn cancelled_request_does_not_block_others() {
        runtime().block_on(async {
            let (screen, limit) = (SharedScreenshot::default(), ScreenLimit::default());
            let count = AtomicUsize::new(0);
            screen.take(&limit, Duration::ZERO, || number(&count)).await.unwrap();
            let long = screen.take(&limit, Duration::from_secs(3600), || number(&count));
            assert!(tokio::time::timeout(Duration::from_millis(5), long).await.is_err());
            screen.take(&limit, Duration::ZERO, || number(&count)).await.unwrap();
            assert_eq!(screen.waiting.load(Ordering::Relaxed), 0);
        });
    }
}
