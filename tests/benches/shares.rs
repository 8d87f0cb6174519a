//! Shares, caps, throughput and attacks: promise, measurement, verdict.
//!
//! `vgpud`, its workers and its software GPU are real; the guests are threads of this process. All
//! figures refer to the time that the host gave the engine, and compared figures are measured
//! alternately.
//!
//! `cargo lab bench shares [PART...] [--quick]`; `--quick` measures for one second instead of ten.

#[path = "shares/bed.rs"]
mod bed;
#[path = "shares/load.rs"]
mod load;
#[path = "shares/parts.rs"]
mod parts;
#[path = "shares/storm.rs"]
mod storm;

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use system_tests::outcome::{Outcome, measuring, report};

use self::bed::Bed;

fn main() -> ExitCode {
    report("shares", run)
}

type Part = fn(&mut Bench) -> Result<()>;

const PARTS: [(&str, Part); 8] = [
    ("steady", parts::steady),
    ("bursty", parts::bursty),
    ("caps", parts::caps),
    ("brief", parts::brief),
    ("idle", parts::idle_neighbours),
    ("throughput", parts::throughput),
    ("change", parts::live_change),
    ("attacks", parts::attacks),
];

/// A promise and its verdict.
#[derive(Debug)]
struct Line {
    promise: String,
    measured: String,
    kept: bool,
    /// Percentage of time in which the engine waited for a core.
    stolen: f64,
}

/// Measurements of a run.
#[derive(Debug)]
struct Bench {
    settle: Duration,
    window: Duration,
    /// Iterations of a spin's thread that take 10 ms.
    iterations: u32,
    lines: Vec<Line>,
}

impl Bench {
    fn note(&mut self, promise: String, measured: String, kept: bool, stolen: f64) {
        let verdict = if kept { "kept" } else { "NOT KEPT" };
        eprintln!("{promise}: {measured}: {verdict}; the host took {stolen:.1} %");
        self.lines.push(Line { promise, measured, kept, stolen });
    }

    fn kept(&self) -> bool {
        self.lines.iter().all(|line| line.kept)
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(["promise", "measured", "kept", "host took"]);
        for line in &self.lines {
            let kept = if line.kept { "yes" } else { "NO" };
            let stolen = format!("{:.1} %", line.stolen);
            table.add_row([line.promise.as_str(), &line.measured, kept, &stolen]);
        }
        table
    }
}

fn run() -> Result<Outcome> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = !measuring() || arguments.iter().any(|argument| argument == "--quick");
    let wanted: Vec<&String> = arguments.iter().filter(|one| !one.starts_with('-')).collect();
    let names = PARTS.map(|(name, _)| name);
    if let Some(unknown) = wanted.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("There is no part {unknown:?}, but {}", names.join(", "));
    }
    let (settle, window) = if quick { (300, 1000) } else { (1000, 10_000) };
    let before = Host::read()?;
    let mut bench = Bench {
        settle: Duration::from_millis(settle),
        window: Duration::from_millis(window),
        iterations: Bed::calibrate()?,
        lines: Vec::new(),
    };
    for (name, part) in PARTS {
        let all = measuring() && wanted.is_empty();
        // As a test, one part shows that the benchmark works.
        if all || wanted.iter().any(|one| *one == name) || !measuring() && name == "idle" {
            part(&mut bench)?;
        }
    }
    let host = Host::read()?.since(&before);
    let lines: Vec<Value> = bench
        .lines
        .iter()
        .map(|line| {
            json!({
                "promise": line.promise, "measured": line.measured, "kept": line.kept,
                "stolen": line.stolen,
            })
        })
        .collect();
    Ok(Outcome {
        line: format!("windows of {window} ms, {host}\n{}", bench.table()),
        facts: json!({ "window_ms": window, "host": host, "measured": lines }),
        kept: bench.kept(),
    })
}

/// Reads the host's clocks in ticks: busy time and stolen time.
#[derive(Debug)]
struct Host([u64; 8]);

impl Host {
    fn read() -> Result<Self> {
        let stat = fs::read_to_string("/proc/stat")?;
        let mut ticks = [0; 8];
        let first = stat.split_whitespace().skip(1);
        for (tick, word) in ticks.iter_mut().zip(first) {
            *tick = word.parse()?;
        }
        Ok(Self(ticks))
    }

    fn since(&self, before: &Self) -> String {
        let ticks: Vec<f64> = self.0.iter().zip(before.0).map(|(a, b)| (a - b) as f64).collect();
        let all: f64 = ticks.iter().sum::<f64>().max(1.0);
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let idle = (ticks[3] + ticks[4]) / all * 100.0;
        let steal = ticks[7] / all * 100.0;
        format!("{cpus} CPUs, {idle:.0} % idle, {steal:.1} % taken by a hypervisor")
    }
}
