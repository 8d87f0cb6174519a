//! Page that the arbiter of a GPU shares with one context: turns, and the context's counters.
//!
//! A *turn* lets the context use the engine from a time on, for a length that begins when the
//! context begins. The arbiter writes turns and revokes them, and the context writes whether it has
//! work and what it has done. Both write words of their own only. A context that ends a turn of
//! its own accord signals the arbiter's eventfd, its *bell*. The arbiter looks at the page by
//! itself when a turn is over by time.
//!
//! All times are those of `CLOCK_MONOTONIC`, in nanoseconds.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ipc::mem::Mapping;
use mdev_core::gpu::{Usage, Waits};

/// Length of the page in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Length of a turn without an end.
pub const ENDLESS: u64 = u64::MAX;

/// Words of the arbiter. The first one has 32 bits, and changes with each of the others.
pub(super) mod arbiters {
    pub const CHANGES: u64 = 0;
    pub const NUMBER: u64 = 8;
    pub const BEGIN_NS: u64 = 16;
    pub const LENGTH_NS: u64 = 24;
    pub const REVOKED: u64 = 32;
    pub const IS_INTERRUPTED: u64 = 40;
}

/// Words of the context.
pub(super) mod contexts {
    pub const WAITS_SINCE_NS: u64 = 64;
    pub const ACTIVE: u64 = 72;
    pub const BEGAN_NS: u64 = 80;
    pub const BEGAN: u64 = 88;
    pub const ENDED: u64 = 96;
    pub const UNCOUNTED_SINCE_NS: u64 = 104;
    pub const IS_COUNTED: u64 = 128;
    /// Counters, in the order of [`super::COUNTERS`].
    pub const COUNTERS: u64 = 256;
    /// Buckets of [`super::Waits`], of 32 bits each.
    pub const WAITS: u64 = 1024;
}

/// Counters of a context. The arbiter counts the others.
const COUNTERS: [fn(&mut Usage) -> &mut u64; 13] = [
    |usage| &mut usage.engine_ns,
    |usage| &mut usage.copy_ns,
    |usage| &mut usage.compute_ns,
    |usage| &mut usage.wait_ns,
    |usage| &mut usage.submissions,
    |usage| &mut usage.polled_doorbells,
    |usage| &mut usage.wakeups,
    |usage| &mut usage.slice_overruns,
    |usage| &mut usage.overrun_ns,
    |usage| &mut usage.stolen_ns,
    |usage| &mut usage.faults,
    |usage| &mut usage.hang_resets,
    |usage| &mut usage.throttled,
];
/// Place of the imported bytes and of the number of channels, after [`COUNTERS`].
const IMPORTED: u64 = contexts::COUNTERS + 8 * COUNTERS.len() as u64;
const CHANNELS: u64 = IMPORTED + 8;

/// What a context says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The context has work.
    pub has_work: bool,
    /// The context uses the engine.
    pub is_active: bool,
    /// Turn that the context has begun last, and the time.
    pub began: (u64, u64),
    /// Turn that the context has ended last.
    pub ended: u64,
    /// Engine time that the context has used, once it has said so.
    pub engine_ns: Option<u64>,
}

/// A turn that a context may use now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Number, greater than those of earlier turns.
    pub number: u64,
    /// End, or [`ENDLESS`].
    pub end_ns: u64,
}

/// Why a context has no turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoTurn {
    /// A turn begins at a time.
    Begins(u64),
    /// The arbiter has to give a turn.
    Waits,
    /// The arbiter has ended the turn, and waits for the context to say that it has, too.
    Revoked,
}

/// The page, of which each end uses its half.
#[derive(Clone, Debug)]
pub struct TurnPage(Arc<Mapping>);

impl TurnPage {
    /// Uses a mapping of [`PAGE_BYTES`].
    pub fn new(mapping: Arc<Mapping>) -> Option<Self> {
        (mapping.len() == PAGE_BYTES && mapping.writable()).then_some(Self(mapping))
    }

