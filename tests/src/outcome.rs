//! Results of benchmarks.

use std::process::ExitCode;

use anyhow::Result;
use serde_json::Value;

/// Returns whether this run measures (`cargo bench`) or only tests that the benchmark runs.
pub fn measuring() -> bool {
    std::env::args().any(|argument| argument == "--bench")
}

/// Result of a benchmark.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Result as one line of text.
    pub line: String,
    /// Result as JSON, for `--json`.
    pub facts: Value,
    /// Whether the project's promise is kept.
    pub kept: bool,
}

/// Runs a benchmark and prints its result. Fails if a measurement breaks a promise.
pub fn report(name: &str, benchmark: impl FnOnce() -> Result<Outcome>) -> ExitCode {
    let outcome = match benchmark() {
        Ok(outcome) => outcome,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    if std::env::args().any(|argument| argument == "--json") {
        let mut facts = outcome.facts;
        facts["bench"] = name.into();
        facts["kept"] = outcome.kept.into();
        println!("{facts}");
    } else {
        let verdict = if outcome.kept { "" } else { ": NOT what is promised" };
        println!("{name}: {}{verdict}", outcome.line);
    }
    if outcome.kept || !measuring() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
