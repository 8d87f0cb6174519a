//! VNC viewer for tests, written from RFC 6143 alone.

use std::io::{Read, Write};

use anyhow::{Context, Result, bail, ensure};
use flate2::{Decompress, FlushDecompress};

pub const RAW: i32 = 0;
pub const ZRLE: i32 = 16;
pub const TIGHT_PNG: i32 = -260;
pub const DESKTOP_SIZE: i32 = -223;

/// A connection to a server, and the picture received so far.
pub struct Viewer<S> {
    stream: S,
    pub size: (usize, usize),
    pub name: String,
    pixels: Vec<[u8; 3]>,
    zlib: Decompress,
    /// Rectangles of the last update: x, y, width, height.
    pub rects: Vec<[usize; 4]>,
}

/// Authenticates, with `password` if the server asks for one; `None` if the password is wrong.
pub fn let_in<S: Read + Write>(
    stream: &mut S,
    password: impl Fn([u8; 16]) -> [u8; 16],
) -> Result<Option<()>> {
    let mut version = [0; 12];
    stream.read_exact(&mut version)?;
    ensure!(version == *b"RFB 003.008\n", "{version:?}");
    stream.write_all(&version)?;
    let mut offer = [0; 2];
    stream.read_exact(&mut offer)?;
    let [1, kind] = offer else { bail!("one authentication type was expected: {offer:?}") };
    stream.write_all(&[kind])?;
    if kind == 2 {
        let mut challenge = [0; 16];
        stream.read_exact(&mut challenge)?;
        stream.write_all(&password(challenge))?;
    }
    let mut result = [0; 4];
    stream.read_exact(&mut result)?;
    Ok((result == [0; 4]).then_some(()))
}

impl<S: Read + Write> Viewer<S> {
    /// Connects and initializes the session.
    pub fn new(mut stream: S, encodings: &[i32]) -> Result<Self> {
        stream.write_all(&[1])?;
        let mut head = [0; 24];
        stream.read_exact(&mut head)?;
        let side = |at: usize| usize::from(u16::from_be_bytes([head[at], head[at + 1]]));
        let size = (side(0), side(2));
        ensure!(head[4..8] == [32, 24, 0, 1], "unexpected pixel format: {head:?}");
        let mut name =
            vec![0; u32::from_be_bytes([head[20], head[21], head[22], head[23]]) as usize];
        stream.read_exact(&mut name)?;
        let mut viewer = Self {
            stream,
            size,
            name: String::from_utf8(name)?,
            pixels: vec![[0; 3]; size.0 * size.1],
            zlib: Decompress::new(true),
            rects: Vec::new(),
        };
        let mut message = vec![2, 0];
        message.extend(u16::try_from(encodings.len())?.to_be_bytes());
        message.extend(encodings.iter().flat_map(|number| number.to_be_bytes()));
        viewer.send(&message)?;
        Ok(viewer)
    }

    pub fn send(&mut self, message: &[u8]) -> Result<()> {
        Ok(self.stream.write_all(message)?)
    }

    pub fn ask(&mut self, incremental: bool) -> Result<()> {
        let (width, height) = self.size;
        let mut message = vec![3, u8::from(incremental), 0, 0, 0, 0];
        message.extend(u16::try_from(width)?.to_be_bytes());
        message.extend(u16::try_from(height)?.to_be_bytes());
        self.send(&message)
    }

    pub fn key(&mut self, down: bool, keysym: u32) -> Result<()> {
        let mut message = vec![4, u8::from(down), 0, 0];
        message.extend(keysym.to_be_bytes());
        self.send(&message)
    }

    pub fn pixel(&self, x: usize, y: usize) -> [u8; 3] {
        self.pixels[y * self.size.0 + x]
    }

