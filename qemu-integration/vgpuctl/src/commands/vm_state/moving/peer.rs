//! Connection between `vm migrate` and `vm receive`.
//!
//! ```text
//! "TSRMOVE\n"  version u32                         from the source, once
//! frame: kind u8, length u32, data                 in both directions
//! ```
//!
//! All numbers are little-endian. The other end is as trusted as a file with a saved VM: QEMU and
//! vgpud check what they get.

use std::fmt::Debug;
use std::fs;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use mdev_core::stream::MAX_CHUNK;
use mdev_core::untrusted::one_line;
use serde::{Deserialize, Serialize};

use crate::cli::MoveAddress;
use crate::failure::Failure;

/// First bytes, and the version of the frames.
const MAGIC: [u8; 8] = *b"TSRMOVE\n";
const VERSION: u32 = 1;
/// Longest time without a byte of the other end.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Limit of a JSON frame in bytes.
const MAX_JSON: usize = 64 << 10;
/// Longest reason of the other end, in characters.
const MAX_REASON: usize = 300;
const BUFFER: usize = 256 << 10;

/// What is moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Types of the vGPUs.
    pub types: Vec<String>,
    /// Whether the VM runs.
    pub running: bool,
}

/// Frame of the connection. `Machine`, `Places`, `Vgpu` and `Go` come from the source, the others
/// from the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The destination waits for the VM.
    Ready,
    /// Next bytes of QEMU's stream; none at its end.
    Machine(Vec<u8>),
    /// Places of the vGPUs, whose streams follow in this order.
    Places(Vec<u16>),
    /// Next bytes of a vGPU's stream; none at its end.
    Vgpu(Vec<u8>),
    /// The VM is restored, and paused.
    Restored,
    /// The VM belongs to the destination.
    Go,
    /// The VM continues.
    Running,
    /// The destination cannot go on.
    Failed(String),
}

trait Transport: Read + Write + Send + Debug {
    fn try_clone(&self) -> io::Result<Box<dyn Transport>>;
}

macro_rules! transport {
    ($($kind:ty),+) => {
        $(impl Transport for $kind {
            fn try_clone(&self) -> io::Result<Box<dyn Transport>> {
                Ok(Box::new(<$kind>::try_clone(self)?))
            }
        })+
    };
}

transport!(TcpStream, UnixStream);

/// Connection to the other end.
#[derive(Debug)]
pub struct Peer {
    from: BufReader<Box<dyn Transport>>,
    to: BufWriter<Box<dyn Transport>>,
}

/// Socket on which a destination waits.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, std::path::PathBuf),
}

impl Listener {
    /// Listens at an address.
    pub fn bind(address: &MoveAddress) -> Result<Self, Failure> {
        let bound = match address {
            MoveAddress::Tcp(address) => TcpListener::bind(address).map(Self::Tcp),
            MoveAddress::Unix(path) => {
                // A socket that an earlier command has left.
                if fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket()) {
                    let _ = fs::remove_file(path);
                }
                UnixListener::bind(path).map(|listener| Self::Unix(listener, path.clone()))
            }
        };
        bound.map_err(|error| Failure::Local(format!("Cannot listen at {address}: {error}")))
    }

    /// Waits for a source, and returns what it says.
    pub fn accept(self) -> Result<(Peer, Hello), Failure> {
        let accepted = match &self {
            Self::Tcp(listener) => {
                listener.accept().and_then(|(stream, _)| prepare_tcp(stream).and_then(Peer::new))
            }
            Self::Unix(listener, _) => {
                listener.accept().and_then(|(stream, _)| prepare_unix(stream).and_then(Peer::new))
            }
        };
        let mut peer = accepted.map_err(|error| lost(&error))?;
        let hello = peer.read_hello()?;
        Ok((peer, hello))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = fs::remove_file(path);
        }
    }
}

fn prepare_tcp(stream: TcpStream) -> io::Result<Box<dyn Transport>> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(Box::new(stream))
}

fn prepare_unix(stream: UnixStream) -> io::Result<Box<dyn Transport>> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(Box::new(stream))
}

fn lost(error: &io::Error) -> Failure {
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
        io::ErrorKind::WouldBlock => format!("it was silent for {} s", TIMEOUT.as_secs()),
        _ => error.to_string(),
    };
    Failure::Local(format!("The connection to the other host is lost: {reason}"))
}