    // All words are within the page, which has a sealed length.
    fn load(&self, word: u64) -> u64 {
        self.0.load_u64(word).unwrap_or_default()
    }

    fn store(&self, word: u64, value: u64) {
        let _ = self.0.store_u64(word, value);
    }

    fn changed(&self) {
        let _ = self.0.add_u32(arbiters::CHANGES, 1);
        let _ = self.0.wake_u32(arbiters::CHANGES);
    }
}

/// The arbiter's end.
impl TurnPage {
    /// Gives the next turn.
    pub fn grant(&self, number: u64, begin_ns: u64, length_ns: u64) {
        self.store(arbiters::BEGIN_NS, begin_ns);
        self.store(arbiters::LENGTH_NS, length_ns);
        self.store(arbiters::IS_INTERRUPTED, 0);
        self.store(arbiters::NUMBER, number);
        self.changed();
    }

    /// Ends the turn early, with this length, for work that may be brief.
    pub fn interrupt(&self, length_ns: u64) {
        self.store(arbiters::IS_INTERRUPTED, 1);
        self.set_length(length_ns);
    }

    /// Changes the length of the turn.
    pub fn set_length(&self, length_ns: u64) {
        self.store(arbiters::LENGTH_NS, length_ns);
    }

    /// Changes the time from which on the turn can begin.
    pub fn set_begin(&self, begin_ns: u64) {
        self.store(arbiters::BEGIN_NS, begin_ns);
    }

    /// Ends all turns up to `number`. Returns whether the context uses the engine still: it then
    /// says when it ends the turn.
    pub fn revoke(&self, number: u64) -> bool {
        self.store(arbiters::REVOKED, number);
        // The context writes that it is active, and then reads this word.
        fence(Ordering::SeqCst);
        let is_active = self.load(contexts::ACTIVE) != 0;
        self.changed();
        is_active
    }

    /// Returns what the context says.
    pub fn seen(&self) -> Seen {
        // In this order all that was used in an ended turn is counted.
        let ended = self.load(contexts::ENDED);
        let is_counted = self.load(contexts::IS_COUNTED) != 0;
        Seen {
            ended,
            has_work: self.load(contexts::WAITS_SINCE_NS) != 0,
            is_active: self.load(contexts::ACTIVE) != 0,
            began: (self.load(contexts::BEGAN), self.load(contexts::BEGAN_NS)),
            engine_ns: is_counted.then(|| self.load(contexts::COUNTERS)),
        }
    }

    /// Returns the counters of the context, with the wait that goes on.
    pub fn usage(&self, now_ns: u64) -> Usage {
        let mut usage = Usage::default();
        for (place, counter) in (contexts::COUNTERS..).step_by(8).zip(COUNTERS) {
            *counter(&mut usage) = self.load(place);
        }
        if let Some(since_ns) = self.waits_uncounted_since() {
            usage.wait_ns = usage.wait_ns.saturating_add(now_ns.saturating_sub(since_ns));
        }
        usage.runnable = self.load(contexts::WAITS_SINCE_NS) != 0;
        usage.imported_bytes = self.load(IMPORTED);
        usage.channels = u32::try_from(self.load(CHANNELS)).unwrap_or(u32::MAX);
        usage
    }

    /// Returns the context's waits.
    pub fn waits(&self) -> Waits {
        Waits::from_counts(std::array::from_fn(|bucket| {
            self.0.load_u32(contexts::WAITS + 4 * bucket as u64).unwrap_or_default()
        }))
    }
}

/// The context's end.
impl TurnPage {
    /// Says since when the context has work. Returns true if that is new to the arbiter.
    pub fn set_waits_since(&self, since_ns: u64) -> bool {
        let is_new = self.load(contexts::WAITS_SINCE_NS) == 0;
        if is_new {
            self.store(contexts::WAITS_SINCE_NS, since_ns.max(1));
        }
        is_new
    }

