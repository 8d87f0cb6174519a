//! When a screen with viewers is read, and which rows.
//!
//! A guest draws into mapped memory, so changes are found only by reading. While a screen changes,
//! it is read whole, as often as its `refresh` allows. A still screen is read every 125 ms, a
//! sixteenth of its rows at a time: every sixteenth row, with a different first row each time. A
//! new line of text is found at once, and a change of a single row within two seconds. After five
//! seconds without a change, the interval doubles. A key press makes the screen active before
//! anything has changed.

use std::num::NonZeroU32;
use std::time::Duration;

use tokio::time::Instant;

use super::readout_limiter;

/// Shortest interval of reads of an active screen: 30 pictures per second.
const ACTIVE_INTERVAL: Duration = Duration::from_millis(33);

/// Interval of reads of a still screen.
const STILL_INTERVAL: Duration = Duration::from_millis(125);

/// Interval of reads of a screen that has been still for [`QUIET_AFTER`].
const QUIET_INTERVAL: Duration = Duration::from_millis(250);

/// Time without a change after which a still screen is read less often.
const QUIET_AFTER: Duration = Duration::from_secs(5);

/// Interval of reads of a screen that is off. Each read is a request to the worker, which costs
/// more than reading memory.
const BLANK_INTERVAL: Duration = Duration::from_millis(500);

/// Time that a screen counts as active after a change or a key press.
const ACTIVE_FOR: Duration = Duration::from_secs(1);

/// Number of partial reads that cover a still screen.
const PARTS: u32 = 16;

/// Limit of the time to cover a still screen, for screens with a low `refresh`.
const COVERED_WITHIN: Duration = Duration::from_secs(2);

/// Interval of requests for the mode of a still screen. A request to the worker costs more than a
/// partial read. A mode change that draws into the old framebuffer is found earlier.
const MODE_INTERVAL: Duration = Duration::from_secs(1);

/// Rows of one read: every `step`th row from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// First row.
    pub first: u32,
    /// Distance from row to row.
    pub step: u32,
}

impl Rows {
    /// All rows.
    pub const ALL: Self = Self { first: 0, step: 1 };
}

/// Pace of the reads of one screen.
#[derive(Debug)]
pub struct ReadPace {
    refresh: NonZeroU32,
    last_read: Option<Instant>,
    active_until: Instant,
    part: u32,
    blank: bool,
}

impl ReadPace {
    /// Creates the pace of a screen that has not been read.
    pub fn new(now: Instant) -> Self {
        Self {
            refresh: NonZeroU32::MIN,
            last_read: None,
            active_until: now + ACTIVE_FOR,
            part: 0,
            blank: false,
        }
    }

    /// Sets the limit of readouts per second.
    pub fn set_refresh(&mut self, refresh: NonZeroU32) {
        self.refresh = refresh;
    }

    /// Returns the shortest interval of reads that `refresh` allows.
    pub fn min_interval(&self) -> Duration {
        readout_limiter::interval(self.refresh)
    }

    /// Notes a change, or a key press that is likely to cause one.
    pub fn set_active(&mut self, now: Instant) {
        self.active_until = now + ACTIVE_FOR;
    }

    /// Notes whether the screen is off.
    pub fn set_blank(&mut self, blank: bool) {
        self.blank = blank;
    }

    /// Returns whether the screen is read whole each time.
    pub fn is_active(&self, now: Instant) -> bool {
        now < self.active_until
    }

    /// Returns the interval of reads of a screen that is not active.
    fn still_interval(&self, now: Instant) -> Duration {
        let quiet = now >= self.active_until + QUIET_AFTER;
        if quiet { QUIET_INTERVAL } else { STILL_INTERVAL }
    }

    /// Returns the age at which the known mode must be requested again.
    pub fn mode_lifetime(&self, now: Instant) -> Duration {
        MODE_INTERVAL * (self.still_interval(now).as_millis() / STILL_INTERVAL.as_millis()) as u32
    }

    /// Returns the time of the next read. `whole`: a viewer waits for the whole screen.
    pub fn next_read(&self, now: Instant, whole: bool) -> Instant {
        let interval = match (whole || self.is_active(now), self.blank) {
            (true, _) => ACTIVE_INTERVAL,
            (false, false) => self.still_interval(now),
            (false, true) => BLANK_INTERVAL,
        };
        let interval = interval.max(self.min_interval());
        self.last_read.map_or(now, |last| last + interval)
    }

    /// Starts a read, and returns the rows to read.
    pub fn start_read(&mut self, now: Instant, whole: bool) -> Rows {
        self.last_read = Some(now);
        if whole || self.is_active(now) {
            return Rows::ALL;
        }
        let reads = (COVERED_WITHIN.as_millis() / self.min_interval().as_millis()).max(1) as u32;
        let step = PARTS.min(reads);
        self.part = self.part.wrapping_add(1);
        Rows { first: self.part % step, step }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of reads during `time`, and how many pictures their rows add up to.
    fn reads(pace: &mut ReadPace, start: Instant, time: Duration) -> (u32, f64) {
        let (mut now, mut count, mut pictures) = (start, 0, 0.0);
        loop {
            now = pace.next_read(now, false).max(now);
            if now >= start + time {
                return (count, pictures);
            }
            let rows = pace.start_read(now, false);
            count += 1;
            pictures += 1.0 / f64::from(rows.step);
        }
    }

    fn screen(refresh: u32) -> (ReadPace, Instant) {
        let now = Instant::now();
        let mut pace = ReadPace::new(now);
        pace.set_refresh(NonZeroU32::new(refresh).unwrap());
        (pace, now)
    }

    #[test]
    fn a_still_screen_is_read_in_parts_at_growing_intervals() {
        let (mut pace, now) = screen(60);
        let (active, _) = reads(&mut pace, now, Duration::from_secs(1));
        assert!((28..=31).contains(&active), "{active}");
        let (still, pictures) =
            reads(&mut pace, now + Duration::from_secs(1), Duration::from_secs(5));
        assert!((38..=41).contains(&still) && pictures <= 2.6, "{still} reads, {pictures}");
        let (quiet, pictures) =
            reads(&mut pace, now + Duration::from_secs(6), Duration::from_secs(60));
        assert!((238..=241).contains(&quiet), "{quiet} reads");
        let picture = 1920.0 * 1200.0 * 4.0;
        let bytes = pictures * picture / 60.0;
        assert!(bytes < 2_400_000.0, "{bytes} bytes per second of a picture of {picture} bytes");
        let later = now + Duration::from_secs(66);
        assert_eq!(pace.mode_lifetime(later), Duration::from_secs(2));
        pace.set_active(later);
        let (again, _) = reads(&mut pace, later, Duration::from_secs(1));
        assert!(again >= 28, "a key press makes the screen active: {again}");
        assert_eq!(pace.mode_lifetime(later), Duration::from_secs(1));
    }

    #[test]
    fn partial_reads_cover_every_row() {
        let (mut pace, now) = screen(60);
        let later = now + Duration::from_secs(2);
        let mut first: Vec<_> = (0..16).map(|_| pace.start_read(later, false).first).collect();
        first.sort_unstable();
        assert_eq!(first, (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn the_refresh_limit_applies_to_every_read() {
        let (mut pace, now) = screen(2);
        let (active, _) = reads(&mut pace, now, Duration::from_secs(1));
        assert!(active <= 3, "{active}");
        assert!(pace.next_read(now, true) >= now + Duration::from_millis(500));
    }
}
