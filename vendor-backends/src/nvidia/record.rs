//! Writes down what is asked of a resource manager: the same guest's life must ask the same of the real one and the fake.

use std::fmt::Write;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use super::rm::{Node, Request, Rm};
use super::sys::abi::{Alloc, Call, Control};
use super::sys::numbers::{class, control};

/// What replaces the handle that the driver chose for the client.
const CLIENT: [u8; 4] = *b"CLNT";

/// A resource manager that is listened to.
#[derive(Debug)]
pub struct Recorder {
    inner: Arc<dyn Rm>,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    client: Option<[u8; 4]>,
    lines: Vec<String>,
}

impl Recorder {
    /// Listens to `inner`.
    pub fn new(inner: Arc<dyn Rm>) -> Arc<Self> {
        Arc::new(Self { inner, taken: Mutex::default() })
    }

    /// One line for each call so far: its name, its argument, its parameters, and the status it came back with.
    /// Addresses, descriptors and the client's own handle are left out.
    pub fn lines(&self) -> Vec<String> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).lines.clone()
    }
}

impl Rm for Recorder {
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
        let (kind, command) = (word(&argument, 12), word(&argument, 8));
        let own: &[(usize, usize)] = match request.number {
            // The descriptor that an event polls.
            Alloc::NUMBER if kind == class::OS_EVENT => &[(16, 24)],
            // The card's name.
            Control::NUMBER if command == control::ID_INFO => &[(0, 4)],
            _ => &[],
        };
        blank(&mut params, own.iter().copied());
        let done = self.inner.ioctl(fd, request);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if request.number == Alloc::NUMBER && kind == class::CLIENT {
            taken.client = request.argument.get(8..12).and_then(|bytes| bytes.try_into().ok());
        }
        for bytes in [&mut argument, &mut params] {
            for handle in bytes.chunks_exact_mut(4) {
                if taken.client.is_some_and(|client| *handle == client) {
                    handle.copy_from_slice(&CLIENT);
                }
            }
        }
        let outcome = if done.is_ok() { "" } else { " fails" };
        let line = format!("{} {} {}{outcome}", request.name, hex(&argument), hex(&params));
        taken.lines.push(line.trim_end().to_owned());
        done
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    word.map_or(0, u32::from_le_bytes)
}

fn blank(bytes: &mut [u8], ranges: impl Iterator<Item = (usize, usize)>) {
    for (start, end) in ranges {
        if let Some(range) = bytes.get_mut(start..end) {
            range.fill(0);
        }
    }
}

/// Hexadecimal, with runs of eight and more zero bytes as `~` and their number.
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
