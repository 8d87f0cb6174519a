//! Screens for the page: small pictures of all, and one of them live.

use std::io;
use std::path::Path;

use axum::body::Bytes;
use axum::extract::ws::{Message, WebSocket};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use crate::api::model::{ErrorCode, ErrorDetail};
use crate::console::monitor::Monitor;
use crate::console::readout::Readout;
use crate::console::screens::Seat;
use crate::console::session;
use crate::manager::{Result, ask};

/// Width of a small picture: what a card of the page shows, for fine displays too.
const WIDTH: u32 = 480;

/// The longest message of a page: what a viewer says is short.
pub const MAX_MESSAGE: usize = 64 << 10;

/// Bytes between the page and the session.
const PIPE: usize = 64 << 10;

/// A small picture of a screen, as a PNG; nothing while the screen is off.
pub fn thumbnail(control: &Path) -> Result<Vec<u8>> {
    let unavailable = |error: io::Error| ErrorDetail::new(ErrorCode::Unavailable, error);
    let (scanout, memory) = ask::scanout(control).map_err(unavailable)?;
    match memory {
        Some(memory) if scanout.enabled => {
            let screen = Readout::new(&scanout, memory).map_err(unavailable)?;
            small(&screen).map_err(unavailable)
        }
        _ => Ok(Vec::new()),
    }
}

/// Each pixel is the mean of those that it stands for.
fn small(screen: &Readout) -> io::Result<Vec<u8>> {
    let shape = screen.shape();
    let width = WIDTH.min(shape.width);
    let height =
        (u64::from(shape.height) * u64::from(width) / u64::from(shape.width)).max(1) as u32;
    let mut pixels = Vec::with_capacity((width * height) as usize * 3);
    let mut row = vec![0; shape.row_bytes()];
    let columns: Vec<usize> = (0..shape.width)
        .map(|x| (u64::from(x) * u64::from(width) / u64::from(shape.width)) as usize)
        .collect();
    for y in 0..height {
        let begin = u64::from(y) * u64::from(shape.height) / u64::from(height);
        let end = u64::from(y + 1) * u64::from(shape.height) / u64::from(height);
        let mut sums = vec![[0_u32; 4]; width as usize];
        for source in begin..end.max(begin + 1) {
            screen.read_row(source as u32, &mut row)?;
            for (pixel, column) in row.chunks_exact(shape.format.bytes()).zip(&columns) {
                let sum = &mut sums[*column];
                let [red, green, blue] = shape.format.rgb(pixel).map(u32::from);
                *sum = [sum[0] + red, sum[1] + green, sum[2] + blue, sum[3] + 1];
            }
        }
        pixels.extend(sums.iter().flat_map(|[red, green, blue, count]| {
            [red, green, blue].map(|sum| (sum / count.max(&1)) as u8)
        }));
    }
    let mut png = Vec::new();
    let mut encoder = png::Encoder::new(&mut png, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    let mut writer = encoder.write_header().map_err(io::Error::other)?;
    writer.write_image_data(&pixels).map_err(io::Error::other)?;
    writer.finish().map_err(io::Error::other)?;
    Ok(png)
}

/// Serves a screen on a WebSocket, until either end leaves.
pub async fn serve(mut socket: WebSocket, seat: Seat, monitor: Option<Monitor>, name: String) {
    let (near, far) = tokio::io::duplex(PIPE);
    let session = session::serve(far, seat, monitor, &name);
    let done = tokio::select! {
        done = session => done,
        done = pass_on(&mut socket, near) => done,
    };
    if let Err(error) = done {
        log::debug!("A page's screen has ended: {error}");
    }
    // The page may have gone first.
    let _ = socket.send(Message::Close(None)).await;
}

/// Passes on what the page says, and what it is told.
async fn pass_on(socket: &mut WebSocket, near: DuplexStream) -> io::Result<()> {
    let (mut told, mut says) = tokio::io::split(near);
    let mut bytes = vec![0; PIPE];
    loop {
        tokio::select! {
            message = socket.recv() => match message {
                Some(Ok(Message::Binary(message))) => says.write_all(&message).await?,
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                Some(Ok(Message::Text(_) | Message::Close(_))) | None => return Ok(()),
                Some(Err(error)) => return Err(io::Error::other(error)),
            },
            count = told.read(&mut bytes) => match count? {
                0 => return Ok(()),
                count => {
                    let message = Message::Binary(Bytes::copy_from_slice(&bytes[..count]));
                    socket.send(message).await.map_err(io::Error::other)?;
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use mdev_core::device::Scanout;

    use super::*;

    fn png_of(width: u32, height: u32, colour: impl Fn(u32, u32) -> u8) -> (u32, u32, Vec<u8>) {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..height)
            .flat_map(|y| (0..width).map(move |x| (x, y)))
            .map(|(x, y)| colour(x, y))
            .collect();
        file.write_all_at(&bytes, 0).unwrap();
        let scanout = Scanout {
            enabled: true,
            width,
            height,
            stride: width,
            bits_per_pixel: 8,
            ..Scanout::default()
        };
        let png = small(&Readout::new(&scanout, file.into()).unwrap()).unwrap();
        let mut reader = png::Decoder::new(io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        (info.width, info.height, pixels)
    }

    #[test]
    fn a_small_picture_is_the_mean_of_the_large_one() {
        let (width, height, pixels) =
            png_of(960, 400, |x, y| if (x + y) % 2 == 0 { 200 } else { 100 });
        assert_eq!((width, height), (480, 200));
        assert!(pixels.iter().all(|value| *value == 150));
        let (width, height, pixels) = png_of(3, 2, |x, y| (x * 10 + y) as u8);
        assert_eq!((width, height), (3, 2), "it is not made larger");
        assert_eq!(pixels.chunks(3).map(|p| p[0]).collect::<Vec<_>>(), [0, 10, 20, 1, 11, 21]);
        assert_eq!(png_of(8192, 1, |_, _| 9).1, 1);
    }
}
