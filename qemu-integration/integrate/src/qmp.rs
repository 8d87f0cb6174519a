//! Client of the QEMU Machine Protocol (QMP).

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Timeout of an answer. QEMU answers at once, unless a vCPU holds its big lock.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Longest line of QEMU, in bytes. The largest answer, that to `query-qmp-schema`, has a tenth.
const MAX_LINE: usize = 4 << 20;

/// Number of events that are kept between commands. A VM can cause any number of them.
const MAX_EVENTS: usize = 1024;

/// Error of a monitor.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The monitor cannot be reached.
    #[error("Cannot connect to {path}: {error}")]
    Connect {
        /// Its path.
        path: String,
        /// The cause.
        error: io::Error,
    },
    /// Another program listens there, or the monitor serves another client.
    #[error("It is no QMP monitor, or another client uses it: {0}")]
    NoMonitor(String),
    /// The command failed.
    #[error("QEMU refused {command}: {text}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's message.
        text: String,
    },
    /// No answer, or no event.
    #[error("QEMU did not {what} within {seconds} s")]
    Silent {
        /// What was expected.
        what: String,
        /// Time limit.
        seconds: u64,
    },
    /// The connection ended.
    #[error("QEMU has ended{0}")]
    Ended(String),
    /// An answer that is no JSON.
    #[error("QEMU sent invalid JSON: {0}")]
    Json(#[from] serde_json::Error),
}

type Result<T> = std::result::Result<T, QmpError>;

fn ended(error: &io::Error) -> QmpError {
    QmpError::Ended(format!(": {error}"))
}

