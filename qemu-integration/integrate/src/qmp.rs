//! Client of the QEMU Machine Protocol: enough to plug, unplug, reset and end a VM.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

/// Timeout of an answer. QEMU answers at once, unless a vCPU holds its big lock.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

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
            .with_context(|| format!("Cannot connect to {}", path.display()))?;
        let mut qmp =
            Self { reader: BufReader::new(stream), line: Vec::new(), events: VecDeque::new() };
        let greeting =
            qmp.next(Instant::now() + ANSWER_LIMIT)?.context("QEMU sends no greeting")?;
        if greeting.get("QMP").is_none() {
            bail!("Not a QMP socket: the greeting is {greeting}");
        }
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let mut request = json!({ "execute": command, "arguments": arguments }).to_string();
        request.push('\n');
        self.reader.get_mut().write_all(request.as_bytes()).context("QEMU has ended")?;
        let deadline = Instant::now() + ANSWER_LIMIT;
        while let Some(mut message) = self.next(deadline)? {
            if let Some(value) = message.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = message.get("error") {
                let text = error.get("desc").and_then(Value::as_str).unwrap_or_default();
                return Err(anyhow!("QEMU refused {command}: {text}"));
            }
            self.events.push_back(message);
        }
        bail!("QEMU did not answer {command} within {} s", ANSWER_LIMIT.as_secs())
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
                bail!("QEMU sent no {name} event within {} s", timeout.as_secs());
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
            self.reader.get_ref().set_read_timeout(Some(left))?;
            // A line may arrive in parts; `self.line` keeps the data received before a timeout.
            match self.reader.read_until(b'\n', &mut self.line) {
                Ok(0) => bail!("QEMU has ended"),
                Ok(_) if self.line.ends_with(b"\n") => {
                    let message = serde_json::from_slice(&self.line);
                    self.line.clear();
                    return message.map(Some).context("QEMU sent invalid JSON");
                }
                Ok(_) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("QEMU has ended"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(error.to_string().contains("no such thing"));
        server.join().unwrap();
    }
}
