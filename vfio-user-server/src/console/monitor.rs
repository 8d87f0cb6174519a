//! Keyboard and pointer: for the VM's QEMU, on its monitor (QMP).
//!
//! A vGPU is a display and has no keyboard; its VM has. Keys go to the monitor that the operator names, and only if the
//! process that listens there is the one that is attached to the vGPU: nobody types into another VM by a wrong path, and
//! `vgpud` is not made to speak to sockets that have nothing to do with it.

use std::io;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::keys;

/// QEMU answers at once, unless somebody else has the monitor.
const PATIENCE: Duration = Duration::from_secs(2);

/// The longest line that QEMU says here.
const MAX_LINE: u64 = 1 << 20;

/// Keys that are held at the same time. Nobody has more fingers.
const MAX_HELD: usize = 32;

/// Buttons by their bits.
const BUTTONS: [&str; 8] =
    ["left", "middle", "right", "wheel-up", "wheel-down", "wheel-left", "wheel-right", "side"];

/// The largest coordinate of an absolute pointer.
const FAR: u32 = 0x7fff;

/// The keyboard and pointer of a VM, for one viewer.
#[derive(Debug)]
pub struct Monitor {
    writer: OwnedWriteHalf,
    reader: JoinHandle<()>,
    /// Whether the VM has a tablet. A mouse is moved by differences.
    absolute: bool,
    held: Vec<Value>,
    buttons: u8,
    at: Option<(u16, u16)>,
}

