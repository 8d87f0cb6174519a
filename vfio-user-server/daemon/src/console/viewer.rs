//! RFB session of one viewer.
//!
//! Two halves run concurrently: one receives the viewer's messages, the other sends an update
//! whenever the viewer has requested one and the screen has changed. A viewer that does not read a
//! requested update gets no more updates, and is disconnected after [`WRITE_TIMEOUT`].

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mdev_core::ids::VgpuId;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::live_screens::ViewerSlot;
use super::qmp_input::QmpInput;
use crate::vgpu_names;
use rfb::encode::{ClientFormat, Encoder, server_init};
use rfb::handshake;
use rfb::message::{self, Message};

/// Time limit of the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for a viewer to read an update that it requested.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Size of the receive buffer, in bytes.
const CHUNK: usize = 4096;

/// Returns the title of a screen, which viewers display.
pub fn title(id: VgpuId, has_input: bool) -> String {
    let title = vgpu_names::annotated(&format!("vGPU {id}"));
    if has_input { title } else { title + " (view only)" }
}

/// Serves a screen on an authorized connection, until either side disconnects. Keys and pointer go
/// to `input`.
pub async fn serve<S>(
    mut stream: S,
    slot: ViewerSlot,
    input: Option<QmpInput>,
    title: &str,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let handshake = async {
        handshake::serve(&mut stream, None).await?;
        // The shared flag of ClientInit is ignored: screens are always shared.
        stream.read_u8().await
    };
    let shared = timeout(HANDSHAKE_TIMEOUT, handshake).await;
    shared.map_err(|_| timed_out("finish the handshake"))??;
    slot.screen.whole_read().await.map_err(io::Error::other)?;
    let shape = slot.screen.canvas().shape();
    let size = (shape.width, shape.height);
    stream.write_all(&server_init(size, title)).await?;
    let viewer = Viewer {
        slot: &slot,
        requests: Mutex::default(),
        requested: Notify::new(),
        size: Mutex::new(size),
    };
    let (reader, writer) = tokio::io::split(stream);
    let mut input = input;
    let result = tokio::select! {
        result = viewer.receive(reader, input.as_mut()) => result,
        result = viewer.send(writer) => result,
    };
    if let Some(input) = input {
        input.release().await;
    }
    result
}

fn timed_out(action: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("The viewer does not {action}"))
}

/// State shared by both halves of a session.
struct Viewer<'a> {
    slot: &'a ViewerSlot,
    requests: Mutex<Requests>,
    /// Notifies the sender of a request for an update.
    requested: Notify,
    /// Size of the screen as the viewer knows it.
    size: Mutex<(u32, u32)>,
}

/// Requests of the viewer that determine the next update.
#[derive(Debug, Default)]
struct Requests {
    format: ClientFormat,
    /// Pending request for an update; true if for the whole screen.
    update: Option<bool>,
}

impl Viewer<'_> {
    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn size(&self) -> MutexGuard<'_, (u32, u32)> {
        self.size.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives and handles messages, until the viewer disconnects.
    async fn receive<S: AsyncRead + AsyncWrite>(
        &self,
        mut reader: ReadHalf<S>,
        mut input: Option<&mut QmpInput>,
    ) -> io::Result<()> {
        let (mut bytes, mut chunk, mut skip) = (Vec::new(), [0; CHUNK], 0);
        loop {
            let count = reader.read(&mut chunk).await?;
            if count == 0 {
                return Ok(());
            }
            let skipped = skip.min(count);
            skip -= skipped;
            bytes.extend_from_slice(&chunk[skipped..count]);
            let mut at = 0;
            while let Some((message, length)) =
                message::parse(&bytes[at..]).map_err(io::Error::other)?
            {
                at += length;
                if let Message::Skip(more) = message {
                    let received = more.min(bytes.len() - at);
                    at += received;
                    skip = more - received;
                } else {
                    self.handle(message, input.as_deref_mut()).await?;
                }
            }
            bytes.drain(..at);
        }
    }

    async fn handle(&self, message: Message, input: Option<&mut QmpInput>) -> io::Result<()> {
        match message {
            Message::SetPixelFormat(format) => self.requests().format.pixels = format,
            Message::SetEncodings(list) => self.requests().format.choose_encoding(&list),
            Message::UpdateRequest { incremental } => {
                let mut requests = self.requests();
                let whole = requests.update.unwrap_or_default() || !incremental;
                requests.update = Some(whole);
                self.requested.notify_one();
            }
            Message::Key { .. } | Message::ScanCode { .. } | Message::Pointer { .. } => {
                let Some(input) = input else { return Ok(()) };
                let size = *self.size();
                match message {
                    Message::Key { down, keysym } => input.key(down, keysym).await?,
                    Message::ScanCode { down, code } => input.scan_code(down, code).await?,
                    Message::Pointer { buttons, x, y } => {
                        input.pointer(buttons, (x, y), size).await?;
                    }
                    _ => {}
                }
                self.slot.screen.expect_change();
            }
            Message::Skip(_) => {}
        }
        Ok(())
    }

    /// Sends an update for each request, once the screen has changed.
    async fn send<S: AsyncRead + AsyncWrite>(&self, mut writer: WriteHalf<S>) -> io::Result<()> {
        let screen = &self.slot.screen;
        let mut encoder = Encoder::new(*self.size());
        loop {
            let Some(whole) = self.requests().update else {
                self.requested.notified().await;
                continue;
            };
            let ready = async {
                if whole {
                    screen.whole_read().await
                } else {
                    screen.changed_since(encoder.seen).await
                }
            };
            tokio::select! {
                ready = ready => ready.map_err(io::Error::other)?,
                // The new request may be for the whole screen.
                () = self.requested.notified() => continue,
            }
            let (format, whole) = {
                let mut requests = self.requests();
                (requests.format.clone(), requests.update.take().unwrap_or_default())
            };
            let encoded = screen.encode(move |canvas| {
                let update = encoder.update(canvas, &format, whole);
                (encoder, update)
            });
            let update;
            (encoder, update) = encoded.await.map_err(io::Error::other)?;
            let update = update?;
            if update.is_empty() {
                // The change is outside of the size that the viewer knows. The request stays
                // pending.
                self.requests().update.get_or_insert(false);
                continue;
            }
            *self.size() = encoder.size;
            let stalled = |_| timed_out("read");
            timeout(WRITE_TIMEOUT, writer.write_all(&update)).await.map_err(stalled)??;
            timeout(WRITE_TIMEOUT, writer.flush()).await.map_err(stalled)??;
        }
    }
}
