//! Keyboard and pointer of a VM, through QEMU's monitor (QMP).
//!
//! A vGPU has a display only; keyboard and pointer belong to its VM. Events go to the monitor that
//! the operator names, if the process that listens there is the VM that is attached to the vGPU. A
//! wrong path cannot send keys to another VM, or make `vgpud` talk to unrelated sockets.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use mdev_core::untrusted;
use serde_json::{Value, json};
use tokio::io::{
    AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader, WriteHalf,
};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::qemu_keys;
use crate::foreign_stream::ForeignStream;

/// Timeout of the monitor. QEMU answers at once, unless another client is connected.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Limit of what QEMU sends until the input works, in bytes: some hundred bytes are usual.
const MAX_GREETING: u64 = 64 << 10;

/// What QEMU may send at once, and in a second, after that: answers of 20 bytes, and events.
const BURST: usize = 1 << 20;
const BYTES_PER_SECOND: usize = 64 << 10;

/// Maximum number of keys held at the same time.
const MAX_HELD: usize = 32;

/// QEMU's names of RFB's pointer buttons, by bit.
const BUTTONS: [&str; 8] =
    ["left", "middle", "right", "wheel-up", "wheel-down", "wheel-left", "wheel-right", "side"];

/// Largest coordinate of an absolute pointer.
const MAX_ABSOLUTE: u32 = 0x7fff;

/// Keyboard and pointer of a VM, for one viewer.
#[derive(Debug)]
pub struct QmpInput {
    writer: WriteHalf<ForeignStream>,
    reader: JoinHandle<()>,
    /// Whether the VM has an absolute pointer (a tablet). A mouse gets relative motion.
    absolute: bool,
    held: Vec<Value>,
    buttons: u8,
    at: Option<(u16, u16)>,
}

