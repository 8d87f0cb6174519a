//! Record of a daemon's statistics during a measurement, printed for figures that break a promise.

use std::fmt::Write;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use system_tests::Vgpud;

/// Interval of the records. The scheduler reads the counters more often.
const PAUSE: Duration = Duration::from_millis(250);

/// Daemon to read from.
#[derive(Clone, Copy, Debug)]
pub struct Diary<'a> {
    pub(crate) vgpud: &'a Vgpud,
    pub(crate) uuids: &'a [String],
}

/// A record and its time.
#[derive(Debug, Default)]
pub struct Pages {
    at: Vec<(Duration, Vec<Value>)>,
    /// Last decisions of the scheduler.
    decisions: String,
}

impl Diary<'_> {
    /// Statistics of each vGPU.
    pub fn stats(&self) -> Result<Vec<Value>> {
        let stats = self.vgpud.get("/v1/stats")?;
        let all = stats["vgpus"].as_array().cloned().unwrap_or_default();
        let of = |uuid: &String| {
            let one = all.iter().find(|one| one["uuid"] == uuid.as_str());
            one.cloned().context("No statistics")
        };
        self.uuids.iter().map(of).collect()
    }

    /// Runs `body` and records statistics meanwhile.
    pub fn keep<T>(&self, work: impl FnOnce() -> T) -> (T, Pages) {
        std::thread::scope(|scope| {
            let (done, ended) = channel::<()>();
            let begun = Instant::now();
            let writer = scope.spawn(move || {
                let mut pages = Pages::default();
                loop {
                    // A killed vGPU has no statistics.
                    if let Ok(stats) = self.stats() {
                        pages.at.push((begun.elapsed(), stats));
                    }
                    if ended.recv_timeout(PAUSE) != Err(RecvTimeoutError::Timeout) {
                        pages.decisions =
                            self.decisions().unwrap_or_else(|error| format!("  {error:#}\n"));
                        return pages;
                    }
                }
            });
            let result = work();
            drop(done);
            (result, writer.join().unwrap_or_default())
        })
    }

    /// Returns the scheduler's last decisions, with positions of vGPUs instead of names.
    fn decisions(&self) -> Result<String> {
        let parents = self.vgpud.get("/v1/schedulers")?;
        let parent = parents[0]["parent"].as_str().context("No scheduler")?.to_owned();
        let log = self.vgpud.get(&format!("/v1/schedulers/{parent}/log"))?;
        let mut text = String::new();
        for one in log.as_array().into_iter().flatten() {
            let whose = self.uuids.iter().position(|uuid| one["vgpu"] == uuid.as_str());
            let what = match one["open"].as_bool() {
                Some(open) => format!("gate {}", if open { "open" } else { "closed" }),
                None => format!("slice {} us", one["timeslice_us"]),
            };
            let ms = |name: &str| one[name].as_f64().unwrap_or_default() / 1e6;
            let _ = writeln!(
                text,
                "  {:6} ms ago, {}: {what} ({}), used {:.1} ms, owed {:.1} ms",
                one["age_ms"],
                whose.map_or("?".to_owned(), |place| place.to_string()),
                one["cause"].as_str().unwrap_or_default(),
                ms("engine_ns"),
                ms("owed_ns"),
            );
        }
        Ok(text)
    }
}

impl Pages {
    /// Returns the mean of a vGPU's figure over the records between two times, or the last one if
    /// there are none.
    pub fn mean(&self, index: usize, name: &str, from: Duration, to: Duration) -> f64 {
        let of = |stats: &[Value]| stats.get(index).and_then(|one| one[name].as_f64());
        let inside = self.at.iter().filter(|(at, _)| (from..=to).contains(at));
        let figures: Vec<f64> = inside.filter_map(|(_, stats)| of(stats)).collect();
        if figures.is_empty() {
            return self.at.last().and_then(|(_, stats)| of(stats)).unwrap_or_default();
        }
        figures.iter().sum::<f64>() / figures.len() as f64
    }

    /// Formats one line per record (usage of each vGPU since the previous record, slice, gate
    /// closings), then the scheduler's decisions.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for pair in self.at.windows(2) {
            let [(_, before), (at, after)] = pair else { continue };
            let _ = write!(text, "  at {:5} ms:", at.as_millis());
            for (before, after) in before.iter().zip(after) {
                let more = |name: &str| {
                    let of = |stats: &Value| stats[name].as_f64().unwrap_or_default();
                    of(after) - of(before)
                };
                let _ = write!(
                    text,
                    " | {:6.1} ms{}, {} turns, {} gates, {} faults, slice {}",
                    more("engine_ns") / 1e6,
                    if after["runnable"] == true { "" } else { " idle" },
                    more("preemptions"),
                    more("gate_closings"),
                    more("faults"),
                    after["timeslice_us"],
                );
            }
            text.push('\n');
        }
        text + &self.decisions
    }
}