/// Connection with negotiated capabilities.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    line: Vec<u8>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects to the socket at `path`.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)
            .map_err(|error| QmpError::Connect { path: path.display().to_string(), error })?;
        let mut qmp =
            Self { reader: BufReader::new(stream), line: Vec::new(), events: VecDeque::new() };
        let greeting = qmp.next(Instant::now() + ANSWER_LIMIT)?;
        let greeting = greeting.ok_or_else(|| QmpError::NoMonitor("no greeting".into()))?;
        if greeting.get("QMP").is_none() {
            return Err(QmpError::NoMonitor(format!("the greeting is {greeting}")));
        }
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let mut request = json!({ "execute": command, "arguments": arguments }).to_string();
        request.push('\n');
        self.reader.get_mut().write_all(request.as_bytes()).map_err(|error| ended(&error))?;
        self.answer(command)
    }

    /// Passes a descriptor to QEMU, under a name for URIs such as `fd:NAME`.
    pub fn pass_descriptor(&mut self, name: &str, fd: impl AsFd) -> Result<()> {
        let command = "getfd";
        let mut request =
            json!({ "execute": command, "arguments": { "fdname": name } }).to_string();
        request.push('\n');
        let stream = self.reader.get_ref();
        let sent = stream.send_with_fd(request.as_bytes(), fd.as_fd().as_raw_fd());
        let sent = sent.map_err(|error| ended(&error.into()))?;
        let rest = &request.as_bytes()[sent..];
        self.reader.get_mut().write_all(rest).map_err(|error| ended(&error))?;
        self.answer(command).map(drop)
    }

    /// Runs a command of the human monitor and returns what it prints.
    pub fn human(&mut self, line: &str) -> Result<String> {
        let printed = self.execute("human-monitor-command", &json!({ "command-line": line }))?;
        Ok(printed.as_str().unwrap_or_default().to_owned())
    }

    fn answer(&mut self, command: &str) -> Result<Value> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        while let Some(mut message) = self.next(deadline)? {
            if let Some(value) = message.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = message.get("error") {
                let text = error.get("desc").and_then(Value::as_str).unwrap_or_default();
                let (command, text) = (command.to_owned(), text.to_owned());
                return Err(QmpError::Refused { command, text });
            }
            if self.events.len() == MAX_EVENTS {
                self.events.pop_front();
            }
            self.events.push_back(message);
        }
        Err(QmpError::Silent { what: format!("answer {command}"), seconds: ANSWER_LIMIT.as_secs() })
    }

    /// Waits for an event of this name and discards earlier events.
    pub fn wait_event(&mut self, name: &str, timeout: Duration) -> Result<Value> {
        let deadline = Instant::now() + timeout;
        loop {
            let event = match self.events.pop_front() {
                Some(event) => Some(event),
                None => self.next(deadline)?,
            };
            let Some(event) = event else {
                let what = format!("send the event {name}");
                return Err(QmpError::Silent { what, seconds: timeout.as_secs() });
            };
            if event.get("event").and_then(Value::as_str) == Some(name) {
                return Ok(event);
            }
        }
    }

    /// Discards the received events.
    pub fn drop_events(&mut self) {
        self.events.clear();
    }

    /// Returns the next message, or none after the deadline.
    fn next(&mut self, deadline: Instant) -> Result<Option<Value>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.reader.get_ref().set_read_timeout(Some(left)).map_err(|error| ended(&error))?;
            // A line may arrive in parts; `self.line` keeps the data received before a timeout.
            let room = (MAX_LINE - self.line.len()) as u64;
            match self.reader.by_ref().take(room).read_until(b'\n', &mut self.line) {
                Ok(0) if room == 0 => {
                    return Err(QmpError::NoMonitor(format!("a line beyond {MAX_LINE} bytes")));
                }
                Ok(0) => return Err(QmpError::Ended(String::new())),
                Ok(_) if self.line.ends_with(b"\n") => {
                    let message = serde_json::from_slice(&self.line);
                    self.line.clear();
                    return Ok(Some(message?));
                }
                Ok(_) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ended(&error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_end_is_refused() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let sending = std::thread::spawn(move || {
            let piece = [b' '; 16 << 10];
            while far.write_all(&piece).is_ok() {}
        });
        let mut qmp =
            Qmp { reader: BufReader::new(near), line: Vec::new(), events: VecDeque::new() };
        let error = qmp.next(Instant::now() + ANSWER_LIMIT).unwrap_err().to_string();
        assert!(error.ends_with("a line beyond 4194304 bytes"), "{error}");
        drop(qmp);
        sending.join().unwrap();
    }

    #[test]
    fn events_between_a_command_and_its_answer_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut stream = stream;
            stream.write_all(b"{\"QMP\": {}}\n").unwrap();
            assert!(lines.next().unwrap().unwrap().contains("qmp_capabilities"));
            stream.write_all(b"{\"return\": {}}\n").unwrap();
            assert!(lines.next().unwrap().unwrap().contains("system_reset"));
            stream.write_all(b"{\"event\": \"RESET\"}\n{\"ret").unwrap();
            stream.write_all(b"urn\": 7}\n").unwrap();
            lines.next().unwrap().unwrap();
            stream.write_all(b"{\"error\": {\"desc\": \"no such thing\"}}\n").unwrap();
        });
        let mut qmp = Qmp::connect(&path).unwrap();
        assert_eq!(qmp.execute("system_reset", &json!({})).unwrap(), json!(7));
        qmp.wait_event("RESET", Duration::from_secs(1)).unwrap();
        let error = qmp.execute("device_del", &json!({"id": "x"})).unwrap_err();
        assert_eq!(error.to_string(), "QEMU refused device_del: no such thing");
        let silent = qmp.wait_event("STOP", Duration::from_millis(10)).unwrap_err().to_string();
        assert!(
            silent == "QEMU did not send the event STOP within 0 s" || silent == "QEMU has ended"
        );
        server.join().unwrap();
    }

    /// Returns the error of a connection to a server that greets so.
    fn greeted(greeting: &'static [u8]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(greeting).unwrap();
        });
        let error = Qmp::connect(&path).unwrap_err().to_string();
        server.join().unwrap();
        error
    }

    #[test]
    fn what_is_no_monitor_is_told_apart() {
        let other = "It is no QMP monitor, or another client uses it: the greeting is {\"a\":1}";
        assert_eq!(greeted(b"{\"a\": 1}\n"), other);
        let text = greeted(b"SSH-2.0\n");
        assert!(text.starts_with("QEMU sent invalid JSON: "), "{text}");
        assert_eq!(greeted(b""), "QEMU has ended");
    }
}