impl QmpInput {
    /// Connects to the monitor at `path`, which must belong to process `vm`.
    pub async fn open(path: &Path, vm: i32) -> io::Result<Self> {
        match timeout(TIMEOUT, Self::greet(path, vm)).await {
            Ok(opened) => opened,
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it does not answer; a monitor serves one client at a time, so give the VM another one",
            )),
        }
    }

    async fn greet(path: &Path, vm: i32) -> io::Result<Self> {
        let stream = ForeignStream::connect_without_fds(path)?;
        let listener = stream.peer_cred()?.pid().unwrap_or_default();
        if listener != vm {
            return Err(io::Error::other(format!(
                "it belongs to process {listener}, and the vGPU's VM is process {vm}; name that VM's monitor"
            )));
        }
        let (reader, writer) = tokio::io::split(stream);
        // A VM that was taken over can be its monitor.
        let mut reader = BufReader::new(reader.take(MAX_GREETING));
        let greeting = read_line(&mut reader).await?;
        if greeting.get("QMP").is_none() {
            return Err(io::Error::other("it is not a QMP monitor; give the VM one with -qmp"));
        }
        let mut monitor = Self {
            writer,
            reader: tokio::spawn(async {}),
            absolute: false,
            held: Vec::new(),
            buttons: 0,
            at: None,
        };
        monitor.execute("qmp_capabilities", &json!({})).await?;
        read_result(&mut reader).await?;
        monitor.execute("query-mice", &json!({})).await?;
        let mice = read_result(&mut reader).await?;
        let mice = mice.as_array().map(Vec::as_slice).unwrap_or_default();
        monitor.absolute =
            mice.iter().any(|mouse| mouse["current"] == true && mouse["absolute"] == true);
        monitor.reader = tokio::spawn(discard(reader.into_inner().into_inner()));
        Ok(monitor)
    }

    async fn execute(&mut self, command: &str, arguments: &Value) -> io::Result<()> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.writer.write_all(line.as_bytes()).await
    }

    async fn send(&mut self, events: &[Value]) -> io::Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        if self.reader.is_finished() {
            let why = "the VM's monitor has closed the connection, or sends too much";
            return Err(io::Error::other(why));
        }
        self.execute("input-send-event", &json!({ "events": events })).await
    }

    /// Sends a key by its keysym. Keysyms that a US keyboard lacks are ignored.
    pub async fn key(&mut self, down: bool, keysym: u32) -> io::Result<()> {
        match qemu_keys::qcode(keysym) {
            Some(name) => self.press(down, json!({ "type": "qcode", "data": name })).await,
            None => Ok(()),
        }
    }

    /// Sends a key by its scan code.
    pub async fn scan_code(&mut self, down: bool, code: u32) -> io::Result<()> {
        if !(1..0x100).contains(&code) {
            return Ok(());
        }
        self.press(down, json!({ "type": "number", "data": code })).await
    }

    async fn press(&mut self, down: bool, key: Value) -> io::Result<()> {
        let held = self.held.iter().position(|held| *held == key);
        match (down, held) {
            (true, None) if self.held.len() == MAX_HELD => return Ok(()),
            (true, None) => self.held.push(key.clone()),
            (false, Some(place)) => drop(self.held.swap_remove(place)),
            // A held key repeats. A key that is not held needs no release.
            (true, Some(_)) => {}
            (false, None) => return Ok(()),
        }
        self.send(&[json!({ "type": "key", "data": { "down": down, "key": key } })]).await
    }

    /// Sends the pointer's position and buttons, on a screen of this size.
    pub async fn pointer(
        &mut self,
        buttons: u8,
        at: (u16, u16),
        size: (u32, u32),
    ) -> io::Result<()> {
        let mut events = Vec::new();
        let last = self.at.replace(at);
        if last != Some(at) {
            let axes =
                [("x", at.0, last.map(|l| l.0), size.0), ("y", at.1, last.map(|l| l.1), size.1)];
            for (axis, now, before, length) in axes {
                if self.absolute {
                    let far = length.saturating_sub(1).max(1);
                    let value = u32::from(now).min(far) * MAX_ABSOLUTE / far;
                    events.push(json!({ "type": "abs", "data": { "axis": axis, "value": value } }));
                } else if let Some(before) = before.filter(|before| *before != now) {
                    let value = i32::from(now) - i32::from(before);
                    events.push(json!({ "type": "rel", "data": { "axis": axis, "value": value } }));
                }
            }
        }
        for (bit, name) in BUTTONS.iter().enumerate() {
            let (down, was) = (buttons >> bit & 1 == 1, self.buttons >> bit & 1 == 1);
            if down != was {
                events.push(json!({ "type": "btn", "data": { "down": down, "button": name } }));
            }
        }
        self.buttons = buttons;
        self.send(&events).await
    }

    /// Releases all keys and buttons, and disconnects.
    pub async fn release(mut self) {
        let mut events: Vec<_> = std::mem::take(&mut self.held)
            .into_iter()
            .map(|key| json!({ "type": "key", "data": { "down": false, "key": key } }))
            .collect();
        let buttons = BUTTONS.iter().enumerate().filter(|(bit, _)| self.buttons >> bit & 1 == 1);
        events.extend(
            buttons.map(
                |(_, name)| json!({ "type": "btn", "data": { "down": false, "button": name } }),
            ),
        );
        let release = async {
            self.send(&events).await?;
            self.writer.shutdown().await?;
            // QEMU closes the connection after the last command.
            let _ = (&mut self.reader).await;
            io::Result::Ok(())
        };
        let _ = timeout(TIMEOUT, release).await;
    }
}

