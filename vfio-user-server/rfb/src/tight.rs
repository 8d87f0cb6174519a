//! TightPNG encoding: rectangles as PNGs, which browsers decode natively.

use std::io;

use crate::canvas::{Canvas, Rect};

/// Number of the encoding.
pub const TIGHT_PNG: i32 = -260;

const PNG: u8 = 0xa0;

/// Appends a rectangle of a picture.
pub fn put(canvas: &Canvas, rect: Rect, out: &mut Vec<u8>) -> io::Result<()> {
    let png = png(canvas, rect)?;
    out.push(PNG);
    // The length has up to 22 bits: 7, 7 and 8 bits per byte.
    let mut length = png.len();
    for _ in 0..2 {
        let (low, rest) = ((length & 0x7f) as u8, length >> 7);
        if rest == 0 {
            out.push(low);
            break;
        }
        out.push(low | 0x80);
        length = rest;
    }
    if png.len() >= 1 << 14 {
        // `MAX_PIXELS` keeps the length within 22 bits.
        out.push(length as u8);
    }
    out.extend_from_slice(&png);
    Ok(())
}

/// Limit of the pixels of one rectangle, so that the length of its PNG fits into 22 bits even for
/// noise.
pub const MAX_PIXELS: u32 = 1 << 20;

fn png(canvas: &Canvas, rect: Rect) -> io::Result<Vec<u8>> {
    let mut png = Vec::new();
    let mut encoder = png::Encoder::new(&mut png, rect.width, rect.height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    let mut writer = encoder.write_header().map_err(io::Error::other)?;
    let mut pixels = Vec::with_capacity(rect.width as usize * rect.height as usize * 3);
    for y in rect.y..rect.y + rect.height {
        pixels.extend(canvas.rgb(y, rect.x, rect.width).flatten());
    }
    writer.write_image_data(&pixels).map_err(io::Error::other)?;
    writer.finish().map_err(io::Error::other)?;
    Ok(png)
}
