//! Thumbnail of a vGPU's screen, as a PNG.

use std::io;
use std::path::Path;

use super::readout::Readout;
use super::screenshot;
use super::video_memory;
use crate::manager::Result;
use vgpud_api::{ErrorCode, ErrorDetail};

/// Width of a thumbnail, in pixels: the width of a card on the page, for displays of high
/// resolution.
const WIDTH: u32 = 480;

/// Requests a worker's screen and renders a thumbnail; empty if the screen is off.
pub fn take(control: &Path) -> Result<Vec<u8>> {
    let unavailable = |error: io::Error| ErrorDetail::new(ErrorCode::Unavailable, error);
    let (scanout, memory) = video_memory::locate(control).map_err(unavailable)?;
    match memory {
        Some(memory) if scanout.enabled => {
            let screen = Readout::new(&scanout, memory).map_err(unavailable)?;
            render(&screen).map_err(unavailable)
        }
        _ => Ok(Vec::new()),
    }
}

/// Renders a thumbnail. Each pixel is the mean of the pixels that it replaces.
fn render(screen: &Readout) -> io::Result<Vec<u8>> {
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
    screenshot::encode_png(width, height, &pixels)
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
        let png = render(&Readout::new(&scanout, file.into()).unwrap()).unwrap();
        let mut reader = png::Decoder::new(io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        (info.width, info.height, pixels)
    }

    #[test]
    fn pixels_are_means_of_the_screen_s_pixels() {
        let (width, height, pixels) =
            png_of(960, 400, |x, y| if (x + y) % 2 == 0 { 200 } else { 100 });
        assert_eq!((width, height), (480, 200));
        assert!(pixels.iter().all(|value| *value == 150));
        let (width, height, pixels) = png_of(3, 2, |x, y| (x * 10 + y) as u8);
        assert_eq!((width, height), (3, 2), "small screens are not enlarged");
        assert_eq!(pixels.chunks(3).map(|p| p[0]).collect::<Vec<_>>(), [0, 10, 20, 1, 11, 21]);
        assert_eq!(png_of(8192, 1, |_, _| 9).1, 1);
    }
}
