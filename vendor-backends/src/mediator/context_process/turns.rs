//! Turns of a context: when its engine may run.

use std::fs::File;
use std::hint;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mdev_core::gpu::Usage;

use crate::mediator::emulation::clock::now_ns;
use crate::mediator::turn_page::{NoTurn, Turn, TurnPage};

/// Longest time for which a context spins until its turn begins.
const SPIN_NS: u64 = 200_000;
/// Longest time for which a context spins that has been interrupted.
const INTERRUPTED_NS: u64 = 150_000;
/// Pauses between two looks while a context spins. The other thread of its core works meanwhile.
const PAUSES: u32 = 16;
/// Interval at which a context without a turn looks whether it still has work.
const WAIT: Duration = Duration::from_millis(10);

/// What connects a context with an arbiter.
#[derive(Debug)]
struct Link {
    page: TurnPage,
    /// Eventfd that has the arbiter look at the page.
    bell: File,
}

impl Link {
    fn ring(&self) {
        // A full eventfd has been signalled.
        let _ = (&self.bell).write(&1_u64.to_ne_bytes());
    }

    /// Begins a turn for work that there is since `since_ns`. Without a turn, the arbiter looks.
    fn begin(&self, now_ns: u64, since_ns: u64) -> Result<Turn, NoTurn> {
        let is_new = self.page.set_waits_since(since_ns);
        let turn = self.page.begin(now_ns);
        if turn == Err(NoTurn::Revoked) || is_new && turn.is_err() {
            self.ring();
        }
        turn
    }
}

/// Turns of a context. The engine's thread takes them. Another thread connects the arbiter.
#[derive(Debug, Default)]
pub struct Turns {
    link: Mutex<Option<Link>>,
    linked: Condvar,
}

/// A turn that the engine has, for the checks during a run.
#[derive(Clone, Debug)]
pub struct OwnTurn {
    page: TurnPage,
    number: u64,
    /// End, in the time of [`now_ns`].
    pub end_ns: u64,
}

impl OwnTurn {
    /// Returns whether the arbiter has ended the turn.
    pub fn is_revoked(&self) -> bool {
        self.page.is_revoked(self.number)
    }
}

impl Turns {
    fn link(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes turns from an arbiter, in place of the one before. `usage` is what is counted so far.
    pub fn connect(&self, page: TurnPage, bell: OwnedFd, usage: &Usage) {
        page.count(usage);
        let before = self.link().replace(Link { page, bell: bell.into() });
        if let Some(before) = before {
            before.page.close();
        }
        self.linked.notify_all();
    }

    /// Ends the turns of an arbiter that is gone.
    pub fn disconnect(&self) {
        if let Some(before) = self.link().take() {
            before.page.close();
        }
    }

    /// Passes the counters on.
    pub fn count(&self, usage: &Usage) {
        if let Some(link) = &*self.link() {
            link.page.count(usage);
        }
    }

    /// Returns the turn that the engine has now. The engine has had work since `since_ns`. `usage`
    /// is what is counted.
    pub fn begin(
        &self,
        now_ns: u64,
        since_ns: u64,
        usage: impl FnOnce() -> Usage,
    ) -> Option<OwnTurn> {
        let link = self.link();
        let link = link.as_ref()?;
        let Turn { number, end_ns } = link.begin(now_ns, since_ns).ok()?;
        if link.page.waits_uncounted_since().is_some() {
            link.page.count(&usage());
            link.page.set_waits_uncounted_since(None);
        }
        Some(OwnTurn { page: link.page.clone(), number, end_ns })
    }

    /// Waits for a turn, or for some time. The engine has had work since `since_ns`, and `usage`
    /// has the wait until `counted_ns`.
    pub fn wait(&self, since_ns: u64, usage: &Usage, counted_ns: Option<u64>) {
        let guard = self.link();
        let Some(link) = &*guard else {
            let waited = self.linked.wait_timeout(guard, WAIT);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            return;
        };
        link.page.count(usage);
        link.page.set_waits_uncounted_since(counted_ns);
        let (page, changes) = (link.page.clone(), link.page.changes());
        let turn = link.begin(now_ns(), since_ns);
        drop(guard);
        match turn {
            Ok(_) => {}
            Err(NoTurn::Begins(at)) => spin_until(at, &page),
            Err(NoTurn::Waits | NoTurn::Revoked) => {
                let spins_until = now_ns() + INTERRUPTED_NS;
                while page.is_interrupted() && page.changes() == changes && now_ns() < spins_until {
                    pause();
                }
                page.wait(changes, WAIT);
            }
        }
    }

    /// Says that the engine has no work. Returns whether it has a turn for the next work.
    pub fn rest(&self, usage: &Usage) -> bool {
        let link = self.link();
        let Some(link) = &*link else { return false };
        link.page.count(usage);
        link.page.set_waits_uncounted_since(None);
        if link.page.rest() {
            link.ring();
        }
        link.page.is_endless()
    }
}

fn pause() {
    (0..PAUSES).for_each(|_| hint::spin_loop());
}

/// Spins until a turn begins, which can be earlier than said.
fn spin_until(at_ns: u64, page: &TurnPage) {
    let now = now_ns();
    if at_ns.saturating_sub(now) > SPIN_NS {
        page.wait(page.changes(), Duration::from_nanos(at_ns - now - SPIN_NS));
    }
    let mut now = now_ns();
    while now < at_ns && matches!(page.begin(now), Err(NoTurn::Begins(_))) {
        pause();
        now = now_ns();
    }
}