    /// Begins to use the engine, or continues.
    ///
    /// # Errors
    ///
    /// Says why there is no turn. A turn that is over is ended.
    pub fn begin(&self, now_ns: u64) -> Result<Turn, NoTurn> {
        let number = self.load(arbiters::NUMBER);
        if number <= self.load(contexts::ENDED) {
            return Err(NoTurn::Waits);
        }
        let has_begun = self.load(contexts::BEGAN) == number;
        let begin_ns = self.load(arbiters::BEGIN_NS);
        if !has_begun && now_ns < begin_ns && !self.is_revoked(number) {
            return Err(NoTurn::Begins(begin_ns));
        }
        if self.load(contexts::ACTIVE) != number {
            self.store(contexts::ACTIVE, number);
            fence(Ordering::SeqCst);
        }
        if !has_begun && !self.is_revoked(number) {
            self.store(contexts::BEGAN_NS, now_ns);
            self.store(contexts::BEGAN, number);
        }
        let length_ns = self.load(arbiters::LENGTH_NS);
        let end_ns = match length_ns {
            ENDLESS => ENDLESS,
            _ => self.load(contexts::BEGAN_NS).saturating_add(length_ns),
        };
        if self.is_revoked(number) {
            self.end(number);
            return Err(NoTurn::Revoked);
        }
        if now_ns >= end_ns {
            self.end(number);
            // A turn that is revoked now has not been seen as ended.
            fence(Ordering::SeqCst);
            let is_revoked = self.is_revoked(number);
            return Err(if is_revoked { NoTurn::Revoked } else { NoTurn::Waits });
        }
        Ok(Turn { number, end_ns })
    }

    /// Returns whether the arbiter has ended a turn.
    pub fn is_revoked(&self, number: u64) -> bool {
        self.load(arbiters::REVOKED) >= number
    }

    /// Returns whether the last turn has ended early, so that the next one may come soon.
    pub fn is_interrupted(&self) -> bool {
        self.load(arbiters::IS_INTERRUPTED) != 0
    }

    fn end(&self, number: u64) {
        self.store(contexts::ENDED, number);
        self.store(contexts::ACTIVE, 0);
    }

    /// Returns whether the context has a turn without an end.
    pub fn is_endless(&self) -> bool {
        let number = self.load(arbiters::NUMBER);
        number > self.load(contexts::ENDED)
            && self.load(arbiters::LENGTH_NS) == ENDLESS
            && !self.is_revoked(number)
    }

    /// Says that the context has no work. Returns true if the arbiter has to look: a turn has ended
    /// with it. A turn without an end goes on.
    pub fn rest(&self) -> bool {
        self.store(contexts::WAITS_SINCE_NS, 0);
        let number = self.load(contexts::ACTIVE);
        if number == 0 {
            return false;
        }
        if self.load(arbiters::LENGTH_NS) == ENDLESS {
            self.store(contexts::ACTIVE, 0);
            // The arbiter ends the turn, and then reads whether the context is active.
            fence(Ordering::SeqCst);
            if !self.is_revoked(number) && self.load(arbiters::LENGTH_NS) == ENDLESS {
                return false;
            }
        }
        self.end(number);
        true
    }

    /// Waits for a change of the turns, for `timeout` at most. `changes` is what
    /// [`Self::changes`] returned before the caller looked for a turn.
    pub fn wait(&self, changes: u32, timeout: Duration) {
        let _ = self.0.wait_u32(arbiters::CHANGES, changes, timeout);
    }

    /// Says since when a wait goes on that is not counted, or that there is none. What is counted
    /// meanwhile must be written before.
    pub fn set_waits_uncounted_since(&self, since_ns: Option<u64>) {
        self.store(contexts::UNCOUNTED_SINCE_NS, since_ns.unwrap_or(0));
    }

