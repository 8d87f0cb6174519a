//! Jobs: test programs with arguments, run side by side or alone.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::tally::{Failure, OutputReader, Tally};
use crate::heartbeat::INTERVAL;
use crate::progress;

/// A command that runs tests.
#[derive(Debug)]
pub struct Job {
    /// Heading of its output.
    pub title: String,
    /// The command.
    pub command: Command,
    /// Number of tests that the command ignores because another job runs them.
    pub ignored: u32,
    /// The command is a test itself.
    pub is_test: bool,
}

/// Jobs that run in this order, some of them at a time.
#[derive(Debug)]
pub struct Queue {
    /// The jobs.
    pub jobs: Vec<Job>,
    /// Number of jobs that run at a time.
    pub slots: usize,
}

/// Result of a job.
#[derive(Debug)]
pub struct Finished {
    /// Heading of its output.
    pub title: String,
    /// Everything that the command printed.
    pub output: Vec<u8>,
    /// Its tests.
    pub result: Tested,
    /// Wall-clock time.
    pub took: Duration,
}

/// Tests of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tested {
    /// Their number.
    pub tally: Tally,
    /// Those that failed, as far as their output says.
    pub failures: Vec<Failure>,
}

impl Tested {
    /// Returns the result of one test that failed.
    pub fn failed(failure: Failure) -> Self {
        Self { tally: Tally::check(false), failures: vec![failure] }
    }

    /// Adds the tests of another job.
    pub fn add(&mut self, other: Self) {
        self.tally.add(other.tally);
        self.failures.extend(other.failures);
    }
}

impl From<Tally> for Tested {
    fn from(tally: Tally) -> Self {
        Self { tally, failures: Vec::new() }
    }
}

/// Progress of the jobs that run side by side.
enum Event {
    Started(String),
    Finished(Finished),
}

impl Job {
    /// Creates a job whose command runs all its tests.
    pub fn new(title: impl Into<String>, command: Command) -> Self {
        Self { title: title.into(), command, ignored: 0, is_test: false }
    }

    /// Runs the command, copies its output to `output` as it comes, and adds up the result lines.
    pub fn run(self, output: &mut dyn Write) -> Result<Tested> {
        let mut command = self.command;
        let (reader, writer) = std::io::pipe().context("Cannot make a pipe")?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let mut child = command.spawn().with_context(|| format!("Cannot run {command:?}"))?;
        // The command holds the pipe's other end, which would keep the pipe open.
        drop(command);
        let mut results = OutputReader::default();
        let mut lines = BufReader::new(reader);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            output.write_all(&line)?;
            results.line(&String::from_utf8_lossy(&line));
            line.clear();
        }
        let OutputReader { mut tally, said_skipped, failures, .. } = results;
        tally.skipped = tally.skipped.saturating_sub(self.ignored);
        // libtest counts a test that skips itself as passed.
        let skipped = said_skipped.min(tally.passed);
        tally.passed -= skipped;
        tally.skipped += skipped;
        let status = child.wait()?;
        tally.passed += u32::from(self.is_test && status.success());
        if !status.success() && tally.failed == 0 {
            writeln!(output, "The tests ended with {status}")?;
            tally.failed += 1;
        }
        Ok(Tested { tally, failures })
    }

    /// Runs the command and keeps its output. An error counts as a failed test.
    pub fn run_buffered(self) -> Finished {
        let (title, start) = (self.title.clone(), Instant::now());
        let mut output = Vec::new();
        let result = self.run(&mut output).unwrap_or_else(|error| {
            output.extend_from_slice(format!("error: {error:#}\n").as_bytes());
            Tally::check(false).into()
        });
        Finished { title, output, result, took: start.elapsed() }
    }
}

/// Runs the jobs of all queues.
///
/// `report` gets each finished job. Jobs that start, and jobs that run for long, are named on
/// standard output.
pub fn run_side_by_side(queues: Vec<Queue>, mut report: impl FnMut(Finished)) {
    let (sender, events) = mpsc::channel();
    thread::scope(|scope| {
        let mut next_report = Instant::now() + INTERVAL;
        for Queue { jobs, slots } in queues {
            let queue = Arc::new(Mutex::new(jobs.into_iter()));
            for _ in 0..slots {
                let (sender, queue) = (sender.clone(), Arc::clone(&queue));
                let next = move || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                scope.spawn(move || {
                    while let Some(job) = next() {
                        // The receiver lives until all senders are gone.
                        let _ = sender.send(Event::Started(job.title.clone()));
                        let _ = sender.send(Event::Finished(job.run_buffered()));
                    }
                });
            }
        }
        drop(sender);
        let mut running: Vec<(String, Instant)> = Vec::new();
        loop {
            let wait = next_report.saturating_duration_since(Instant::now());
            match events.recv_timeout(wait) {
                Ok(Event::Started(title)) => {
                    println!("... {title}");
                    running.push((title, Instant::now()));
                }
                Ok(Event::Finished(finished)) => {
                    running.retain(|(title, _)| *title != finished.title);
                    report(finished);
                }
                Err(RecvTimeoutError::Timeout) => {
                    for (title, since) in &running {
                        println!("{}", progress::running(title, since.elapsed(), ""));
                    }
                    next_report = Instant::now() + INTERVAL;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(title: &str, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job::new(title, command)
    }

    #[test]
    fn a_program_that_dies_without_a_result_has_failed() {
        let Tested { tally, .. } =
            shell("dies", "echo running; exit 3").run(&mut Vec::new()).unwrap();
        assert_eq!(tally, Tally { passed: 0, failed: 1, skipped: 0 });
    }

    #[test]
    fn a_command_that_is_a_test_counts() {
        let run = |script| {
            let job = Job { is_test: true, ..shell("checks", script) };
            job.run(&mut Vec::new()).unwrap().tally
        };
        assert_eq!(run("true"), Tally { passed: 1, failed: 0, skipped: 0 });
        assert_eq!(run("false"), Tally { passed: 0, failed: 1, skipped: 0 });
    }

    #[test]
    fn a_test_that_says_it_was_skipped_has_not_passed() {
        let result = "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out";
        let lines = "skipped: no /dev/kvm\ntest shares::b ... skipped: no /dev/nvidiactl";
        let script = format!("echo '{lines}'; echo '{result}'");
        let Tested { tally, .. } = shell("skips", &script).run(&mut Vec::new()).unwrap();
        assert_eq!(tally, Tally { passed: 1, failed: 0, skipped: 3 });
        let another_runs_it = Job { ignored: 1, ..shell("skips", &script) };
        let Tested { tally, .. } = another_runs_it.run(&mut Vec::new()).unwrap();
        assert_eq!(tally, Tally { passed: 1, failed: 0, skipped: 2 });
    }

    #[test]
    fn output_of_jobs_side_by_side_is_in_one_piece() {
        let script = |name: &str| format!("for n in 1 2 3; do echo {name} $n; sleep 0.02; done");
        let jobs = ["a", "b", "c"].map(|name| shell(name, &script(name)));
        let [a, b, c] = jobs;
        let queues = vec![Queue { jobs: vec![a], slots: 1 }, Queue { jobs: vec![b, c], slots: 2 }];
        let mut outputs = Vec::new();
        run_side_by_side(queues, |finished| {
            outputs.push(String::from_utf8(finished.output).unwrap());
        });
        outputs.sort();
        assert_eq!(outputs, ["a 1\na 2\na 3\n", "b 1\nb 2\nb 3\n", "c 1\nc 2\nc 3\n"]);
    }
}
