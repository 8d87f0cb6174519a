//! Screens with viewers.
//!
//! One task reads a screen for all its viewers, and only while a viewer waits for an update: a
//! viewer that is slow, minimized or disconnected costs no reads. A viewer stays connected when its
//! vGPU stops, and sees the screen again after a start, as on a monitor that stays switched on.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::Duration;

use mdev_core::ids::VgpuId;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::read_pace::{ReadPace, Rows};
use super::readout::Readout;
use super::readout_limiter::{ReadoutLimiter, ScreenLimit};
use super::video_memory;
use crate::blocking;
use crate::manager::{Handle, Result, Screen};
use rfb::canvas::{Canvas, Rect};
use vgpud_api::{ErrorCode, ErrorDetail};

/// Maximum number of viewers of one screen.
const MAX_VIEWERS: usize = 8;

/// Maximum number of viewers of all screens. Each viewer can hold an update in memory, and each
/// screen its picture.
const MAX_VIEWERS_OF_ALL: usize = 32;

/// Concurrent encodings of updates. Each takes one core.
const MAX_ENCODINGS: usize = 2;

/// Delay after a request that the worker did not answer.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// All screens with viewers.
#[derive(Debug)]
pub struct LiveScreens {
    manager: Handle,
    limiter: Arc<ReadoutLimiter>,
    screens: Mutex<HashMap<VgpuId, Weak<LiveScreen>>>,
    viewers: Arc<Semaphore>,
    encodings: Arc<Semaphore>,
}

/// Screen with viewers.
#[derive(Debug)]
pub struct LiveScreen {
    canvas: RwLock<Canvas>,
    progress: watch::Sender<ReadProgress>,
    /// Number of viewers that wait for an update.
    waiting: AtomicUsize,
    /// Set by a viewer that waits for the whole screen.
    whole: AtomicBool,
    /// Set when a change is expected soon.
    active: AtomicBool,
    /// Wakes the reader.
    wake: Arc<Notify>,
    viewers: Arc<Semaphore>,
    encodings: Arc<Semaphore>,
}

/// Slot of one viewer, within the limits of viewers; released on drop.
#[derive(Debug)]
pub struct ViewerSlot {
    /// Screen that the viewer shows.
    pub screen: Arc<LiveScreen>,
    _permits: [OwnedSemaphorePermit; 2],
}

/// Results of the reads so far.
#[derive(Clone, Debug, Default)]
struct ReadProgress {
    /// Number of the last read that found a change; 0 before the first.
    last_change: u64,
    /// Start of the last read of the whole screen.
    whole_read: Option<Instant>,
    /// Error that ended the reader.
    ended: Option<ErrorDetail>,
}

impl LiveScreens {
    /// Creates the set of screens, without viewers.
    pub fn new(manager: Handle, limiter: Arc<ReadoutLimiter>) -> Self {
        Self {
            manager,
            limiter,
            screens: Mutex::default(),
            viewers: Arc::new(Semaphore::new(MAX_VIEWERS_OF_ALL)),
            encodings: Arc::new(Semaphore::new(MAX_ENCODINGS)),
        }
    }

    /// Adds a viewer to a vGPU's screen.
    pub async fn add_viewer(&self, id: VgpuId) -> Result<ViewerSlot> {
        // A vGPU without a screen is an error of the request, instead of a connection that ends at
        // once.
        self.manager.call(move |manager| manager.screen(id)).await??;
        let screen = self.screen(id);
        let full = |what: &str, limit: usize| {
            let message = format!("{what} already has {limit} viewers; close one first");
            ErrorDetail::new(ErrorCode::NoRoom, message)
        };
        let of_screen = Arc::clone(&screen.viewers).try_acquire_owned();
        let of_screen = of_screen.map_err(|_| full(&format!("vGPU {id}"), MAX_VIEWERS))?;
        let of_all = Arc::clone(&self.viewers).try_acquire_owned();
        let of_all = of_all.map_err(|_| full("This host", MAX_VIEWERS_OF_ALL))?;
        Ok(ViewerSlot { screen, _permits: [of_screen, of_all] })
    }