    /// Returns what [`Self::set_waits_uncounted_since`] has said.
    pub fn waits_uncounted_since(&self) -> Option<u64> {
        Some(self.load(contexts::UNCOUNTED_SINCE_NS)).filter(|since| *since != 0)
    }

    /// Returns the number of changes of the turns.
    pub fn changes(&self) -> u32 {
        self.0.load_u32(arbiters::CHANGES).unwrap_or_default()
    }

    /// Ends all turns, because the arbiter is gone.
    pub fn close(&self) {
        self.revoke(u64::MAX);
    }

    /// Writes the context's counters.
    pub fn count(&self, usage: &Usage) {
        let mut usage = *usage;
        for (place, counter) in (contexts::COUNTERS..).step_by(8).zip(COUNTERS) {
            self.store(place, *counter(&mut usage));
        }
        self.store(IMPORTED, usage.imported_bytes);
        self.store(CHANNELS, usage.channels.into());
        for (place, count) in (contexts::WAITS..).step_by(4).zip(usage.waits.counts()) {
            if self.0.load_u32(place) != Some(count) {
                let _ = self.0.store_u32(place, count);
            }
        }
        self.store(contexts::IS_COUNTED, 1);
    }
}

#[cfg(test)]
mod tests {
    use ipc::mem::SharedMemory;

    use super::*;

    fn page() -> TurnPage {
        TurnPage::new(SharedMemory::new(c"turns", PAGE_BYTES).unwrap().mapping).unwrap()
    }

    #[test]
    fn a_turn_lasts_from_its_beginning() {
        let page = page();
        assert_eq!(page.begin(5), Err(NoTurn::Waits));
        assert!(page.set_waits_since(5) && !page.set_waits_since(6));
        page.grant(1, 100, 50);
        assert_eq!(page.begin(99), Err(NoTurn::Begins(100)));
        assert_eq!(page.begin(120), Ok(Turn { number: 1, end_ns: 170 }));
        let seen = page.seen();
        assert!(seen.is_active && seen.has_work);
        assert_eq!((seen.began, seen.ended), ((1, 120), 0));
        page.set_length(60);
        assert_eq!(page.begin(170), Ok(Turn { number: 1, end_ns: 180 }));
        assert_eq!(page.begin(180), Err(NoTurn::Waits));
        assert_eq!((page.seen().ended, page.seen().is_active), (1, false));
        assert_eq!(page.begin(181), Err(NoTurn::Waits));
    }

    #[test]
    fn a_turn_without_an_end_lasts_through_rests() {
        let page = page();
        page.grant(1, 0, ENDLESS);
        for now in [1, u64::MAX - 1] {
            assert_eq!(page.begin(now), Ok(Turn { number: 1, end_ns: ENDLESS }));
            assert!(!page.rest());
            assert!(!page.seen().is_active);
        }
        assert!(!page.revoke(1), "the context rests");
        assert_eq!(page.begin(9), Err(NoTurn::Revoked));
        assert_eq!(page.begin(9), Err(NoTurn::Waits));
        page.grant(2, 0, ENDLESS);
        assert!(page.begin(10).is_ok());
        assert!(page.revoke(2), "the context is active");
        assert!(page.rest(), "the arbiter waits for it");
        assert_eq!(page.seen().ended, 2);
    }

    #[test]
    fn all_counters_arrive() {
        let page = page();
        assert_eq!(page.seen().engine_ns, None);
        let mut usage = Usage { imported_bytes: 77, channels: 3, ..Usage::default() };
        for (value, counter) in (1..).zip(COUNTERS) {
            *counter(&mut usage) = value;
        }
        usage.waits.record(1_000_000);
        page.count(&usage);
        assert_eq!(page.seen().engine_ns, Some(1));
        assert_eq!(Usage { waits: page.waits(), ..page.usage(100) }, usage);
        page.set_waits_uncounted_since(Some(90));
        assert_eq!(page.usage(100).wait_ns, usage.wait_ns + 10);
    }
}
