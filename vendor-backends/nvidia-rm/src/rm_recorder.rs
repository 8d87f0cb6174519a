//! Recorder of driver calls. The same scenario must produce the same calls to the real driver and
//! to the fake.

use std::fmt::Write;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use zerocopy::FromBytes;

use crate::abi::{Alloc, Call, Control};
use crate::numbers::{class, control};
use crate::rm::{Node, Request, Rm};

/// Replacement for the handle that the driver chose for the client.
const CLIENT: [u8; 4] = *b"CLNT";

/// Resource manager that records all calls to another one.
#[derive(Debug)]
pub struct RmRecorder {
    inner: Arc<dyn Rm>,
    recording: Mutex<Recording>,
}

#[derive(Debug, Default)]
struct Recording {
    client: Option<[u8; 4]>,
    lines: Vec<String>,
}

impl RmRecorder {
    /// Creates a recorder for `inner`.
    pub fn new(inner: Arc<dyn Rm>) -> Arc<Self> {
        Arc::new(Self { inner, recording: Mutex::default() })
    }

    /// Returns a line for each call: its name, argument and parameters, and ` fails` after a
    /// failure. Addresses, descriptors and the client's handle are blanked.
    pub fn lines(&self) -> Vec<String> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner).lines.clone()
    }
}

impl Rm for RmRecorder {
    fn version(&self) -> io::Result<String> {
        self.inner.version()
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        self.inner.open(node)
    }

    fn ioctl(&self, fd: BorrowedFd<'_>, request: &mut Request<'_>) -> io::Result<()> {
        let mut argument = request.argument.to_vec();
        let volatile = request.volatile.iter().copied();
        let pointer = request.params.as_ref().map(|(at, _)| (*at, *at + 8));
        blank(&mut argument, volatile.chain(pointer));
        let mut params = request.params.as_ref().map_or(Vec::new(), |(_, params)| params.to_vec());
        let kind = Alloc::read_from_bytes(&argument).map_or(0, |alloc| alloc.class);
        let command = Control::read_from_bytes(&argument).map_or(0, |control| control.command);
        let volatile_params: &[(usize, usize)] = match request.number {
            // Descriptor of an event.
            Alloc::NUMBER if kind == class::OS_EVENT => &[(16, 24)],
            // GPU ID.
            Control::NUMBER if command == control::ID_INFO => &[(0, 4)],
            _ => &[],
        };
        blank(&mut params, volatile_params.iter().copied());
        let done = self.inner.ioctl(fd, request);
        let mut recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if request.number == Alloc::NUMBER && kind == class::CLIENT {
            let alloc = Alloc::read_from_bytes(request.argument).ok();
            recording.client = alloc.map(|alloc| alloc.object.to_le_bytes());
        }
        for bytes in [&mut argument, &mut params] {
            for handle in bytes.chunks_exact_mut(4) {
                if recording.client.is_some_and(|client| *handle == client) {
                    handle.copy_from_slice(&CLIENT);
                }
            }
        }
        let outcome = if done.is_ok() { "" } else { " fails" };
        let line = format!("{} {} {}{outcome}", request.name, hex(&argument), hex(&params));
        recording.lines.push(line.trim_end().to_owned());
        done
    }
}

fn blank(bytes: &mut [u8], ranges: impl Iterator<Item = (usize, usize)>) {
    for (start, end) in ranges {
        if let Some(range) = bytes.get_mut(start..end) {
            range.fill(0);
        }
    }
}

/// Formats bytes in hexadecimal, with runs of eight or more zero bytes as `~` and their number.
fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    let mut rest = bytes;
    while let Some(first) = rest.first() {
        let zeros = rest.iter().take_while(|byte| **byte == 0).count();
        if zeros >= 8 {
            let _ = write!(text, "~{zeros}.");
            rest = &rest[zeros..];
        } else {
            let _ = write!(text, "{first:02x}");
            rest = &rest[1..];
        }
    }
    text
}
