//! Who looks at which screen.
//!
//! However many viewers a screen has, one task looks at it for all of them, and only while one of them waits for news:
//! a viewer that is slow, minimized or gone costs no look. Who watches a vGPU goes on to when it is stopped, and sees it
//! again when it is started, as on a monitor that stays switched on.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::Duration;

use mdev_core::ids::VgpuId;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::canvas::{Canvas, Rect};
use super::pace::{Pace, Rows};
use super::readout::Readout;
use super::turns::{Turn, Turns};
use crate::api::model::{ErrorCode, ErrorDetail};
use crate::manager::{Handle, Result, Screen, ask};

/// Viewers of one screen.
const MAX_VIEWERS: usize = 8;

/// Viewers of all screens. Each may hold an update in memory, and each screen its picture.
const MAX_ALL: usize = 32;

/// Updates that are encoded at the same time: each takes a core.
const MAX_ENCODING: usize = 2;

/// Pause before a worker that did not answer is asked again.
const TROUBLE: Duration = Duration::from_secs(1);

/// The screens that are watched.
#[derive(Debug)]
pub struct Screens {
    manager: Handle,
    turns: Arc<Turns>,
    watched: Mutex<HashMap<VgpuId, Weak<Watched>>>,
    all: Arc<Semaphore>,
    encoding: Arc<Semaphore>,
}

/// A screen with viewers.
#[derive(Debug)]
pub struct Watched {
    canvas: RwLock<Canvas>,
    looked: watch::Sender<Looked>,
    waiting: AtomicUsize,
    whole: AtomicBool,
    stirred: AtomicBool,
    wake: Arc<Notify>,
    viewers: Arc<Semaphore>,
    encoding: Arc<Semaphore>,
}

/// A viewer's right to look, until it is dropped.
#[derive(Debug)]
pub struct Seat {
    /// What it looks at.
    pub screen: Arc<Watched>,
    _permits: [OwnedSemaphorePermit; 2],
}

/// What came of looking so far.
#[derive(Clone, Debug, Default)]
struct Looked {
    /// The number of the last look that found a change; 0 before the first.
    change: u64,
    /// When the last look at all of it began.
    whole: Option<Instant>,
    /// Why there will be no other.
    ended: Option<ErrorDetail>,
}

impl Screens {
    /// None yet.
    pub fn new(manager: Handle, turns: Arc<Turns>) -> Self {
        Self {
            manager,
            turns,
            watched: Mutex::default(),
            all: Arc::new(Semaphore::new(MAX_ALL)),
            encoding: Arc::new(Semaphore::new(MAX_ENCODING)),
        }
    }

    /// Begins to watch a vGPU's screen.
    pub async fn watch(&self, id: VgpuId) -> Result<Seat> {
        // Refused here rather than by a connection that ends at once.
        self.manager.call(move |manager| manager.screen(id)).await??;
        let screen = self.screen(id);
        let full = |what: &str, most: usize| {
            let what = format!("{most} viewers look at {what} already; close one first");
            ErrorDetail::new(ErrorCode::NoRoom, what)
        };
        let seat = Arc::clone(&screen.viewers).try_acquire_owned();
        let seat = seat.map_err(|_| full(&format!("vGPU {id}"), MAX_VIEWERS))?;
        let place = Arc::clone(&self.all).try_acquire_owned();
        let place = place.map_err(|_| full("this host's screens", MAX_ALL))?;
        Ok(Seat { screen, _permits: [seat, place] })
    }

    fn screen(&self, id: VgpuId) -> Arc<Watched> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|_, screen| screen.strong_count() > 0);
        let there = watched.get(&id).and_then(Weak::upgrade);
        if let Some(screen) = there.filter(|screen| screen.looked.borrow().ended.is_none()) {
            return screen;
        }
        let screen = Arc::new(Watched {
            canvas: RwLock::new(Canvas::saying("", 0, (0, 0))),
            looked: watch::Sender::default(),
            waiting: AtomicUsize::new(0),
            whole: AtomicBool::new(false),
            stirred: AtomicBool::new(false),
            wake: Arc::default(),
            viewers: Arc::new(Semaphore::new(MAX_VIEWERS)),
            encoding: Arc::clone(&self.encoding),
        });
        watched.insert(id, Arc::downgrade(&screen));
        let looker = Looker {
            id,
            manager: self.manager.clone(),
            screen: Arc::downgrade(&screen),
            wake: Arc::clone(&screen.wake),
            turn: self.turns.of(id),
            pace: Pace::new(Instant::now()),
            look: 0,
            mode: None,
            said: None,
        };
        tokio::spawn(looker.run());
        screen
    }
}

