//! When a screen is looked at, and how much of it at a time.
//!
//! A guest draws into memory that it has mapped, so nobody is told of a change: it has to be looked for. While a screen
//! changes it is read whole, as often as its `refresh` allows. Once it is still, a sixteenth of its rows is read eight times
//! a second, every sixteenth row and each time others: a line of text that appears is noticed at once, and a change of a
//! single row within two seconds. After some seconds of that it is read half as often. A key that is pressed makes it
//! lively again before anything has changed.

use std::num::NonZeroU32;
use std::time::Duration;

use tokio::time::Instant;

use super::turns;

/// Shortest time from one look at a lively screen to the next: more than this no eye needs, and no viewer asks for.
const LIVELY: Duration = Duration::from_millis(33);

/// The same for a still one,
const STILL: Duration = Duration::from_millis(125);

/// and for one that has been still for a while.
const QUIET: Duration = Duration::from_millis(250);

/// How long that is.
const QUIET_AFTER: Duration = Duration::from_secs(5);

/// The same for one that is off: its worker is asked, which costs more than to read.
const BLANK: Duration = Duration::from_millis(500);

/// How long a screen is taken to be lively after a change or a key.
const LIVELY_FOR: Duration = Duration::from_secs(1);

/// So many looks at a still screen have read all of it.
const PARTS: u32 = 16;

/// A still screen has been read whole after this, however slowly it may be read.
const WHOLE_WITHIN: Duration = Duration::from_secs(2);

/// How often the worker of a still screen is asked for its mode, which costs more than to read a part of it. A new mode
/// is seen earlier where it draws into the old one.
const MODE_EVERY: Duration = Duration::from_secs(1);

/// Which rows are read: every `of`th, from the `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The first one.
    pub first: u32,
    /// From one to the next.
    pub of: u32,
}

impl Rows {
    /// All of them.
    pub const ALL: Self = Self { first: 0, of: 1 };
}

/// The pace of one screen.
#[derive(Debug)]
pub struct Pace {
    refresh: NonZeroU32,
    begun: Option<Instant>,
    lively_until: Instant,
    turn: u32,
    blank: bool,
}

impl Pace {
    /// A screen that nobody has looked at.
    pub fn new(now: Instant) -> Self {
        Self {
            refresh: NonZeroU32::MIN,
            begun: None,
            lively_until: now + LIVELY_FOR,
            turn: 0,
            blank: false,
        }
    }

    /// Pictures that may be read out in a second.
    pub fn limit(&mut self, refresh: NonZeroU32) {
        self.refresh = refresh;
    }

    /// The shortest time from one look to the next that `refresh` allows.
    pub fn shortest(&self) -> Duration {
        turns::pause(self.refresh)
    }

    /// Something has changed, or is about to.
    pub fn stir(&mut self, now: Instant) {
        self.lively_until = now + LIVELY_FOR;
    }

    /// There is no picture to look at, or there is one again.
    pub fn blank(&mut self, blank: bool) {
        self.blank = blank;
    }

    /// True while the screen is read whole.
    pub fn is_lively(&self, now: Instant) -> bool {
        now < self.lively_until
    }

    /// The pause between two looks at a screen that is not lively.
    fn calm(&self, now: Instant) -> Duration {
        let quiet = now >= self.lively_until + QUIET_AFTER;
        if quiet { QUIET } else { STILL }
    }

    /// How old what the worker has said of its mode may be.
    pub fn mode_for(&self, now: Instant) -> Duration {
        MODE_EVERY * (self.calm(now).as_millis() / STILL.as_millis()) as u32
    }

    /// When the next look may begin. `whole`: somebody wants all of it.
    pub fn due(&self, now: Instant, whole: bool) -> Instant {
        let shortest = match (whole || self.is_lively(now), self.blank) {
            (true, _) => LIVELY,
            (false, false) => self.calm(now),
            (false, true) => BLANK,
        };
        let pause = shortest.max(self.shortest());
        self.begun.map_or(now, |begun| begun + pause)
    }

    /// A look begins: which rows it is to read.
    pub fn begin(&mut self, now: Instant, whole: bool) -> Rows {
        self.begun = Some(now);
        if whole || self.is_lively(now) {
            return Rows::ALL;
        }
        let slow = (WHOLE_WITHIN.as_millis() / self.shortest().as_millis()).max(1) as u32;
        let of = PARTS.min(slow);
        self.turn = self.turn.wrapping_add(1);
        Rows { first: self.turn % of, of }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks for so long; how many there were, and in which parts of a picture.
    fn looks(pace: &mut Pace, from: Instant, time: Duration) -> (u32, f64) {
        let (mut now, mut count, mut pictures) = (from, 0, 0.0);
        loop {
            now = pace.due(now, false).max(now);
            if now >= from + time {
                return (count, pictures);
            }
            let rows = pace.begin(now, false);
            count += 1;
            pictures += 1.0 / f64::from(rows.of);
        }
    }

    fn screen(refresh: u32) -> (Pace, Instant) {
        let now = Instant::now();
        let mut pace = Pace::new(now);
        pace.limit(NonZeroU32::new(refresh).unwrap());
        (pace, now)
    }

    #[test]
    fn a_still_screen_is_read_in_sixteen_parts_and_less_and_less() {
        let (mut pace, now) = screen(60);
        let (lively, _) = looks(&mut pace, now, Duration::from_secs(1));
        assert!((28..=31).contains(&lively), "{lively}");
        let (still, pictures) =
            looks(&mut pace, now + Duration::from_secs(1), Duration::from_secs(5));
        assert!((38..=41).contains(&still) && pictures <= 2.6, "{still} looks, {pictures}");
        let (quiet, pictures) =
            looks(&mut pace, now + Duration::from_secs(6), Duration::from_secs(60));
        assert!((238..=241).contains(&quiet), "{quiet} looks");
        let picture = 1920.0 * 1200.0 * 4.0;
        let bytes = pictures * picture / 60.0;
        assert!(bytes < 2_400_000.0, "{bytes} bytes a second of a picture that has {picture}");
        let later = now + Duration::from_secs(66);
        assert_eq!(pace.mode_for(later), Duration::from_secs(2));
        pace.stir(later);
        let (again, _) = looks(&mut pace, later, Duration::from_secs(1));
        assert!(again >= 28, "a key makes it lively: {again}");
        assert_eq!(pace.mode_for(later), Duration::from_secs(1));
    }

    #[test]
    fn every_row_has_its_turn() {
        let (mut pace, now) = screen(60);
        let later = now + Duration::from_secs(2);
        let mut first: Vec<_> = (0..16).map(|_| pace.begin(later, false).first).collect();
        first.sort_unstable();
        assert_eq!(first, (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn the_refresh_limit_holds_whatever_is_asked_for() {
        let (mut pace, now) = screen(2);
        let (lively, _) = looks(&mut pace, now, Duration::from_secs(1));
        assert!(lively <= 3, "{lively}");
        assert!(pace.due(now, true) >= now + Duration::from_millis(500));
    }
}
