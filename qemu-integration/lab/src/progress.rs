//! Progress output: a spinner for each step on a terminal; elsewhere plain lines, also for a step
//! that runs for long.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::heartbeat::{Heartbeat, INTERVAL};

/// Steps of a run. Clones show their steps in the same place.
#[derive(Clone, Debug)]
pub struct Progress {
    bars: Option<MultiProgress>,
}

impl Progress {
    /// Creates progress output on standard error.
    pub fn new() -> Self {
        Self { bars: std::io::stderr().is_terminal().then(MultiProgress::new) }
    }

    /// Begins a step.
    pub fn step(&self, what: impl Into<Cow<'static, str>>) -> Step {
        let what = what.into();
        let bar = self.bars.as_ref().map(|bars| {
            let bar = bars.add(ProgressBar::new_spinner());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
                bar.set_style(style);
            }
            bar.set_message(what.to_string());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        let detail = Arc::<Mutex<String>>::default();
        let heartbeat = bar.is_none().then(|| {
            eprintln!("... {what}");
            let (what, detail) = (what.clone(), Arc::clone(&detail));
            Heartbeat::start(INTERVAL, move |since| {
                let detail = detail.lock().unwrap_or_else(PoisonError::into_inner);
                eprintln!("{}", running(&what, since, &detail));
            })
        });
        Step { what, bar, detail, heartbeat, started: Instant::now(), finished: false }
    }

    /// Prints a line above the steps.
    pub fn line(&self, text: &str) {
        match &self.bars {
            Some(bars) => drop(bars.println(text)),
            None => eprintln!("{text}"),
        }
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

/// Running step. Counts as failed if dropped without [`Step::done`].
#[derive(Debug)]
pub struct Step {
    what: Cow<'static, str>,
    bar: Option<ProgressBar>,
    detail: Arc<Mutex<String>>,
    heartbeat: Option<Heartbeat>,
    started: Instant,
    finished: bool,
}

impl Step {
    /// Shows a detail of the step: at once on terminals, elsewhere with the step's next line.
    pub fn at(&self, detail: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(format!("{}: {detail}", self.what)),
            None => {
                detail.clone_into(&mut self.detail.lock().unwrap_or_else(PoisonError::into_inner));
            }
        }
    }

    /// Marks the step as done.
    pub fn done(mut self) {
        self.finish("ok ");
    }

    fn finish(&mut self, mark: &str) {
        self.finished = true;
        self.heartbeat = None;
        let line = format!("{mark} {} ({:.1} s)", self.what, self.started.elapsed().as_secs_f64());
        match &self.bar {
            Some(bar) => {
                if let Ok(style) = ProgressStyle::with_template("{wide_msg}") {
                    bar.set_style(style);
                }
                bar.finish_with_message(line);
            }
            None => eprintln!("{line}"),
        }
    }
}

/// Returns the line of a step that runs for long.
pub fn running(what: &str, since: Duration, detail: &str) -> String {
    let colon = if detail.is_empty() { "" } else { ": " };
    format!("... {what}: running for {} s{colon}{detail}", since.as_secs())
}

impl Drop for Step {
    fn drop(&mut self) {
        if !self.finished {
            self.finish("-- ");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_runs_for_long_names_its_detail() {
        let line = |detail| running("Building vgpud", Duration::from_secs(90), detail);
        assert_eq!(line("Compiling libc"), "... Building vgpud: running for 90 s: Compiling libc");
        assert_eq!(line(""), "... Building vgpud: running for 90 s");
    }
}
