//! A vGPU's screen on a WebSocket.

use std::io;

use axum::body::Bytes;
use axum::extract::ws::{Message, WebSocket};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use crate::console::live_screens::ViewerSlot;
use crate::console::qmp_input::QmpInput;
use crate::console::viewer;

/// Longest message from a page, in bytes.
pub const MAX_MESSAGE: usize = 64 << 10;

/// Size of the buffer between WebSocket and RFB session, in bytes.
const BUFFER: usize = 64 << 10;

/// Serves a screen on a WebSocket, until either side disconnects.
pub async fn serve(
    mut socket: WebSocket,
    slot: ViewerSlot,
    input: Option<QmpInput>,
    title: String,
) {
    let (near, far) = tokio::io::duplex(BUFFER);
    let session = viewer::serve(far, slot, input, &title);
    let result = tokio::select! {
        result = session => result,
        result = relay(&mut socket, near) => result,
    };
    if let Err(error) = result {
        log::debug!("A screen in the web console has ended: {error}");
    }
    // The page may have disconnected first.
    let _ = socket.send(Message::Close(None)).await;
}

/// Copies binary messages to the RFB session and the session's bytes to the WebSocket.
async fn relay(socket: &mut WebSocket, near: DuplexStream) -> io::Result<()> {
    let (mut from_session, mut to_session) = tokio::io::split(near);
    let mut bytes = vec![0; BUFFER];
    loop {
        tokio::select! {
            message = socket.recv() => match message {
                Some(Ok(Message::Binary(message))) => to_session.write_all(&message).await?,
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                Some(Ok(Message::Text(_) | Message::Close(_))) | None => return Ok(()),
                Some(Err(error)) => return Err(io::Error::other(error)),
            },
            count = from_session.read(&mut bytes) => match count? {
                0 => return Ok(()),
                count => {
                    let message = Message::Binary(Bytes::copy_from_slice(&bytes[..count]));
                    socket.send(message).await.map_err(io::Error::other)?;
                }
            },
        }
    }
}
