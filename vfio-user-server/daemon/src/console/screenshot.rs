//! Screenshot of a vGPU, as a PNG.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use mdev_core::device::Scanout;

use super::readout::Readout;
use super::video_memory;
use crate::manager::Result;
use vgpud_api::{ErrorCode, ErrorDetail};

/// Requests a worker's screen and renders it.
pub fn take(control: &Path) -> Result<Vec<u8>> {
    let (scanout, memory) = video_memory::locate(control).map_err(|error| {
        ErrorDetail::new(
            ErrorCode::Unavailable,
            format!("The worker does not report its screen: {error}"),
        )
    })?;
    if !scanout.enabled {
        let message = "The screen is off: the guest has set no mode, or has blanked the screen. A VM \
                       with another display adapter starts on that one (QEMU: -vga none)";
        return Err(ErrorDetail::new(ErrorCode::Conflict, message));
    }
    let memory = memory.ok_or_else(|| {
        ErrorDetail::new(ErrorCode::Unavailable, "The worker sent no video memory to read")
    })?;
    render(&scanout, memory).map_err(|error| {
        let message = format!("The screen cannot be read: {error}");
        ErrorDetail::new(ErrorCode::Unavailable, message)
    })
}

/// Encodes RGB pixels as a PNG.
pub fn encode_png(width: u32, height: u32, pixels: &[u8]) -> io::Result<Vec<u8>> {
    let mut png = Vec::new();
    let mut writer = encoder(&mut png, width, height).write_header().map_err(io::Error::other)?;
    writer.write_image_data(pixels).map_err(io::Error::other)?;
    writer.finish().map_err(io::Error::other)?;
    Ok(png)
}

fn encoder(png: &mut Vec<u8>, width: u32, height: u32) -> png::Encoder<'_, &mut Vec<u8>> {
    let mut encoder = png::Encoder::new(png, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    encoder
}

/// Renders the screen that `scanout` describes in a file of video memory.
pub fn render(scanout: &Scanout, memory: OwnedFd) -> io::Result<Vec<u8>> {
    let screen = Readout::new(scanout, memory)?;
    let shape = screen.shape();
    let mut png = Vec::new();
    let mut writer =
        encoder(&mut png, shape.width, shape.height).write_header().map_err(io::Error::other)?;
    let mut stream = writer.stream_writer().map_err(io::Error::other)?;
    let mut row = vec![0; shape.row_bytes()];
    let mut rgb = Vec::with_capacity(shape.width as usize * 3);
    for y in 0..shape.height {
        screen.read_row(y, &mut row)?;
        rgb.clear();
        rgb.extend(
            row.chunks_exact(shape.format.bytes()).flat_map(|pixel| shape.format.rgb(pixel)),
        );
        io::Write::write_all(&mut stream, &rgb)?;
    }
    stream.finish().map_err(io::Error::other)?;
    writer.finish().map_err(io::Error::other)?;
    Ok(png)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;

    fn memory(bytes: &[u8]) -> OwnedFd {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file.into()
    }

    fn scanout(width: u32, height: u32, bits_per_pixel: u32) -> Scanout {
        let stride = width * bits_per_pixel.div_ceil(8);
        Scanout { enabled: true, width, height, stride, bits_per_pixel, ..Scanout::default() }
    }

    fn decode(png: &[u8]) -> (u32, u32, Vec<u8>) {
        let mut reader = png::Decoder::new(io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        (info.width, info.height, pixels)
    }

    #[test]
    fn every_pixel_format_is_decoded() {
        let orange = [255, 165, 0];
        for (bits, big_endian, pixel, shown) in [
            (32, false, &[0, 165, 255, 0][..], orange),
            (32, true, &[0, 255, 165, 0], orange),
            (24, false, &[0, 165, 255], orange),
            (16, false, &[0x1f, 0xf8], [255, 0, 255]),
            (15, false, &[0x00, 0x7c], [255, 0, 0]),
            (8, false, &[200], [200, 200, 200]),
        ] {
            let scanout = Scanout { big_endian, ..scanout(1, 1, bits) };
            let png = render(&scanout, memory(pixel)).unwrap();
            assert_eq!(decode(&png), (1, 1, shown.to_vec()), "{bits} bits");
        }
    }

    #[test]
    fn missing_and_short_video_memory_are_reported() {
        use crate::worker_client::tests::answered;
        use crate::worker_protocol::WorkerReply;
        let reply = WorkerReply::Scanout(scanout(4, 4, 32));
        let none = answered(&reply, &[], take).unwrap_err();
        assert_eq!(none.message, "The worker sent no video memory to read");
        let short = ipc::mem::sealed_memfd(c"short", 63).unwrap();
        let short = answered(&reply, &[short.as_fd()], take).unwrap_err();
        assert!(short.message.starts_with("The screen cannot be read: "), "{short}");
        let disk = memory(&[0; 64]);
        let disk = answered(&reply, &[disk.as_fd()], take).unwrap_err();
        let message = "The worker passes a file that is not video memory";
        assert!(disk.message.ends_with(message), "{disk}");
    }

    #[test]
    fn offset_and_stride_are_applied() {
        let scanout = Scanout { offset: 3, stride: 5, ..scanout(2, 2, 8) };
        let png = render(&scanout, memory(&[0, 0, 0, 1, 2, 9, 9, 9, 3, 4])).unwrap();
        assert_eq!(decode(&png).2, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]);
    }

    #[test]
    fn screen_outside_of_video_memory_is_an_error() {
        let (reader, _writer) = nix::unistd::pipe().unwrap();
        assert!(render(&scanout(1, 1, 32), reader).is_err(), "not a file");
        assert!(render(&scanout(4, 4, 32), memory(&[0; 63])).is_err(), "one byte short");
    }

    proptest! {
        #[test]
        fn any_scanout_renders_without_panic_or_unbounded_allocation(
            width in prop_oneof![0_u32..64, any::<u32>()],
            height in prop_oneof![0_u32..64, any::<u32>()],
            stride in prop_oneof![0_u32..512, any::<u32>()],
            bits_per_pixel in prop_oneof![Just(32_u32), 0_u32..40, any::<u32>()],
            offset in prop_oneof![0_u64..4096, any::<u64>()],
            big_endian: bool,
        ) {
            let scanout = Scanout {
                enabled: true, width, height, stride, bits_per_pixel, offset, big_endian,
            };
            if let Ok(png) = render(&scanout, memory(&[7; 4096])) {
                prop_assert_eq!(decode(&png).0, width);
            }
        }
    }
}
