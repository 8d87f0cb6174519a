//! Counts of tests and what failed tests printed, from libtest's output.

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

/// A test that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Name of the test.
    pub name: String,
    /// First lines of what it printed.
    pub output: Vec<String>,
}

impl Failure {
    /// Maximum number of lines that are kept of a test's output.
    const MAX_LINES: usize = 30;

    /// Returns a failure without output.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), output: Vec::new() }
    }
}

/// Reader of libtest's output.
#[derive(Debug, Default)]
pub struct OutputReader {
    /// Results so far. Ignored tests count as skipped.
    pub tally: Tally,
    /// Number of tests that said that they were skipped.
    pub said_skipped: u32,
    /// Failed tests whose output libtest has printed.
    pub failures: Vec<Failure>,
    /// Lines are the output of the last failure.
    in_failure: bool,
}

impl OutputReader {
    /// Reads the next line, with or without its line end.
    pub fn line(&mut self, line: &str) {
        let line = line.trim_end();
        let name = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"));
        if let Some(name) = name {
            self.failures.push(Failure::new(name));
            self.in_failure = true;
        } else if line == "failures:" {
            self.in_failure = false;
        } else if self.in_failure {
            // A test may have run libtest itself: its results are part of this test's output.
            if let Some(failure) = self.failures.last_mut()
                && failure.output.len() < Failure::MAX_LINES
                && !line.is_empty()
            {
                failure.output.push(line.to_owned());
            }
        } else if let Some(result) = parse_result(line) {
            self.tally.add(result);
        } else {
            // With one thread, libtest has printed the test's name in the same line.
            let skipped = line.starts_with("skipped: ") || line.contains(" ... skipped: ");
            self.said_skipped += u32::from(skipped);
        }
    }
}

/// Reads libtest's result line.
///
/// "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s"
fn parse_result(line: &str) -> Option<Tally> {
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

    #[test]
    fn failures_are_listed_with_their_output() {
        const OUTPUT: &str = "
running 2 tests
test a ... ok
test b ... FAILED

failures:

---- b stdout ----

thread 'b' panicked at tests/b.rs:3:5:
running 1 test
test inside ... FAILED
test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.1s


failures:
    b

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.2s
";
        let mut reader = OutputReader::default();
        OUTPUT.lines().for_each(|line| reader.line(line));
        assert_eq!(reader.tally, Tally { passed: 1, failed: 1, skipped: 0 });
        let [Failure { name, output }] = &reader.failures[..] else { panic!("{reader:?}") };
        assert_eq!((name.as_str(), output.len()), ("b", 4));
        assert!(output[0].ends_with("tests/b.rs:3:5:"), "{output:?}");
    }
}