fn invalid() -> Failure {
    Failure::Local("The other end is no `vgpuctl vm` of this version".to_owned())
}

impl Peer {
    fn new(stream: Box<dyn Transport>) -> io::Result<Self> {
        let from = BufReader::with_capacity(BUFFER, stream.try_clone()?);
        Ok(Self { from, to: BufWriter::with_capacity(BUFFER, stream) })
    }

    /// Connects to a destination, and tells it what comes. Returns once the destination is ready.
    pub fn connect(address: &MoveAddress, hello: &Hello) -> Result<Self, Failure> {
        let connected = match address {
            MoveAddress::Tcp(address) => {
                TcpStream::connect(address).and_then(prepare_tcp).and_then(Self::new)
            }
            MoveAddress::Unix(path) => {
                UnixStream::connect(path).and_then(prepare_unix).and_then(Self::new)
            }
        };
        let mut peer = connected.map_err(|error| {
            Failure::NotFound(format!(
                "Cannot reach {address}: {error}; start `vgpuctl vm receive` there first"
            ))
        })?;
        peer.begin(hello).map_err(|error| lost(&error))?;
        peer.expect(&Frame::Ready)?;
        Ok(peer)
    }

    fn begin(&mut self, hello: &Hello) -> io::Result<()> {
        self.to.write_all(&MAGIC)?;
        self.to.write_all(&VERSION.to_le_bytes())?;
        self.write(b'h', &serde_json::to_vec(hello)?)?;
        self.to.flush()
    }

    fn read_hello(&mut self) -> Result<Hello, Failure> {
        let mut start = [0; 12];
        self.from.read_exact(&mut start).map_err(|error| lost(&error))?;
        let (magic, version) = start.split_at(MAGIC.len());
        if magic != MAGIC || version != VERSION.to_le_bytes() {
            return Err(invalid());
        }
        match self.read()? {
            (b'h', data) => serde_json::from_slice(&data).map_err(|_| invalid()),
            _ => Err(invalid()),
        }
    }

    /// Sends a frame. `Machine` and `Vgpu` may stay in a buffer until the next frame of another
    /// kind.
    pub fn send(&mut self, frame: &Frame) -> Result<(), Failure> {
        let json;
        let (kind, data, is_last) = match frame {
            Frame::Ready => (b'r', &[][..], true),
            Frame::Machine(data) => (b'm', &data[..], data.is_empty()),
            Frame::Places(places) => {
                json = serde_json::to_vec(places).unwrap_or_default();
                (b'p', &json[..], false)
            }
            Frame::Vgpu(data) => (b'v', &data[..], data.is_empty()),
            Frame::Restored => (b'd', &[][..], true),
            Frame::Go => (b'g', &[][..], true),
            Frame::Running => (b'u', &[][..], true),
            Frame::Failed(reason) => (b'f', reason.as_bytes(), true),
        };
        let sent = self.write(kind, data);
        sent.and_then(|()| if is_last { self.to.flush() } else { Ok(()) }).map_err(|error| {
            // The other end may have said why it has gone.
            match self.receive() {
                Ok(Frame::Failed(reason)) => refused(&reason),
                _ => lost(&error),
            }
        })
    }

    /// Receives a frame, which is untrusted input.
    pub fn receive(&mut self) -> Result<Frame, Failure> {
        let (kind, data) = self.read()?;
        Ok(match (kind, data.len()) {
            (b'r', 0) => Frame::Ready,
            (b'm', _) => Frame::Machine(data),
            (b'p', ..=MAX_JSON) => {
                Frame::Places(serde_json::from_slice(&data).map_err(|_| invalid())?)
            }
            (b'v', _) => Frame::Vgpu(data),
            (b'd', 0) => Frame::Restored,
            (b'g', 0) => Frame::Go,
            (b'u', 0) => Frame::Running,
            (b'f', ..=MAX_JSON) => Frame::Failed(String::from_utf8_lossy(&data).into_owned()),
            _ => return Err(invalid()),
        })
    }

