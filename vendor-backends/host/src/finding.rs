//! Results of host checks, as `vgpuctl doctor` reports them.

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
