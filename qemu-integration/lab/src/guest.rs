//! Commands inside a VM over its second serial port, executed by the loop in `agent.sh`.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Line that the guest sends when it accepts commands.
const BOOTED: &str = "@boot";
/// Extra timeout for the round trip of a command.
const ROUND_TRIP: Duration = Duration::from_secs(10);

/// Command line of a running guest.
#[derive(Debug)]
pub struct Guest {
    stream: UnixStream,
    received: Vec<u8>,
    last: u64,
}

/// Result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Exit status; 137 if the command was killed on timeout.
    pub status: i32,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl From<std::process::Output> for Output {
    /// Converts the output of a host process; the status is -1 if a signal ended the process.
    fn from(output: std::process::Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            status: output.status.code().unwrap_or(-1),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        }
    }
}

impl Output {
    /// Returns the result if the command succeeded, or an error.
    pub fn success(self) -> Result<Self> {
        if self.status != 0 {
            let text = format!("{} {}", self.stderr.trim(), self.stdout.trim());
            bail!("A command in the guest failed with status {}: {}", self.status, text.trim());
        }
        Ok(self)
    }
}

/// Returns the last items of a list, at most `count`.
pub(crate) fn last<T>(all: &[T], count: usize) -> &[T] {
    &all[all.len().saturating_sub(count)..]
}

/// Returns the last lines of a text, at most `count`.
pub(crate) fn last_lines(text: &str, count: usize) -> String {
    last(&text.lines().collect::<Vec<_>>(), count).join("\n")
}

impl Guest {
    /// Connects to the serial port's socket.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)
            .with_context(|| format!("Cannot connect to {}", path.display()))?;
        Ok(Self { stream, received: Vec::new(), last: 0 })
    }

    /// Waits until the guest has booted or rebooted.
    pub fn wait_boot(&mut self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let Some(line) = self.line(deadline)? else {
                bail!("The guest did not boot within {} s", timeout.as_secs());
            };
            if line == BOOTED {
                return Ok(());
            }
        }
    }

    /// Runs a shell command and kills it on timeout.
    pub fn run(&mut self, command: &str, timeout: Duration) -> Result<Output> {
        self.start(command, timeout)?;
        self.finish(timeout).with_context(|| format!("While the guest ran `{command}`"))
    }

    /// Runs a command that must succeed and print JSON.
    pub fn run_json(&mut self, command: &str, timeout: Duration) -> Result<Value> {
        let output = self.run(command, timeout)?.success().with_context(|| command.to_owned())?;
        serde_json::from_str(&output.stdout)
            .with_context(|| format!("`{command}` printed no JSON: {}", output.stdout))
    }

    /// Sends a command without waiting; [`Guest::finish`] waits.
    pub fn start(&mut self, command: &str, timeout: Duration) -> Result<()> {
        if command.contains('\n') {
            bail!("A guest's command must be one line");
        }
        self.last += 1;
        let request = format!("#{} {} {command}\n", self.last, timeout.as_secs().max(1));
        self.stream.write_all(request.as_bytes()).context("The VM has ended")
    }

    /// Waits for the command that was started last.
    pub fn finish(&mut self, timeout: Duration) -> Result<Output> {
        let deadline = Instant::now() + timeout + ROUND_TRIP;
        let wanted = format!("@{}", self.last);
        loop {
            let Some(line) = self.line(deadline)? else {
                bail!("The guest did not answer within {} s", (timeout + ROUND_TRIP).as_secs());
            };
            let mut words = line.split(' ');
            let number = words.next().unwrap_or_default();
            let numbers: Option<Vec<usize>> = words.map(|word| word.parse().ok()).collect();
            match numbers.as_deref() {
                Some(&[status, out, err]) if number.starts_with('@') => {
                    let stdout = self.bytes(out, deadline)?;
                    let stderr = self.bytes(err, deadline)?;
                    if number == wanted {
                        return Ok(Output {
                            status: i32::try_from(status).unwrap_or(-1),
                            stdout,
                            stderr,
                        });
                    }
                }
                _ if line == BOOTED => bail!("The guest rebooted"),
                _ => {}
            }
        }
    }

    fn line(&mut self, deadline: Instant) -> Result<Option<String>> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line).trim().to_owned()));
            }
            if !self.fill(deadline)? {
                return Ok(None);
            }
        }
    }

    fn bytes(&mut self, count: usize, deadline: Instant) -> Result<String> {
        while self.received.len() < count {
            if !self.fill(deadline)? {
                bail!("The guest stopped in the middle of its answer");
            }
        }
        let bytes: Vec<u8> = self.received.drain(..count).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Receives available data; returns false after the deadline.
    fn fill(&mut self, deadline: Instant) -> Result<bool> {
        let mut buffer = [0; 4096];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut buffer) {
                Ok(0) => bail!("The VM has ended"),
                Ok(count) => {
                    self.received.extend_from_slice(&buffer[..count]);
                    return Ok(true);
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                    _ => return Err(error).context("The VM has ended"),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_answers_and_noise_are_skipped() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut guest = Guest { stream: ours, received: Vec::new(), last: 4 };
        theirs.write_all(b"\r\nnoise\n@4 0 3 0\nold@5 2 3 4\nout").unwrap();
        theirs.write_all(b"err\n").unwrap();
        let output = guest.run("true", Duration::from_secs(1)).unwrap();
        assert_eq!(
            output,
            Output { status: 2, stdout: "out".to_owned(), stderr: "err\n".to_owned() }
        );
        let mut request = [0; 64];
        let count = theirs.read(&mut request).unwrap();
        assert_eq!(&request[..count], b"#5 1 true\n");
    }
}