    /// Returns the screen of a vGPU. The first viewer starts its reader.
    fn screen(&self, id: VgpuId) -> Arc<LiveScreen> {
        let mut screens = self.screens.lock().unwrap_or_else(PoisonError::into_inner);
        screens.retain(|_, screen| screen.strong_count() > 0);
        let existing = screens.get(&id).and_then(Weak::upgrade);
        if let Some(screen) = existing.filter(|screen| screen.progress.borrow().ended.is_none()) {
            return screen;
        }
        let screen = Arc::new(LiveScreen {
            canvas: RwLock::new(Canvas::with_text("", 0, (0, 0))),
            progress: watch::Sender::default(),
            waiting: AtomicUsize::new(0),
            whole: AtomicBool::new(false),
            active: AtomicBool::new(false),
            wake: Arc::default(),
            viewers: Arc::new(Semaphore::new(MAX_VIEWERS)),
            encodings: Arc::clone(&self.encodings),
        });
        screens.insert(id, Arc::downgrade(&screen));
        let reader = ScreenReader {
            id,
            manager: self.manager.clone(),
            screen: Arc::downgrade(&screen),
            wake: Arc::clone(&screen.wake),
            limit: self.limiter.screen(id),
            pace: ReadPace::new(Instant::now()),
            read_number: 0,
            mode: None,
            shown_text: None,
        };
        tokio::spawn(reader.run());
        screen
    }
}

