//! How a benchmark says what it measured.

use std::process::ExitCode;

use anyhow::Result;
use serde_json::Value;

/// Whether this is a measurement (`cargo bench`) or only a test that the benchmark still runs.
pub fn measuring() -> bool {
    std::env::args().any(|argument| argument == "--bench")
}

/// What a benchmark has found.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// One line for people.
    pub line: String,
    /// The same for programs, printed with `--json`.
    pub facts: Value,
    /// Whether it is what the project promises.
    pub kept: bool,
}

/// Runs a benchmark: prints what it found, and fails where a measurement breaks a promise.
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