impl Watched {
    /// The picture. Not to be held for longer than it takes to encode it.
    pub fn canvas(&self) -> RwLockReadGuard<'_, Canvas> {
        self.canvas.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs what takes a core for a while on a thread for such.
    pub async fn encode<T: Send + 'static>(
        self: &Arc<Self>,
        body: impl FnOnce(&Canvas) -> T + Send + 'static,
    ) -> Result<T> {
        // It is never closed.
        let _permit = self.encoding.acquire().await;
        let screen = Arc::clone(self);
        tokio::task::spawn_blocking(move || body(&screen.canvas()))
            .await
            .map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))
    }

    /// Waits until something has changed since the look of this number.
    pub async fn news(&self, seen: u64) -> Result<()> {
        self.until(|looked| looked.change > seen).await
    }

    /// Waits until all of it has been looked at since this was called.
    pub async fn fresh(&self) -> Result<()> {
        let asked = Instant::now();
        self.whole.store(true, Ordering::Relaxed);
        self.until(|looked| looked.whole.is_some_and(|begun| begun >= asked)).await
    }

    /// Something is about to change: a key was pressed.
    pub fn stir(&self) {
        self.stirred.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }

    async fn until(&self, holds: impl Fn(&Looked) -> bool) -> Result<()> {
        let mut looked = self.looked.subscribe();
        let _waits = Waits::new(self);
        let found = looked.wait_for(|looked| holds(looked) || looked.ended.is_some()).await;
        match found.ok().and_then(|looked| looked.ended.clone()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // The looker sees that it is gone, and goes too.
        self.wake.notify_one();
    }
}

/// Makes the looker look, whether or not it waits to the end.
struct Waits<'a>(&'a Watched);

impl<'a> Waits<'a> {
    fn new(screen: &'a Watched) -> Self {
        screen.waiting.fetch_add(1, Ordering::Relaxed);
        screen.wake.notify_one();
        Self(screen)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What looks at a screen for all its viewers.
struct Looker {
    id: VgpuId,
    manager: Handle,
    screen: Weak<Watched>,
    wake: Arc<Notify>,
    turn: Arc<Turn>,
    pace: Pace,
    look: u64,
    mode: Option<Mode>,
    said: Option<String>,
}

/// Where the screen was when the worker was asked.
struct Mode {
    asked: Instant,
    readout: Arc<Readout>,
}

impl Looker {
    async fn run(mut self) {
        loop {
            let Some(screen) = self.screen.upgrade() else { return };
            let now = Instant::now();
            if screen.stirred.swap(false, Ordering::Relaxed) {
                self.pace.stir(now);
            }
            let wanted = screen.waiting.load(Ordering::Relaxed) > 0;
            let whole = screen.whole.load(Ordering::Relaxed);
            let due = self.pace.due(now, whole);
            if !wanted {
                drop(screen);
                self.wake.notified().await;
            } else if due > now {
                drop(screen);
                // What wakes it may make it due earlier.
                let _ = timeout_at(due, self.wake.notified()).await;
            } else {
                screen.whole.store(false, Ordering::Relaxed);
                let rows = self.pace.begin(now, whole);
                if let Err(error) = self.look(&screen, now, rows).await {
                    screen.looked.send_modify(|looked| looked.ended = Some(error));
                    return;
                }
            }
        }
    }

    /// Looks once. An error is the end of it, and of vgpud; what can get better is said on the screen.
    async fn look(&mut self, screen: &Arc<Watched>, now: Instant, rows: Rows) -> Result<()> {
        let known = self.mode.as_ref().filter(|mode| {
            let age = now.saturating_duration_since(mode.asked);
            rows != Rows::ALL && age < self.pace.mode_for(now)
        });
        let readout = match known {
            Some(mode) => Ok(Arc::clone(&mode.readout)),
            None => self.ask(now).await?,
        };
        self.look += 1;
        let look = self.look;
        let seen = match readout {
            Err(what) => Err(what),
            Ok(readout) => {
                self.turn.take(self.pace.shortest()).await;
                let screen = Arc::clone(screen);
                let read = move || read(&screen, &readout, rows, look);
                let done = tokio::task::spawn_blocking(read).await;
                let done = done.map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))?;
                done.map_err(|error| format!("The screen cannot be read: {error}"))
            }
        };
        self.pace.blank(seen.is_err());
        let read_all = match seen {
            Ok(Seen { changed, all }) => {
                self.said = None;
                if changed {
                    self.pace.stir(now);
                }
                all
            }
            Err(what) => {
                self.mode = None;
                if self.said.as_ref() != Some(&what) {
                    let mut canvas = screen.canvas.write().unwrap_or_else(PoisonError::into_inner);
                    let Rect { width, height, .. } = canvas.whole();
                    *canvas = Canvas::saying(&what, look, (width, height));
                    self.said = Some(what);
                }
                true
            }
        };
        let change = screen.canvas().last_change();
        screen.looked.send_modify(|looked| {
            looked.change = change;
            if read_all {
                looked.whole = Some(now);
            }
        });
        Ok(())
    }