impl LiveScreen {
    /// Locks the picture. Hold the lock only while an update is encoded.
    pub fn canvas(&self) -> RwLockReadGuard<'_, Canvas> {
        self.canvas.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `body` with the picture on a blocking thread, within the limit of concurrent encodings.
    pub async fn encode<T: Send + 'static>(
        self: &Arc<Self>,
        body: impl FnOnce(&Canvas) -> T + Send + 'static,
    ) -> Result<T> {
        // The semaphore is never closed.
        let _permit = self.encodings.acquire().await;
        let screen = Arc::clone(self);
        blocking::run(move || body(&screen.canvas())).await
    }

    /// Waits for a change after the read with number `seen`.
    pub async fn changed_since(&self, seen: u64) -> Result<()> {
        self.wait_until(|progress| progress.last_change > seen).await
    }

    /// Waits until the whole screen has been read after this call.
    pub async fn whole_read(&self) -> Result<()> {
        let called = Instant::now();
        self.whole.store(true, Ordering::Relaxed);
        self.wait_until(|progress| progress.whole_read.is_some_and(|read| read >= called)).await
    }

    /// Notes that a change is likely soon, for example after a key press.
    pub fn expect_change(&self) {
        self.active.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }

    async fn wait_until(&self, condition: impl Fn(&ReadProgress) -> bool) -> Result<()> {
        let mut progress = self.progress.subscribe();
        let _waiting = WaitingViewer::new(self);
        let found = progress.wait_for(|p| condition(p) || p.ended.is_some()).await;
        match found.ok().and_then(|progress| progress.ended.clone()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for LiveScreen {
    fn drop(&mut self) {
        // The reader finds that the screen is dropped, and ends.
        self.wake.notify_one();
    }
}

/// Entry in the count of waiting viewers, which keeps the reader reading; also removed when the
/// wait is cancelled.
struct WaitingViewer<'a>(&'a LiveScreen);

impl<'a> WaitingViewer<'a> {
    fn new(screen: &'a LiveScreen) -> Self {
        screen.waiting.fetch_add(1, Ordering::Relaxed);
        screen.wake.notify_one();
        Self(screen)
    }
}

impl Drop for WaitingViewer<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Reader of one screen, for all its viewers.
struct ScreenReader {
    id: VgpuId,
    manager: Handle,
    screen: Weak<LiveScreen>,
    wake: Arc<Notify>,
    limit: Arc<ScreenLimit>,
    pace: ReadPace,
    read_number: u64,
    mode: Option<KnownMode>,
    /// Text that the screen shows in place of a picture.
    shown_text: Option<String>,
}

/// Location of the screen in video memory, with the time of the request for it.
struct KnownMode {
    requested: Instant,
    readout: Arc<Readout>,
}

impl ScreenReader {
    async fn run(mut self) {
        loop {
            let Some(screen) = self.screen.upgrade() else { return };
            let now = Instant::now();
            if screen.active.swap(false, Ordering::Relaxed) {
                self.pace.set_active(now);
            }
            let wanted = screen.waiting.load(Ordering::Relaxed) > 0;
            let whole = screen.whole.load(Ordering::Relaxed);
            let due = self.pace.next_read(now, whole);
            if !wanted {
                drop(screen);
                self.wake.notified().await;
            } else if due > now {
                drop(screen);
                // A wake-up can make the next read due earlier.
                let _ = timeout_at(due, self.wake.notified()).await;
            } else {
                screen.whole.store(false, Ordering::Relaxed);
                let rows = self.pace.start_read(now, whole);
                if let Err(error) = self.read(&screen, now, rows).await {
                    screen.progress.send_modify(|progress| progress.ended = Some(error));
                    return;
                }
            }
        }
    }

    /// Reads the screen once. Errors that can pass are shown on the screen. A returned error ends
    /// the reader.
    async fn read(&mut self, screen: &Arc<LiveScreen>, now: Instant, rows: Rows) -> Result<()> {
        let known = self.mode.as_ref().filter(|mode| {
            let age = now.saturating_duration_since(mode.requested);
            rows != Rows::ALL && age < self.pace.mode_lifetime(now)
        });
        let readout = match known {
            Some(mode) => Ok(Arc::clone(&mode.readout)),
            None => self.request_mode(now).await?,
        };
        self.read_number += 1;
        let number = self.read_number;
        let found = match readout {
            Err(text) => Err(text),
            Ok(readout) => {
                self.limit.wait(self.pace.min_interval()).await;
                let screen = Arc::clone(screen);
                let read =
                    blocking::run(move || read_rows(&screen, &readout, rows, number)).await?;
                read.map_err(|error| format!("The screen cannot be read: {error}"))
            }
        };
        self.pace.set_blank(found.is_err());
        let whole = match found {
            Ok(RowsRead { changed, whole }) => {
                self.shown_text = None;
                if changed {
                    self.pace.set_active(now);
                }
                whole
            }
            Err(text) => {
                self.mode = None;
                self.show_text(screen, text);
                true
            }
        };
        let last_change = screen.canvas().last_change();
        screen.progress.send_modify(|progress| {
            progress.last_change = last_change;
            if whole {
                progress.whole_read = Some(now);
            }
        });
        Ok(())
    }

    /// Replaces the picture by a text, unless the screen shows this text already.
    fn show_text(&mut self, screen: &LiveScreen, text: String) {
        if self.shown_text.as_ref() != Some(&text) {
            let mut canvas = screen.canvas.write().unwrap_or_else(PoisonError::into_inner);
            let Rect { width, height, .. } = canvas.whole();
            *canvas = Canvas::with_text(&text, self.read_number, (width, height));
            self.shown_text = Some(text);
        }
    }

    /// Requests the location of the screen from the worker. The inner error is the text to show
    /// without a screen.
    async fn request_mode(
        &mut self,
        now: Instant,
    ) -> Result<std::result::Result<Arc<Readout>, String>> {
        let id = self.id;
        let screen = self.manager.call(move |manager| manager.screen(id)).await?;
        let Screen { control, refresh } = match screen {
            Ok(screen) => screen,
            Err(error) if error.code == ErrorCode::NotFound => {
                return Ok(Err("The vGPU is gone".to_owned()));
            }
            // A stopped vGPU can start again.
            Err(_) => return Ok(Err("No signal".to_owned())),
        };
        self.pace.set_refresh(refresh);
        Ok(match blocking::run(move || request_readout(control)).await? {
            Ok(Some(readout)) => {
                let readout = Arc::new(readout);
                self.mode = Some(KnownMode { requested: now, readout: Arc::clone(&readout) });
                Ok(readout)
            }
            Ok(None) => {
                Err("The screen is off\nThe VM may start on another display adapter".to_owned())
            }
            Err(error) => {
                log::debug!("The screen of vGPU {id}: {error}");
                sleep_until(now + RETRY_DELAY).await;
                Err("The vGPU does not answer".to_owned())
            }
        })
    }
}

/// Requests the location of a worker's screen; `None` while the screen is off.
fn request_readout(control: PathBuf) -> io::Result<Option<Readout>> {
    let (scanout, memory) = video_memory::locate(&control)?;
    drop(control);
    match memory {
        Some(memory) if scanout.enabled => Readout::new(&scanout, memory).map(Some),
        _ => Ok(None),
    }
}

/// Result of a read.
struct RowsRead {
    changed: bool,
    /// Whether all rows were read.
    whole: bool,
}

/// Reads some rows into the picture, or all rows if one of them has changed.
fn read_rows(
    screen: &LiveScreen,
    readout: &Readout,
    rows: Rows,
    number: u64,
) -> io::Result<RowsRead> {
    let mut canvas = screen.canvas.write().unwrap_or_else(PoisonError::into_inner);
    let shape = readout.shape();
    let new_shape = canvas.shape() != shape;
    if new_shape {
        *canvas = Canvas::new(shape, number);
    }
    let mut row = vec![0; shape.row_bytes()];
    let mut read = |canvas: &mut Canvas, rows: Rows| -> io::Result<bool> {
        let mut changed = false;
        for y in (rows.first..shape.height).step_by(rows.step as usize) {
            readout.read_row(y, &mut row)?;
            changed |= canvas.put_row(y, &row, number);
        }
        Ok(changed)
    };
    let mut whole = rows == Rows::ALL;
    let mut changed = new_shape | read(&mut canvas, rows)?;
    if changed && !whole {
        changed |= read(&mut canvas, Rows::ALL)?;
        whole = true;
    }
    Ok(RowsRead { changed, whole })
}