impl Monitor {
    /// Connects to the monitor at `path`, which must be that of process `vm`.
    pub async fn open(path: &Path, vm: i32) -> io::Result<Self> {
        match timeout(PATIENCE, Self::greet(path, vm)).await {
            Ok(opened) => opened,
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it does not answer; it serves one client at a time, so give the VM one more for this",
            )),
        }
    }

    async fn greet(path: &Path, vm: i32) -> io::Result<Self> {
        let stream = UnixStream::connect(path).await?;
        let listens = stream.peer_cred()?.pid().unwrap_or_default();
        if listens != vm {
            return Err(io::Error::other(format!(
                "it belongs to process {listens}, and the vGPU's VM is process {vm}; name that VM's monitor"
            )));
        }
        let (reader, writer) = stream.into_split();
        let mut reader = BufReader::new(reader);
        let greeting = line(&mut reader).await?;
        if greeting.get("QMP").is_none() {
            return Err(io::Error::other("it is no QMP monitor; give the VM one with -qmp"));
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
        answer(&mut reader).await?;
        monitor.execute("query-mice", &json!({})).await?;
        let mice = answer(&mut reader).await?;
        let mice = mice.as_array().map(Vec::as_slice).unwrap_or_default();
        monitor.absolute =
            mice.iter().any(|mouse| mouse["current"] == true && mouse["absolute"] == true);
        monitor.reader = tokio::spawn(discard(reader));
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
        self.execute("input-send-event", &json!({ "events": events })).await
    }

    /// A key by its symbol. One that no US keyboard has is left out.
    pub async fn key(&mut self, down: bool, keysym: u32) -> io::Result<()> {
        match keys::place(keysym) {
            Some(name) => self.press(down, json!({ "type": "qcode", "data": name })).await,
            None => Ok(()),
        }
    }

    /// A key by its place.
    pub async fn key_place(&mut self, down: bool, code: u32) -> io::Result<()> {
        if !(1..0x100).contains(&code) {
            return Ok(());
        }
        self.press(down, json!({ "type": "number", "data": code })).await
    }

    async fn press(&mut self, down: bool, key: Value) -> io::Result<()> {
        let held = self.held.iter().position(|one| *one == key);
        match (down, held) {
            (true, None) if self.held.len() == MAX_HELD => return Ok(()),
            (true, None) => self.held.push(key.clone()),
            (false, Some(place)) => drop(self.held.swap_remove(place)),
            // Held keys repeat; one that is not held need not be released.
            (true, Some(_)) => {}
            (false, None) => return Ok(()),
        }
        self.send(&[json!({ "type": "key", "data": { "down": down, "key": key } })]).await
    }

    /// The pointer, on a screen of this size.
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
                    let value = u32::from(now).min(far) * FAR / far;
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

    /// Lets go of everything: the viewer is leaving.
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
        // A VM that is gone holds no keys.
        let last = async {
            self.send(&events).await?;
            self.writer.shutdown().await?;
            // It closes its end once it has taken all.
            let _ = (&mut self.reader).await;
            io::Result::Ok(())
        };
        let _ = timeout(PATIENCE, last).await;
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// What QEMU says next.
async fn line(reader: &mut BufReader<OwnedReadHalf>) -> io::Result<Value> {
    let mut line = Vec::new();
    reader.take(MAX_LINE).read_until(b'\n', &mut line).await?;
    if line.is_empty() {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it has closed the connection"));
    }
    Ok(serde_json::from_slice(&line)?)
}

/// What a command returned, past events.
async fn answer(reader: &mut BufReader<OwnedReadHalf>) -> io::Result<Value> {
    loop {
        let mut message = line(reader).await?;
        if let Some(value) = message.get_mut("return") {
            return Ok(value.take());
        }
        if let Some(error) = message.get("error") {
            return Err(io::Error::other(format!("QEMU refuses: {}", error["desc"])));
        }
    }
}

/// Reads what QEMU says, so that it can go on, and notes what it complains of.
async fn discard(mut reader: BufReader<OwnedReadHalf>) {
    while let Ok(message) = line(&mut reader).await {
        if let Some(error) = message.get("error") {
            log::debug!("QEMU does not take a key: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    /// A QEMU that notes what it is told.
    async fn qemu(listener: UnixListener, tablet: bool) -> Vec<Value> {
        let (stream, _) = listener.accept().await.unwrap();
        let (reader, mut writer) = stream.into_split();
        let mut reader = BufReader::new(reader);
        writer.write_all(b"{\"QMP\": {}}\n").await.unwrap();
        let mut events = Vec::new();
        while let Ok(command) = line(&mut reader).await {
            let result = match command["execute"].as_str().unwrap() {
                "query-mice" => json!([{ "current": true, "absolute": tablet }]),
                "input-send-event" => {
                    let list = command["arguments"]["events"].as_array().unwrap();
                    events.extend(list.iter().cloned());
                    json!({})
                }
                _ => json!({}),
            };
            // Who is told may have gone.
            let _ = writer.write_all(b"{\"event\": \"NOTHING\"}\n").await;
            let answer = format!("{}\n", json!({ "return": result }));
            let _ = writer.write_all(answer.as_bytes()).await;
        }
        events
    }

    async fn events(tablet: bool, used: impl AsyncFnOnce(&mut Monitor)) -> Vec<Value> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let qemu = tokio::spawn(qemu(UnixListener::bind(&path).unwrap(), tablet));
        let mut monitor = Monitor::open(&path, std::process::id().cast_signed()).await.unwrap();
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
    fn keys_are_pressed_and_let_go() {
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
    fn a_tablet_is_where_the_pointer_is() {
        let events = run(events(true, async |monitor| {
            monitor.pointer(0, (0, 599), (800, 600)).await.unwrap();
            monitor.pointer(1, (0, 599), (800, 600)).await.unwrap();
            monitor.pointer(0, (u16::MAX, 0), (1, 1)).await.unwrap();
        }));
        let abs = |axis: &str, value: u32| json!({ "type": "abs", "data": { "axis": axis, "value": value } });
        let left =
            |down: bool| json!({ "type": "btn", "data": { "down": down, "button": "left" } });
        let expected =
            [abs("x", 0), abs("y", FAR), left(true), abs("x", FAR), abs("y", 0), left(false)];
        assert_eq!(events, expected);
    }

    #[test]
    fn a_mouse_moves_by_differences() {
        let events = run(events(false, async |monitor| {
            monitor.pointer(0, (10, 10), (800, 600)).await.unwrap();
            monitor.pointer(0, (7, 10), (800, 600)).await.unwrap();
        }));
        assert_eq!(events, [json!({ "type": "rel", "data": { "axis": "x", "value": -3 } })]);
    }

    #[test]
    fn another_process_is_not_spoken_to() {
        run(async {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("qmp");
            let _listener = UnixListener::bind(&path).unwrap();
            let error = Monitor::open(&path, 1).await.unwrap_err().to_string();
            assert!(error.contains("name that VM's monitor"), "{error}");
        });
    }

    #[test]
    fn what_is_no_monitor_is_told_from_one_that_refuses() {
        for (says, why) in [
            ("", "it has closed the connection"),
            ("{}\n", "it is no QMP monitor; give the VM one with -qmp"),
            ("{\"QMP\":{}}\n{\"error\":{\"desc\":\"no\"}}\n", "QEMU refuses: \"no\""),
        ] {
            run(async {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("qmp");
                let listener = UnixListener::bind(&path).unwrap();
                let other = async {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    // Who is told may have gone.
                    let _ = stream.write_all(says.as_bytes()).await;
                    let _ = stream.shutdown().await;
                    stream
                };
                let own = std::process::id().cast_signed();
                let (opened, _stream) = tokio::join!(Monitor::open(&path, own), other);
                assert_eq!(opened.unwrap_err().to_string(), why);
            });
        }
    }
}
