//! One viewer: from its first message to its last.
//!
//! Two halves run side by side: one takes in what the viewer says, the other sends what is new whenever the viewer has
//! asked for it. A viewer that does not read what it asked for is sent nothing more, and is dropped after a while.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::monitor::Monitor;
use super::rfb::encode::{Encoder, Wishes, server_init};
use super::rfb::handshake;
use super::rfb::message::{self, Message};
use super::screens::Seat;

/// How long a viewer may take to greet.
const GREETING: Duration = Duration::from_secs(10);

/// How long a viewer may take to read an update that it asked for.
const STALLED: Duration = Duration::from_secs(30);

/// Bytes that are read at once.
const CHUNK: usize = 4096;

/// Serves a screen on a connection that was let in, until either end leaves. `monitor` is where its keys go.
pub async fn serve<S>(
    mut stream: S,
    seat: Seat,
    monitor: Option<Monitor>,
    name: &str,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let greeting = async {
        handshake::serve(&mut stream, None).await?;
        // Whether it would share the screen: it has to.
        stream.read_u8().await
    };
    timeout(GREETING, greeting).await.map_err(|_| stalled("greet"))??;
    seat.screen.fresh().await.map_err(io::Error::other)?;
    let shape = seat.screen.canvas().shape();
    let size = (shape.width, shape.height);
    stream.write_all(&server_init(size, name)).await?;
    let viewer =
        Viewer { seat: &seat, said: Mutex::default(), news: Notify::new(), size: Mutex::new(size) };
    let (reader, writer) = tokio::io::split(stream);
    let mut monitor = monitor;
    let done = tokio::select! {
        done = viewer.listen(reader, monitor.as_mut()) => done,
        done = viewer.show(writer) => done,
    };
    if let Some(monitor) = monitor {
        monitor.release().await;
    }
    done
}

fn stalled(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("The viewer does not {what}"))
}

/// What both halves know.
struct Viewer<'a> {
    seat: &'a Seat,
    said: Mutex<Said>,
    news: Notify,
    /// What the viewer takes the screen's size to be.
    size: Mutex<(u32, u32)>,
}

/// What the viewer has said that an answer depends on.
#[derive(Debug, Default)]
struct Said {
    wishes: Wishes,
    /// It waits for an update; true where it wants all of it.
    request: Option<bool>,
}

impl Viewer<'_> {
    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn size(&self) -> MutexGuard<'_, (u32, u32)> {
        self.size.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what the viewer says, until it leaves.
    async fn listen<S: AsyncRead + AsyncWrite>(
        &self,
        mut reader: ReadHalf<S>,
        mut monitor: Option<&mut Monitor>,
    ) -> io::Result<()> {
        let (mut bytes, mut chunk, mut skip) = (Vec::new(), [0; CHUNK], 0);
        loop {
            let count = reader.read(&mut chunk).await?;
            if count == 0 {
                return Ok(());
            }
            let passed = skip.min(count);
            skip -= passed;
            bytes.extend_from_slice(&chunk[passed..count]);
            let mut at = 0;
            while let Some((message, length)) =
                message::parse(&bytes[at..]).map_err(io::Error::other)?
            {
                at += length;
                if let Message::Skip(more) = message {
                    let there = more.min(bytes.len() - at);
                    at += there;
                    skip = more - there;
                } else {
                    self.take(message, monitor.as_deref_mut()).await?;
                }
            }
            bytes.drain(..at);
        }
    }

    async fn take(&self, message: Message, monitor: Option<&mut Monitor>) -> io::Result<()> {
        match message {
            Message::SetPixelFormat(format) => self.said().wishes.format = format,
            Message::SetEncodings(list) => self.said().wishes.choose(&list),
            Message::UpdateRequest { incremental } => {
                let mut said = self.said();
                let all = said.request.unwrap_or_default() || !incremental;
                said.request = Some(all);
                self.news.notify_one();
            }
            Message::Key { .. } | Message::KeyPlace { .. } | Message::Pointer { .. } => {
                let Some(monitor) = monitor else { return Ok(()) };
                let size = *self.size();
                match message {
                    Message::Key { down, keysym } => monitor.key(down, keysym).await?,
                    Message::KeyPlace { down, code } => monitor.key_place(down, code).await?,
                    Message::Pointer { buttons, x, y } => {
                        monitor.pointer(buttons, (x, y), size).await?;
                    }
                    _ => {}
                }
                self.seat.screen.stir();
            }
            Message::Skip(_) => {}
        }
        Ok(())
    }

    /// Sends what is new, whenever it was asked for.
    async fn show<S: AsyncRead + AsyncWrite>(&self, mut writer: WriteHalf<S>) -> io::Result<()> {
        let screen = &self.seat.screen;
        let mut encoder = Encoder::new(*self.size());
        loop {
            let Some(all) = self.said().request else {
                self.news.notified().await;
                continue;
            };
            let ready =
                async { if all { screen.fresh().await } else { screen.news(encoder.seen).await } };
            tokio::select! {
                ready = ready => ready.map_err(io::Error::other)?,
                // It may want all of it now.
                () = self.news.notified() => continue,
            }
            let (wishes, all) = {
                let mut said = self.said();
                (said.wishes.clone(), said.request.take().unwrap_or_default())
            };
            let encoded = screen.encode(move |canvas| {
                let update = encoder.update(canvas, &wishes, all);
                (encoder, update)
            });
            let update;
            (encoder, update) = encoded.await.map_err(io::Error::other)?;
            let update = update?;
            if update.is_empty() {
                // Nothing of what is new is on the viewer's screen: it still waits.
                self.said().request.get_or_insert(false);
                continue;
            }
            *self.size() = encoder.size;
            timeout(STALLED, writer.write_all(&update)).await.map_err(|_| stalled("read"))??;
            timeout(STALLED, writer.flush()).await.map_err(|_| stalled("read"))??;
        }
    }
}