impl Drop for QmpInput {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Reads the next message from QEMU.
async fn read_line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Value> {
    let mut line = Vec::new();
    reader.read_until(b'\n', &mut line).await?;
    match line.last() {
        None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it has closed the connection")),
        Some(b'\n') => Ok(serde_json::from_slice(&line)?),
        Some(_) => Err(io::Error::other("it sends too much, or has closed the connection")),
    }
}

/// Reads the result of a command, and skips events.
async fn read_result(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Value> {
    loop {
        let mut message = read_line(reader).await?;
        if let Some(value) = message.get_mut("return") {
            return Ok(value.take());
        }
        if let Some(error) = message.get("error") {
            let refused = format!("QEMU refuses: {}", error["desc"]);
            return Err(io::Error::other(untrusted::message(&refused)));
        }
    }
}

/// Reads and discards QEMU's messages, so that its output buffer stays empty. Ends if there are too
/// many: QEMU then waits for a reader, and its VM has no input.
async fn discard(mut reader: impl AsyncRead + Unpin) {
    let mut bytes = vec![0; 8 << 10];
    let (mut left, mut updated) = (BURST, Instant::now());
    while let Ok(read @ 1..) = reader.read(&mut bytes).await {
        let earned = updated.elapsed().as_millis() as usize * BYTES_PER_SECOND / 1000;
        if earned > 0 {
            (left, updated) = (left.saturating_add(earned).min(BURST), Instant::now());
        }
        let Some(less) = left.checked_sub(read) else {
            log::debug!("A monitor sends too much: its connection is not read any more");
            return;
        };
        left = less;
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    /// Serves a monitor and returns the received input events.
    async fn qemu(listener: UnixListener, tablet: bool) -> Vec<Value> {
        let (stream, _) = listener.accept().await.unwrap();
        let (reader, mut writer) = stream.into_split();
        let mut reader = BufReader::new(reader);
        writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
        let mut events = Vec::new();
        while let Ok(command) = read_line(&mut reader).await {
            let result = match command["execute"].as_str().unwrap() {
                "query-mice" => json!([{ "current": true, "absolute": tablet }]),
                "input-send-event" => {
                    let list = command["arguments"]["events"].as_array().unwrap();
                    events.extend(list.iter().cloned());
                    json!({})
                }
                _ => json!({}),
            };
            // The client may have disconnected.
            let _ = writer.write_all(b"{\"event\": \"NOTHING\"}\n").await;
            let answer = format!("{}\n", json!({ "return": result }));
            let _ = writer.write_all(answer.as_bytes()).await;
        }
        events
    }

    async fn events(tablet: bool, used: impl AsyncFnOnce(&mut QmpInput)) -> Vec<Value> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let qemu = tokio::spawn(qemu(UnixListener::bind(&path).unwrap(), tablet));
        let mut monitor = QmpInput::open(&path, std::process::id().cast_signed()).await.unwrap();
        used(&mut monitor).await;
        monitor.release().await;
        qemu.await.unwrap()
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(future)
    }

    fn key(name: &str, down: bool) -> Value {
        let key = json!({ "type": "qcode", "data": name });
        json!({ "type": "key", "data": { "down": down, "key": key } })
    }

    #[test]
    fn keys_are_pressed_and_released() {
        let events = run(events(true, async |monitor| {
            monitor.key(true, 0xffe1).await.unwrap();
            monitor.key(true, u32::from(b'A')).await.unwrap();
            monitor.key(false, u32::from(b'a')).await.unwrap();
            monitor.key(false, u32::from(b'x')).await.unwrap();
            monitor.key(true, 0x0100_1234).await.unwrap();
        }));
        let expected = [("shift", true), ("a", true), ("a", false), ("shift", false)];
        assert_eq!(events, expected.map(|(name, down)| key(name, down)));
    }

    #[test]
    fn tablet_gets_absolute_positions() {
        let events = run(events(true, async |monitor| {
            monitor.pointer(0, (0, 599), (800, 600)).await.unwrap();
            monitor.pointer(1, (0, 599), (800, 600)).await.unwrap();
            monitor.pointer(0, (u16::MAX, 0), (1, 1)).await.unwrap();
        }));
        let abs = |axis: &str, value: u32| json!({ "type": "abs", "data": { "axis": axis, "value": value } });
        let left =
            |down: bool| json!({ "type": "btn", "data": { "down": down, "button": "left" } });
        let expected = [
            abs("x", 0),
            abs("y", MAX_ABSOLUTE),
            left(true),
            abs("x", MAX_ABSOLUTE),
            abs("y", 0),
            left(false),
        ];
        assert_eq!(events, expected);
    }

    #[test]
    fn mouse_gets_relative_motion() {
        let events = run(events(false, async |monitor| {
            monitor.pointer(0, (10, 10), (800, 600)).await.unwrap();
            monitor.pointer(0, (7, 10), (800, 600)).await.unwrap();
        }));
        assert_eq!(events, [json!({ "type": "rel", "data": { "axis": "x", "value": -3 } })]);
    }

    #[test]
    fn monitor_of_another_process_is_refused() {
        run(async {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("qmp");
            let _listener = UnixListener::bind(&path).unwrap();
            let error = QmpInput::open(&path, 1).await.unwrap_err().to_string();
            assert!(error.contains("name that VM's monitor"), "{error}");
        });
    }

    #[test]
    fn errors_tell_other_sockets_from_refusing_monitors() {
        for (sent, reason) in [
            ("", "it has closed the connection"),
            ("{}\n", "it is not a QMP monitor; give the VM one with -qmp"),
            ("{\"QMP\":{}}\n{\"error\":{\"desc\":\"no\"}}\n", "QEMU refuses: \"no\""),
        ] {
            run(async {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("qmp");
                let listener = UnixListener::bind(&path).unwrap();
                let other = async {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    // The client may have disconnected.
                    let _ = stream.write_all(sent.as_bytes()).await;
                    let _ = stream.shutdown().await;
                    stream
                };
                let own = std::process::id().cast_signed();
                let (opened, _stream) = tokio::join!(QmpInput::open(&path, own), other);
                assert_eq!(opened.unwrap_err().to_string(), reason);
            });
        }
    }

    /// Serves a monitor that sends `begin`, then events without end. Returns what `body` returns.
    fn flooded<T>(begin: &str, body: impl AsyncFnOnce(io::Result<QmpInput>) -> T) -> T {
        run(async {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("qmp");
            let listener = UnixListener::bind(&path).unwrap();
            let flood = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(begin.as_bytes()).await.unwrap();
                // The manager may have disconnected.
                while stream.write_all(b"{\"event\": [0, 0, 0, 0, 0, 0, 0]}\n").await.is_ok() {}
                std::future::pending::<T>().await
            };
            let own = std::process::id().cast_signed();
            tokio::select! {
                _ = flood => unreachable!(),
                done = async { body(QmpInput::open(&path, own).await).await } => done,
            }
        })
    }

    #[test]
    fn a_monitor_that_sends_events_without_end_is_not_opened() {
        let error = flooded("{\"QMP\": {}}\n", async |opened| opened.unwrap_err());
        assert!(error.to_string().starts_with("it sends too much"), "{error}");
    }

    #[test]
    fn a_monitor_that_floods_loses_its_input() {
        let begin = "{\"QMP\": {}}\n{\"return\": {}}\n{\"return\": []}\n";
        let error = flooded(begin, async |opened| {
            let mut monitor = opened.unwrap();
            let ended = timeout(Duration::from_secs(60), &mut monitor.reader).await;
            ended.expect("the flood goes on").unwrap();
            monitor.key(true, u32::from(b'a')).await.unwrap_err()
        });
        assert!(error.to_string().ends_with("sends too much"), "{error}");
    }

    #[test]
    fn a_monitor_that_attaches_descriptors_does_not_stop_the_runtime() {
        use crate::foreign_stream::tests::on_a_thread;
        use foreign_fds::testing::{lingering, pass};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let monitor = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut peers = Vec::new();
            // From Linux 6.16 on, the kernel refuses them. Two are not read.
            for line in [&b"{\"QMP\": {}}\n"[..], b"\n", b"\n"] {
                let (socket, peer) = lingering();
                let refused = pass(&stream, line, socket).is_err();
                peers.push(peer);
                // The connection ends because of the first empty line.
                if refused && io::Write::write_all(&mut &stream, line).is_err() {
                    break;
                }
            }
            while io::Read::read(&mut &stream, &mut [0; 256]).is_ok_and(|read| read > 0) {}
            peers
        });
        let own = std::process::id().cast_signed();
        let opened = on_a_thread(move |runtime| {
            runtime.block_on(async { QmpInput::open(&path, own).await.map(drop) })
        });
        assert!(opened.is_err());
        drop(monitor.join().unwrap());
    }
}
