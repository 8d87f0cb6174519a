//! Results of checks, as `vgpuctl doctor` and `vgpu-guest doctor` report them.

use std::fmt::Write as _;

use serde::Serialize;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// The check passed.
    Ok,
    /// It works, but not for every user or every VM.
    Warning,
    /// It does not work.
    Problem,
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable identifier of the check.
    pub check: &'static str,
    /// Severity.
    pub level: Level,
    /// Observation, in one line.
    pub what: String,
    /// Remedy, in one line; `None` if the check passed.
    pub fix: Option<String>,
}

/// Returns findings as text for people.
pub fn text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { check, level, what, fix } in findings {
        let level = match level {
            Level::Ok => "ok",
            Level::Warning => "warning",
            Level::Problem => "PROBLEM",
        };
        // Writing to a String does not fail.
        let _ = writeln!(text, "{level:<8} {check:<8} {what}");
        if let Some(fix) = fix {
            let _ = writeln!(text, "{:17} fix: {fix}", "");
        }
    }
    text
}

/// Returns the number of problems.
pub fn problems(findings: &[Finding]) -> usize {
    findings.iter().filter(|finding| finding.level == Level::Problem).count()
}

impl Finding {
    /// Reports that a check passed.
    pub fn ok(check: &'static str, what: impl Into<String>) -> Self {
        Self { check, level: Level::Ok, what: what.into(), fix: None }
    }

    /// Reports a restriction and its remedy.
    pub fn warning(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { check, level: Level::Warning, what: what.into(), fix: Some(fix.into()) }
    }

    /// Reports a failure and its remedy.
    pub fn problem(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { check, level: Level::Problem, what: what.into(), fix: Some(fix.into()) }
    }
}
