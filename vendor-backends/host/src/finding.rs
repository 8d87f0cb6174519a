//! Results of checks, as `vgpuctl doctor` and `vgpu-guest doctor` report them.

use std::fmt::Write as _;

use mdev_core::untrusted::message;
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
    /// Creates a finding. What it quotes, such as the name of a VM, may come from a user.
    fn new(check: &'static str, level: Level, what: &str, fix: Option<&str>) -> Self {
        Self { check, level, what: message(what), fix: fix.map(message) }
    }

    /// Reports that a check passed.
    pub fn ok(check: &'static str, what: impl Into<String>) -> Self {
        Self::new(check, Level::Ok, &what.into(), None)
    }

    /// Reports a restriction and its remedy.
    pub fn warning(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::new(check, Level::Warning, &what.into(), Some(&fix.into()))
    }

    /// Reports a failure and its remedy.
    pub fn problem(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::new(check, Level::Problem, &what.into(), Some(&fix.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_a_user_chose_stays_on_its_line() {
        let name = "vm\u{1b}[2J\nok       vm       all is well\u{202e}".repeat(1000);
        let name = name.as_str();
        for finding in [
            Finding::ok("vm", name),
            Finding::warning("vm", name, name),
            Finding::problem("vm", name, name),
        ] {
            assert!(finding.what.len() < 2000 && !finding.what.contains("  "), "{finding:?}");
            let lines = 1 + usize::from(finding.fix.is_some());
            let text = text(&[finding]);
            assert_eq!(text.lines().count(), lines, "{text:?}");
            assert!(!text.contains(['\u{1b}', '\u{202e}']), "{text:?}");
        }
    }
}
