//! ZRLE encoding: tiles with few colours as a palette, other tiles raw, compressed in one zlib
//! stream per connection.

use flate2::{Compress, Compression, FlushCompress};

use crate::canvas::{Canvas, Rect, TILE};
use crate::pixels::Packer;

/// Number of the encoding.
pub const ZRLE: i32 = 16;

/// Maximum number of colours of a palette.
const PALETTE: usize = 16;

/// zlib stream of one viewer.
#[derive(Debug)]
pub struct Stream(Compress);

impl Default for Stream {
    fn default() -> Self {
        Self(Compress::new(Compression::fast(), true))
    }
}

impl Stream {
    /// Appends a rectangle of a picture.
    pub fn put(&mut self, canvas: &Canvas, rect: Rect, packer: &Packer, out: &mut Vec<u8>) {
        let mut tiles = Vec::new();
        let mut colours = Vec::with_capacity((TILE * TILE) as usize);
        for y in (rect.y..rect.y + rect.height).step_by(TILE as usize) {
            for x in (rect.x..rect.x + rect.width).step_by(TILE as usize) {
                let tile = Rect { x, y, width: TILE, height: TILE }.intersection(rect);
                colours.clear();
                for y in tile.y..tile.y + tile.height {
                    colours.extend(canvas.rgb(y, tile.x, tile.width));
                }
                put_tile(&colours, tile.width as usize, packer, &mut tiles);
            }
        }
        let start = out.len();
        out.extend([0; 4]);
        self.deflate(&tiles, out);
        let length = (out.len() - start - 4) as u32;
        out[start..start + 4].copy_from_slice(&length.to_be_bytes());
    }

    fn deflate(&mut self, mut input: &[u8], out: &mut Vec<u8>) {
        loop {
            out.reserve((input.len() / 2).max(4096));
            let before = self.0.total_in();
            // Compression fails only with a wrong setting; the setting is constant.
            let done = self.0.compress_vec(input, out, FlushCompress::Sync);
            input = &input[(self.0.total_in() - before) as usize..];
            // Remaining capacity means that the flush is complete.
            if done.is_err() || (input.is_empty() && out.len() < out.capacity()) {
                return;
            }
        }
    }
}

fn put_tile(colours: &[[u8; 3]], width: usize, packer: &Packer, out: &mut Vec<u8>) {
    let Some(palette) = palette(colours) else {
        out.push(0);
        for colour in colours {
            packer.put_compressed(*colour, out);
        }
        return;
    };
    out.push(palette.len() as u8);
    for colour in &palette {
        packer.put_compressed(*colour, out);
    }
    let bits = match palette.len() {
        1 => return,
        2 => 1,
        3..=4 => 2,
        _ => 4,
    };
    for row in colours.chunks(width) {
        for group in row.chunks(8 / bits) {
            let mut byte = 0_u8;
            for (place, colour) in group.iter().enumerate() {
                let index = palette.iter().position(|entry| entry == colour).unwrap_or_default();
                byte |= (index as u8) << (8 - bits * (place + 1));
            }
            out.push(byte);
        }
    }
}

/// Returns the colours of a tile, if there are at most [`PALETTE`].
fn palette(colours: &[[u8; 3]]) -> Option<Vec<[u8; 3]>> {
    let mut palette: Vec<[u8; 3]> = Vec::with_capacity(PALETTE);
    let mut last = None;
    for colour in colours {
        if last == Some(colour) {
            continue;
        }
        last = Some(colour);
        if !palette.contains(colour) {
            if palette.len() == PALETTE {
                return None;
            }
            palette.push(*colour);
        }
    }
    Some(palette)
}