    /// Receives a frame that must be this one.
    pub fn expect(&mut self, expected: &Frame) -> Result<(), Failure> {
        match self.receive()? {
            Frame::Failed(reason) => Err(refused(&reason)),
            frame if frame == *expected => Ok(()),
            _ => Err(invalid()),
        }
    }

    fn write(&mut self, kind: u8, data: &[u8]) -> io::Result<()> {
        self.to.write_all(&[kind])?;
        self.to.write_all(&(data.len() as u32).to_le_bytes())?;
        self.to.write_all(data)
    }

    fn read(&mut self) -> Result<(u8, Vec<u8>), Failure> {
        let mut header = [0; 5];
        self.from.read_exact(&mut header).map_err(|error| lost(&error))?;
        let [kind, len @ ..] = header;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_CHUNK {
            return Err(invalid());
        }
        let mut data = vec![0; len];
        self.from.read_exact(&mut data).map_err(|error| lost(&error))?;
        Ok((kind, data))
    }
}

/// Returns the failure of the other end, whose words may be anything.
fn refused(reason: &str) -> Failure {
    Failure::Local(format!("The other host refused the VM: {}", one_line(reason, MAX_REASON)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Peer, Peer) {
        let (a, b) = UnixStream::pair().unwrap();
        let peer = |stream| Peer::new(prepare_unix(stream).unwrap()).unwrap();
        (peer(a), peer(b))
    }

    #[test]
    fn frames_arrive_as_they_were_sent() {
        let (mut source, mut destination) = pair();
        let hello = Hello { types: vec!["SOFT-1Q".into()], running: true };
        source.begin(&hello).unwrap();
        assert_eq!(destination.read_hello().unwrap(), hello);
        let frames = [
            Frame::Machine(vec![7; 1000]),
            Frame::Machine(Vec::new()),
            Frame::Places(vec![0x80, 3]),
            Frame::Vgpu(vec![1]),
            Frame::Vgpu(Vec::new()),
            Frame::Go,
        ];
        for frame in &frames {
            source.send(frame).unwrap();
        }
        for frame in &frames {
            assert_eq!(destination.receive().unwrap(), *frame);
        }
        for frame in [Frame::Ready, Frame::Restored, Frame::Running] {
            destination.send(&frame).unwrap();
            source.expect(&frame).unwrap();
        }
    }

    #[test]
    fn what_the_other_end_says_is_one_line() {
        let (mut source, mut destination) = pair();
        destination.send(&Frame::Failed("no\nroom\u{1b}[2J".into())).unwrap();
        let failure = source.expect(&Frame::Ready).unwrap_err().to_string();
        assert_eq!(failure, "The other host refused the VM: no\\nroom\\u{1b}[2J");
        destination.send(&Frame::Go).unwrap();
        let failure = source.expect(&Frame::Restored).unwrap_err().to_string();
        assert_eq!(failure, "The other end is no `vgpuctl vm` of this version");
        drop(destination);
        let failure = source.receive().unwrap_err().to_string();
        let expected = "The connection to the other host is lost: it closed the connection";
        assert_eq!(failure, expected);
    }

    #[test]
    fn an_address_that_cannot_be_used_is_named() {
        let address = MoveAddress::Unix("/nowhere/move".into());
        let failure = Listener::bind(&address).unwrap_err().to_string();
        assert!(failure.starts_with("Cannot listen at unix:/nowhere/move: "), "{failure}");
    }

    #[test]
    fn foreign_ends_are_refused() {
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"TSRMOVE\n\x02\0\0\0h\x02\0\0\0{}"] {
            let (mut raw, stream) = UnixStream::pair().unwrap();
            let mut peer = Peer::new(prepare_unix(stream).unwrap()).unwrap();
            raw.write_all(bytes).unwrap();
            assert_eq!(peer.read_hello().unwrap_err().to_string(), invalid().to_string());
        }
        for bytes in [[b'm', 0xff, 0xff, 0xff, 0xff], [b'?', 0, 0, 0, 0], [b'r', 1, 0, 0, 0]] {
            let (mut raw, stream) = UnixStream::pair().unwrap();
            let mut peer = Peer::new(prepare_unix(stream).unwrap()).unwrap();
            raw.write_all(&bytes).unwrap();
            raw.write_all(&[0]).unwrap();
            assert_eq!(peer.receive().unwrap_err().to_string(), invalid().to_string());
        }
    }
}
