//! Bodies of HTTP requests and responses as blocking readers and writers, for streams that do not
//! fit into memory.

use std::io::{self, BufWriter, Read, Write};
use std::time::Duration;

use http_body_util::BodyExt;
use http_body_util::channel::{Channel, Sender};
use hyper::body::{Body, Bytes};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Limit of the wait for the other end.
const PEER_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes that are passed on together.
const BUFFER: usize = 256 << 10;
/// Pieces that wait for the other end.
const PIECES: usize = 4;

/// Reader of a body, for a thread that may block.
///
/// A task collects the small pieces that arrive, so that the thread is woken rarely.
#[derive(Debug)]
pub struct BodyReader {
    pieces: mpsc::Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    read: usize,
}

impl BodyReader {
    /// Wraps a body. Must be called on the runtime.
    pub fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (sender, pieces) = mpsc::channel(PIECES);
        Handle::current().spawn(collect(body, sender));
        Self { pieces, piece: Vec::new(), read: 0 }
    }
}

/// Collects a body into pieces of [`BUFFER`] bytes, until the reader is gone.
async fn collect<B>(mut body: B, sender: mpsc::Sender<io::Result<Vec<u8>>>)
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut piece = Vec::with_capacity(BUFFER);
    loop {
        let frame = match timeout(PEER_TIMEOUT, body.frame()).await {
            Ok(Some(frame)) => frame.map_err(io::Error::other),
            Ok(None) => break,
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        };
        match frame {
            Ok(frame) => piece.extend_from_slice(frame.data_ref().map_or(&[], |data| data)),
            Err(error) => {
                let _ = sender.send(Err(error)).await;
                return;
            }
        }
        if piece.len() >= BUFFER {
            let full = std::mem::replace(&mut piece, Vec::with_capacity(BUFFER));
            if sender.send(Ok(full)).await.is_err() {
                return;
            }
        }
    }
    if !piece.is_empty() {
        let _ = sender.send(Ok(piece)).await;
    }
}

impl Read for BodyReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.read == self.piece.len() {
            let Some(piece) = self.pieces.blocking_recv() else { return Ok(0) };
            (self.piece, self.read) = (piece?, 0);
        }
        let left = &self.piece[self.read..];
        let len = buffer.len().min(left.len());
        buffer[..len].copy_from_slice(&left[..len]);
        self.read += len;
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
        let sent = async { timeout(PEER_TIMEOUT, self.sender.send_data(piece)).await };
        let sent = self.runtime.block_on(sent).map_err(|_| io::ErrorKind::TimedOut)?;
        sent.map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_in_pieces_of_any_size() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|n| (n * 7 / 3) as u8).collect();
        let sent = bytes.clone();
        let received = runtime.block_on(async {
            let (mut writer, body) = body_writer();
            let writes = tokio::task::spawn_blocking(move || {
                sent.chunks(77_777).try_for_each(|piece| writer.write_all(piece))?;
                writer.flush()
            });
            let mut reader = BodyReader::new(body);
            let reads = tokio::task::spawn_blocking(move || {
                let mut received = Vec::new();
                reader.read_to_end(&mut received).map(|_| received)
            });
            writes.await.unwrap().unwrap();
            reads.await.unwrap().unwrap()
        });
        assert!(received == bytes);
    }

    #[test]
    fn a_writer_notices_that_the_reader_is_gone() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut writer, body) = body_writer();
            drop(body);
            let written = tokio::task::spawn_blocking(move || writer.write_all(&vec![0; 1 << 20]));
            assert_eq!(written.await.unwrap().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        });
    }
}