    fn bytes(&mut self, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Waits for an update and applies it.
    pub fn update(&mut self) -> Result<()> {
        let head = self.bytes(4)?;
        ensure!(head[0] == 0, "no update: {head:?}");
        self.rects.clear();
        for _ in 0..u16::from_be_bytes([head[2], head[3]]) {
            let head = self.bytes(12)?;
            let side = |at: usize| usize::from(u16::from_be_bytes([head[at], head[at + 1]]));
            let rect @ [_, _, width, height] = [side(0), side(2), side(4), side(6)];
            let encoding = i32::from_be_bytes(head[8..].try_into()?);
            self.rects.push(rect);
            let pixels = match encoding {
                DESKTOP_SIZE => {
                    self.size = (width, height);
                    self.pixels = vec![[0; 3]; width * height];
                    continue;
                }
                RAW => {
                    let bytes = self.bytes(width * height * 4)?;
                    bytes.chunks_exact(4).map(|p| [p[2], p[1], p[0]]).collect()
                }
                ZRLE => self.zrle(width, height)?,
                TIGHT_PNG => self.tight_png(width, height)?,
                other => bail!("unrequested encoding {other}"),
            };
            self.put(rect, &pixels)?;
        }
        Ok(())
    }

    fn put(&mut self, [x, y, width, height]: [usize; 4], pixels: &[[u8; 3]]) -> Result<()> {
        ensure!(
            x + width <= self.size.0 && y + height <= self.size.1,
            "rectangle outside the screen"
        );
        ensure!(pixels.len() == width * height, "{} pixels", pixels.len());
        for (row, pixels) in pixels.chunks(width).enumerate() {
            let start = (y + row) * self.size.0 + x;
            self.pixels[start..start + width].copy_from_slice(pixels);
        }
        Ok(())
    }

    fn tight_png(&mut self, width: usize, height: usize) -> Result<Vec<[u8; 3]>> {
        let control = self.bytes(1)?[0];
        ensure!(control == 0xa0, "{control:#x} is no PNG");
        let mut length = 0;
        for shift in [0, 7, 14] {
            let byte = usize::from(self.bytes(1)?[0]);
            length |= (if shift == 14 { byte } else { byte & 0x7f }) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        let png = self.bytes(length)?;
        let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info()?;
        let mut bytes = vec![0; reader.output_buffer_size().context("A size")?];
        let info = reader.next_frame(&mut bytes)?;
        ensure!((info.width as usize, info.height as usize) == (width, height));
        Ok(bytes.chunks_exact(3).map(|p| [p[0], p[1], p[2]]).collect())
    }

    fn zrle(&mut self, width: usize, height: usize) -> Result<Vec<[u8; 3]>> {
        let length = self.bytes(4)?;
        let length = u32::from_be_bytes([length[0], length[1], length[2], length[3]]) as usize;
        let packed = self.bytes(length)?;
        // A tile is at most as long as its pixels and one byte per row.
        let mut plain = Vec::with_capacity(width * height * 4 + (1 << 16));
        self.zlib.decompress_vec(&packed, &mut plain, FlushDecompress::Sync)?;
        let mut bytes = plain.into_iter();
        let mut pixels = vec![[0; 3]; width * height];
        for top in (0..height).step_by(64) {
            for left in (0..width).step_by(64) {
                let (columns, rows) = ((width - left).min(64), (height - top).min(64));
                let kind = usize::from(byte_of(&mut bytes)?);
                ensure!(kind <= 16, "run lengths: {kind}");
                let palette = (0..kind).map(|_| colour(&mut bytes)).collect::<Result<Vec<_>>>()?;
                let bits = match kind {
                    0 | 1 => 0,
                    2 => 1,
                    3 | 4 => 2,
                    _ => 4,
                };
                for y in top..top + rows {
                    let (mut byte, mut left_bits) = (0, 0);
                    for x in left..left + columns {
                        pixels[y * width + x] = match kind {
                            0 => colour(&mut bytes)?,
                            1 => palette[0],
                            _ => {
                                if left_bits == 0 {
                                    (byte, left_bits) = (byte_of(&mut bytes)?, 8);
                                }
                                left_bits -= bits;
                                let index = usize::from(byte >> left_bits) & ((1 << bits) - 1);
                                *palette.get(index).context("No such colour")?
                            }
                        };
                    }
                }
            }
        }
        ensure!(bytes.next().is_none(), "more than the tiles");
        Ok(pixels)
    }
}

fn colour(bytes: &mut impl Iterator<Item = u8>) -> Result<[u8; 3]> {
    let (blue, green, red) = (byte_of(bytes)?, byte_of(bytes)?, byte_of(bytes)?);
    Ok([red, green, blue])
}

fn byte_of(bytes: &mut impl Iterator<Item = u8>) -> Result<u8> {
    bytes.next().context("The tiles are cut off")
}
