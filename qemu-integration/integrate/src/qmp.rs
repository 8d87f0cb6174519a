//! Client of the QEMU Machine Protocol (QMP).

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use mdev_core::untrusted;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Timeout of an answer. QEMU answers at once, unless a vCPU holds its big lock.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Longest line of QEMU, in bytes. The largest answer, that to `query-qmp-schema`, has less than
/// half. A parsed answer may need ninety times its length in memory.
const MAX_LINE: usize = 1 << 20;

/// Limit of the lines between a command and its answer, in bytes. An event has some 100.
const MAX_BEFORE_ANSWER: usize = 1 << 20;

/// Number of events that are kept between commands. A VM can cause any number of them.
const MAX_EVENTS: usize = 1024;

/// Longest name of an event that is kept, in bytes. QEMU's longest has half.
const MAX_EVENT_NAME: usize = 64;

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
    /// Events without end instead of an answer. The connection is ended.
    #[error("QEMU sent {MAX_BEFORE_ANSWER} bytes of events and no answer to {0}")]
    Flood(String),
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

/// What is used of a message of QEMU. A VM's process chooses what it sends, and what is not used
/// is not kept.
#[derive(Debug, Deserialize)]
struct Message {
    #[serde(rename = "QMP")]
    greeting: Option<IgnoredAny>,
    event: Option<String>,
    #[serde(rename = "return", default, deserialize_with = "present")]
    result: Option<Value>,
    error: Option<Refusal>,
}

/// QEMU's error.
#[derive(Debug, Deserialize)]
struct Refusal {
    #[serde(default)]
    desc: String,
}

/// Tells a value of `null` from no value.
fn present<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<Value>, D::Error> {
    Value::deserialize(from).map(Some)
}

/// Connection with negotiated capabilities.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    /// The last line, or the part of the next one that has come.
    line: Vec<u8>,
    /// Names of events.
    events: VecDeque<String>,
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
        if greeting.greeting.is_none() {
            let greeting = String::from_utf8_lossy(&qmp.line);
            let greeting = untrusted::message(greeting.trim_end());
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
        let mut before = 0;
        while let Some(message) = self.next(deadline)? {
            if let Some(value) = message.result {
                return Ok(value);
            }
            let command = || command.to_owned();
            if let Some(Refusal { desc }) = message.error {
                let text = untrusted::message(&desc);
                return Err(QmpError::Refused { command: command(), text });
            }
            before += self.line.len();
            if before > MAX_BEFORE_ANSWER {
                // The other end may be gone already.
                let _ = self.reader.get_ref().shutdown(Shutdown::Both);
                return Err(QmpError::Flood(command()));
            }
            if let Some(name) = message.event.filter(|name| name.len() <= MAX_EVENT_NAME) {
                if self.events.len() == MAX_EVENTS {
                    self.events.pop_front();
                }
                self.events.push_back(name);
            }
        }
        Err(QmpError::Silent { what: format!("answer {command}"), seconds: ANSWER_LIMIT.as_secs() })
    }

    /// Waits for an event of this name and discards earlier events.
    pub fn wait_event(&mut self, name: &str, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let event = if let Some(event) = self.events.pop_front() {
                Some(event)
            } else if let Some(message) = self.next(deadline)? {
                message.event
            } else {
                let what = format!("send the event {name}");
                return Err(QmpError::Silent { what, seconds: timeout.as_secs() });
            };
            if event.as_deref() == Some(name) {
                return Ok(());
            }
        }
    }

    /// Discards the received events.
    pub fn drop_events(&mut self) {
        self.events.clear();
    }

    /// Returns the next message, or none after the deadline.
    fn next(&mut self, deadline: Instant) -> Result<Option<Message>> {
        if self.line.ends_with(b"\n") {
            self.line.clear();
        }
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
                    return Ok(Some(serde_json::from_slice(&self.line)?));
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
        assert!(error.ends_with("a line beyond 1048576 bytes"), "{error}");
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

    #[test]
    fn events_without_end_end_the_connection_and_are_not_kept() {
        let (near, far) = UnixStream::pair().unwrap();
        let mut qmp =
            Qmp { reader: BufReader::new(near), line: Vec::new(), events: VecDeque::new() };
        let sending = std::thread::spawn(move || {
            let mut far = &far;
            let data = "{\"\":0},".repeat(8 << 10);
            let name = "x".repeat(MAX_EVENT_NAME);
            while far
                .write_all(format!("{{\"event\":\"{name}\",\"data\":[{data}0]}}\n").as_bytes())
                .is_ok()
            {
                far.write_all(b"{\"event\":\"STOP\"}\n{\"no\":\"event\"}\n").unwrap_or_default();
            }
        });
        let error = qmp.execute("query-status", &json!({})).unwrap_err().to_string();
        assert_eq!(error, "QEMU sent 1048576 bytes of events and no answer to query-status");
        sending.join().unwrap();
        assert!(qmp.events.iter().all(|name| name.len() <= MAX_EVENT_NAME), "{:?}", qmp.events);
        assert!(qmp.execute("cont", &json!({})).is_err(), "the connection has ended");
    }

    #[test]
    fn the_latest_events_are_kept_by_their_names() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut qmp =
            Qmp { reader: BufReader::new(near), line: Vec::new(), events: VecDeque::new() };
        let sending = std::thread::spawn(move || {
            let mut lines = "{\"event\":\"OLD\"}\n{\"event\":\"STOP\",\"data\":{}}\n".to_owned();
            lines += &"{\"event\":\"NEW\"}\n".repeat(MAX_EVENTS - 1);
            far.write_all(lines.as_bytes()).unwrap();
            let long = "x".repeat(MAX_EVENT_NAME + 1);
            writeln!(far, "{{\"event\":\"{long}\"}}\n{{\"return\":null}}").unwrap();
        });
        assert_eq!(qmp.execute("qom-get", &json!({})).unwrap(), Value::Null);
        sending.join().unwrap();
        assert_eq!(qmp.events.len(), MAX_EVENTS);
        assert_eq!(qmp.events[0], "STOP");
        assert!(qmp.events.iter().skip(1).all(|name| name == "NEW"));
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
        let other = "It is no QMP monitor, or another client uses it: the greeting is {\"a\": 1}";
        assert_eq!(greeted(b"{\"a\": 1}\n"), other);
        let long: &[u8] = b"{\"x\": \"  vgpuctl: forged   vgpuctl: forged\"}\n";
        let long = [&long[..9], &b" spaces  ".repeat(1 << 15), &long[9..]].concat();
        let text = greeted(long.leak());
        assert!(text.len() < 600 && !text.contains("  "), "{text}");
        let text = greeted(b"SSH-2.0\n");
        assert!(text.starts_with("QEMU sent invalid JSON: "), "{text}");
        assert_eq!(greeted(b""), "QEMU has ended");
    }
}
