//! QEMU monitor in this process, for tests that act as a VM.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::thread;

use anyhow::Result;
use serde_json::{Value, json};

/// Listens at `path` and returns the events of each `input-send-event`. `mice` answers
/// `query-mice`.
pub fn listen(path: &Path, mice: Value) -> Result<Receiver<Value>> {
    let listener = UnixListener::bind(path)?;
    let (sender, pressed) = mpsc::channel();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let Ok(reader) = stream.try_clone() else { return };
            let _ = stream.write_all(b"{\"QMP\": {\"version\": {}}}\n");
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                let command: Value = serde_json::from_str(&line).unwrap_or_default();
                if command["execute"] == "input-send-event" {
                    let _ = sender.send(command["arguments"]["events"].clone());
                }
                let _ = writeln!(stream, "{}", json!({ "return": mice }));
            }
        }
    });
    Ok(pressed)
}
