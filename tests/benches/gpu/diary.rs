//! What a daemon says of its vGPUs while something happens to them: so that a figure that is not kept explains itself.

use std::fmt::Write;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use system_tests::Vgpud;

/// How often it is asked. Its scheduler reads the counters more often.
const PAUSE: Duration = Duration::from_millis(250);

/// Who can say it.
#[derive(Clone, Copy, Debug)]
pub struct Diary<'a> {
    pub(crate) vgpud: &'a Vgpud,
    pub(crate) uuids: &'a [String],
}

/// What was said, and when.
#[derive(Debug, Default)]
pub struct Pages {
    at: Vec<(Duration, Vec<Value>)>,
    /// The scheduler's last decisions then.
    decisions: String,
}

impl Diary<'_> {
    /// Each one's statistics.
    pub fn stats(&self) -> Result<Vec<Value>> {
        let stats = self.vgpud.get("/v1/stats")?;
        let all = stats["vgpus"].as_array().cloned().unwrap_or_default();
        let of = |uuid: &String| {
            let one = all.iter().find(|one| one["uuid"] == uuid.as_str());
            one.cloned().context("No statistics")
        };
        self.uuids.iter().map(of).collect()
    }

    /// Does something, and keeps a diary meanwhile.
    pub fn keep<T>(&self, work: impl FnOnce() -> T) -> (T, Pages) {
        std::thread::scope(|scope| {
            let (done, ended) = channel::<()>();
            let begun = Instant::now();
            let writer = scope.spawn(move || {
                let mut pages = Pages::default();
                loop {
                    // A vGPU that is killed has no page any more.
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

    /// The scheduler's last decisions, each with a vGPU's place instead of its name.
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
    /// A line for each page: what each vGPU used since the one before, its slice, and how often its gate closed. Then
    /// the scheduler's decisions.
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
