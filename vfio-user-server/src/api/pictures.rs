//! How often a screen is read out.
//!
//! A guest draws into memory that it has mapped, which costs the host nothing, and its display adapter has no vertical
//! blank to be paced by. What costs is to read a picture out: rows of video memory, and a PNG of them. So that is what a
//! vGPU's `refresh` limits (see [`Turns`]). Whoever asks sooner than it allows waits for the next picture, and all who wait
//! by then get the same one: a thousand viewers cost what one does.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use mdev_core::ids::VgpuId;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tokio::time::Instant;

use super::screenshot;
use super::service::waiting;
use crate::console::turns::{self, Turn, Turns};
use crate::manager::{Result, Screen};

/// Pictures that are rendered at the same time: each may take tens of megabytes.
const MAX_AT_ONCE: usize = 2;

/// Pictures of one kind.
#[derive(Debug)]
pub struct Pictures {
    at_once: Semaphore,
    turns: Arc<Turns>,
    screens: Mutex<HashMap<VgpuId, Arc<Paced>>>,
}

impl Pictures {
    /// Pictures that take turns with all else that reads screens.
    pub fn new(turns: Arc<Turns>) -> Self {
        Self { at_once: Semaphore::new(MAX_AT_ONCE), turns, screens: Mutex::default() }
    }

    /// A picture of a screen that is not older than this call.
    pub async fn take(&self, id: VgpuId, screen: Screen) -> Result<Bytes> {
        self.take_with(id, screen, screenshot::take).await
    }

    /// The same, of a kind of its own: by what makes it out of what a worker says.
    pub async fn take_with(
        &self,
        id: VgpuId,
        screen: Screen,
        make: fn(&Path) -> Result<Vec<u8>>,
    ) -> Result<Bytes> {
        let paced = self.paced(id);
        let (turn, pause) = (self.turns.of(id), turns::pause(screen.refresh));
        let render = async move || {
            // It is never closed.
            let _permit = self.at_once.acquire().await;
            waiting(move || make(&screen.control)).await?.map(Bytes::from)
        };
        paced.take(&turn, pause, render).await
    }

    /// One for each screen that somebody looks at.
    fn paced(&self, id: VgpuId) -> Arc<Paced> {
        let mut screens = self.screens.lock().unwrap_or_else(PoisonError::into_inner);
        screens.retain(|_, paced| Arc::strong_count(paced) > 1);
        Arc::clone(screens.entry(id).or_default())
    }
}

/// One screen.
#[derive(Debug, Default)]
struct Paced {
    last: AsyncMutex<Last>,
    /// Who waits for the lock.
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Last {
    /// When the last picture was begun.
    begun: Option<Instant>,
    /// That picture, while somebody else waits.
    picture: Option<Bytes>,
}

impl Paced {
    async fn take(
        &self,
        turn: &Turn,
        pause: Duration,
        render: impl AsyncFnOnce() -> Result<Bytes>,
    ) -> Result<Bytes> {
        let asked = Instant::now();
        let waits = Waits::new(&self.waiting);
        let mut last = self.last.lock().await;
        drop(waits);
        let shared = last.begun.is_some_and(|begun| begun >= asked);
        let picture = if let Some(picture) = last.picture.clone().filter(|_| shared) {
            picture
        } else {
            turn.take(pause).await;
            let begun = Instant::now();
            let picture = render().await?;
            last.begun = Some(begun);
            picture
        };
        let wanted = self.waiting.load(Ordering::Relaxed) > 0;
        last.picture = wanted.then(|| picture.clone());
        Ok(picture)
    }
}

/// Counts itself among those who wait, whether or not they wait to the end.
struct Waits<'a>(&'a AtomicUsize);

impl<'a> Waits<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// Renders nothing but the number of pictures so far.
    async fn number(count: &AtomicUsize) -> Result<Bytes> {
        tokio::task::yield_now().await;
        let number = count.fetch_add(1, Ordering::Relaxed);
        Ok(Bytes::from(number.to_string()))
    }

    #[test]
    fn pictures_come_no_more_often_than_they_may() {
        runtime().block_on(async {
            let (screen, turn, count) = (Paced::default(), Turn::default(), AtomicUsize::new(0));
            let started = Instant::now();
            for expected in 0..4 {
                let picture =
                    screen.take(&turn, Duration::from_millis(30), || number(&count)).await;
                assert_eq!(picture.unwrap(), expected.to_string());
            }
            assert!(started.elapsed() >= Duration::from_millis(90), "{:?}", started.elapsed());
            assert!(screen.last.lock().await.picture.is_none(), "nobody waits: none is kept");
        });
    }

    #[test]
    fn all_who_wait_get_one_picture_taken_after_they_asked() {
        runtime().block_on(async {
            let (screen, count) = (Arc::new(Paced::default()), Arc::new(AtomicUsize::new(0)));
            let turn = Arc::new(Turn::default());
            let ask = || {
                let (screen, turn) = (Arc::clone(&screen), Arc::clone(&turn));
                let count = Arc::clone(&count);
                tokio::spawn(async move {
                    screen.take(&turn, Duration::from_millis(20), || number(&count)).await.unwrap()
                })
            };
            assert_eq!(ask().await.unwrap(), "0");
            let crowd: Vec<_> = (0..500).map(|_| ask()).collect();
            for viewer in crowd {
                assert_eq!(viewer.await.unwrap(), "1");
            }
            assert_eq!(count.load(Ordering::Relaxed), 2, "500 viewers, one picture");
            assert_eq!(ask().await.unwrap(), "2", "and who comes later gets a later one");
            assert!(screen.last.lock().await.picture.is_none());
        });
    }

    #[test]
    fn who_gives_up_keeps_nobody_waiting() {
        runtime().block_on(async {
            let (screen, turn, count) = (Paced::default(), Turn::default(), AtomicUsize::new(0));
            screen.take(&turn, Duration::ZERO, || number(&count)).await.unwrap();
            let long = screen.take(&turn, Duration::from_secs(3600), || number(&count));
            assert!(tokio::time::timeout(Duration::from_millis(5), long).await.is_err());
            screen.take(&turn, Duration::ZERO, || number(&count)).await.unwrap();
            assert_eq!(screen.waiting.load(Ordering::Relaxed), 0);
        });
    }
}
