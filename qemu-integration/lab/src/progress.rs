//! Progress output: a spinner for each step on a terminal, plain lines elsewhere.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

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
        if bar.is_none() {
            eprintln!("... {what}");
        }
        Step { what, bar, started: Instant::now(), finished: false }
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
    started: Instant,
    finished: bool,
}

impl Step {
    /// Shows a detail of the step, on terminals only.
    pub fn at(&self, detail: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{}: {detail}", self.what));
        }
    }

    /// Marks the step as done.
    pub fn done(mut self) {
        self.finish("ok ");
    }

    fn finish(&mut self, mark: &str) {
        self.finished = true;
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

impl Drop for Step {
    fn drop(&mut self) {
        if !self.finished {
            self.finish("-- ");
        }
    }
}