    /// Asks the worker where its screen is; inside, what to say if there is none now.
    async fn ask(&mut self, now: Instant) -> Result<std::result::Result<Arc<Readout>, String>> {
        let id = self.id;
        // One that is stopped may be started again: with its VM, by its operator, or because its worker has died.
        let screen = self.manager.call(move |manager| manager.screen(id)).await?;
        let Screen { control, refresh } = match screen {
            Ok(screen) => screen,
            Err(error) if error.code == ErrorCode::NotFound => {
                return Ok(Err("The vGPU is gone".to_owned()));
            }
            Err(_) => return Ok(Err("No signal".to_owned())),
        };
        self.pace.limit(refresh);
        let asked = tokio::task::spawn_blocking(move || mode(control)).await;
        let asked = asked.map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))?;
        Ok(match asked {
            Ok(Some(readout)) => {
                let readout = Arc::new(readout);
                self.mode = Some(Mode { asked: now, readout: Arc::clone(&readout) });
                Ok(readout)
            }
            Ok(None) => Err("The screen is off".to_owned()),
            Err(error) => {
                log::debug!("The screen of vGPU {id}: {error}");
                sleep_until(now + TROUBLE).await;
                Err("The vGPU does not answer".to_owned())
            }
        })
    }
}

/// Where a worker's screen is; `None` while it is off.
fn mode(control: PathBuf) -> io::Result<Option<Readout>> {
    let (scanout, memory) = ask::scanout(&control)?;
    drop(control);
    match memory {
        Some(memory) if scanout.enabled => Readout::new(&scanout, memory).map(Some),
        _ => Ok(None),
    }
}

/// What a look found.
struct Seen {
    changed: bool,
    all: bool,
}

/// Reads some rows, or all where one of them has changed.
fn read(screen: &Watched, from: &Readout, rows: Rows, look: u64) -> io::Result<Seen> {
    let mut canvas = screen.canvas.write().unwrap_or_else(PoisonError::into_inner);
    let shape = from.shape();
    let fresh = canvas.shape() != shape;
    if fresh {
        *canvas = Canvas::new(shape, look);
    }
    let mut row = vec![0; shape.row_bytes()];
    let mut read = |canvas: &mut Canvas, rows: Rows| -> io::Result<bool> {
        let mut changed = false;
        for y in (rows.first..shape.height).step_by(rows.of as usize) {
            from.read_row(y, &mut row)?;
            changed |= canvas.put_row(y, &row, look);
        }
        Ok(changed)
    };
    let mut all = rows == Rows::ALL;
    let mut changed = fresh | read(&mut canvas, rows)?;
    if changed && !all {
        changed |= read(&mut canvas, Rows::ALL)?;
        all = true;
    }
    Ok(Seen { changed, all })
}
