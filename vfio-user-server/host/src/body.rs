//! Bodies of HTTP requests and responses as blocking readers and writers, for streams that do not
//! fit into memory.

use std::io::{self, BufWriter, Read, Write};
use std::time::Duration;

use http_body_util::BodyExt;
use http_body_util::channel::{Channel, Sender};
use hyper::body::{Body, Bytes};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// Limit of the wait for the other end.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that are sent together at least.
const BUFFER: usize = 256 << 10;
/// Pieces that wait to be sent.
const PIECES: usize = 4;

/// Reader of a body, for a thread that may block.
#[derive(Debug)]
pub struct BodyReader<B> {
    body: B,
    runtime: Handle,
    piece: Bytes,
}

impl<B> BodyReader<B> {
    /// Wraps a body. Must be called on the runtime.
    pub fn new(body: B) -> Self {
        Self { body, runtime: Handle::current(), piece: Bytes::new() }
    }
}

impl<B> Read for BodyReader<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            let next = async { timeout(PATIENCE, self.body.frame()).await };
            match self.runtime.block_on(next).map_err(|_| io::ErrorKind::TimedOut)? {
                None => return Ok(0),
                Some(frame) => {
                    let data = frame.map_err(io::Error::other)?.into_data();
                    self.piece = data.unwrap_or_default();
                }
            }
        }
        let len = buffer.len().min(self.piece.len());
        buffer[..len].copy_from_slice(&self.piece.split_to(len));
        Ok(len)
    }
}

/// Writer of a body, for a thread that may block.
#[derive(Debug)]
pub struct BodyWriter {
    sender: Sender<Bytes, io::Error>,
    runtime: Handle,
}

/// Returns a writer and the body that it writes. Must be called on the runtime.
pub fn body_writer() -> (BufWriter<BodyWriter>, Channel<Bytes, io::Error>) {
    let (sender, body) = Channel::new(PIECES);
    let writer = BodyWriter { sender, runtime: Handle::current() };
    (BufWriter::with_capacity(BUFFER, writer), body)
}

impl Write for BodyWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = Bytes::copy_from_slice(bytes);
        let sent = async { timeout(PATIENCE, self.sender.send_data(piece)).await };
        let sent = self.runtime.block_on(sent).map_err(|_| io::ErrorKind::TimedOut)?;
        sent.map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
