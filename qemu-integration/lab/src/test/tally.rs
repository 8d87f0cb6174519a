//! Counts of tests, from libtest's output.

/// Number of tests by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tests that passed.
    pub passed: u32,
    /// Tests that failed.
    pub failed: u32,
    /// Tests that did not run because this machine lacks something.
    pub skipped: u32,
}

impl Tally {
    /// Adds the counts of another tally.
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Returns the tally of one test.
    pub fn check(passed: bool) -> Self {
        Self { passed: passed.into(), failed: (!passed).into(), skipped: 0 }
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Reads libtest's result line; ignored tests count as skipped.
///
/// "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s"
pub fn parse_result(line: &str) -> Option<Tally> {
    let (_, counts) = line.trim().strip_prefix("test result: ")?.split_once(". ")?;
    let count = |what: &str| {
        counts.split("; ").find_map(|part| part.strip_suffix(what)?.trim().parse().ok())
    };
    Some(Tally { passed: count("passed")?, failed: count("failed")?, skipped: count("ignored")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_read() {
        let line = "test result: FAILED. 5 passed; 2 failed; 1 ignored; 0 measured; \
                    0 filtered out; finished in 0.00s\n";
        assert_eq!(parse_result(line), Some(Tally { passed: 5, failed: 2, skipped: 1 }));
        assert_eq!(parse_result("test a::b ... ok"), None);
    }
}
