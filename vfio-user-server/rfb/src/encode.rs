//! Framebuffer updates in a client's pixel format and encoding.

use std::io;

use crate::canvas::{Canvas, Rect};
use crate::pixels::{Packer, PixelFormat};
use crate::tight::{self, TIGHT_PNG};
use crate::zrle::{self, ZRLE};

const RAW: i32 = 0;
const DESKTOP_SIZE: i32 = -223;
const QEMU_EXTENDED_KEY: i32 = -258;

/// Pixel format and encodings of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientFormat {
    /// Pixel format.
    pub pixels: PixelFormat,
    encoding: i32,
    desktop_size: bool,
    extended_keys: bool,
}

impl Default for ClientFormat {
    fn default() -> Self {
        Self { pixels: PixelFormat::XRGB, encoding: RAW, desktop_size: false, extended_keys: false }
    }
}

impl ClientFormat {
    /// Chooses from the encodings that the client supports, in its order of preference.
    pub fn choose_encoding(&mut self, encodings: &[i32]) {
        let best = encodings.iter().find(|encoding| [RAW, ZRLE, TIGHT_PNG].contains(encoding));
        self.encoding = best.copied().unwrap_or(RAW);
        self.desktop_size = encodings.contains(&DESKTOP_SIZE);
        self.extended_keys = encodings.contains(&QEMU_EXTENDED_KEY);
    }
}

/// Encoder of the updates for one client.
#[derive(Debug)]
pub struct Encoder {
    /// Size of the screen as the client knows it.
    pub size: (u32, u32),
    /// Number of the last read that the client has seen.
    pub seen: u64,
    announced_keys: bool,
    zlib: zrle::Stream,
}

impl Encoder {
    /// Creates an encoder for a client that knows this size and has seen no picture.
    pub fn new(size: (u32, u32)) -> Self {
        Self { size, seen: 0, announced_keys: false, zlib: zrle::Stream::default() }
    }

    /// Encodes the changes since the last update, or the whole screen. The update is empty if no
    /// change is within the size that the client knows.
    pub fn update(
        &mut self,
        canvas: &Canvas,
        client: &ClientFormat,
        whole: bool,
    ) -> io::Result<Vec<u8>> {
        let mut out = vec![0; 4];
        let mut count = 0_u16;
        if client.extended_keys && !self.announced_keys {
            self.announced_keys = true;
            header(Rect::default(), QEMU_EXTENDED_KEY, &mut out);
            count += 1;
        }
        let (width, height) = (canvas.shape().width, canvas.shape().height);
        let seen = if whole { None } else { Some(self.seen) };
        if (width, height) != self.size && client.desktop_size {
            self.size = (width, height);
            // The next update contains the whole screen in its new size.
            self.seen = 0;
            header(Rect { x: 0, y: 0, width, height }, DESKTOP_SIZE, &mut out);
            count += 1;
        } else {
            let changed = match seen {
                Some(seen) => canvas.changed_since(seen),
                None => vec![canvas.whole()],
            };
            self.seen = canvas.last_change();
            let visible = Rect { x: 0, y: 0, width: self.size.0, height: self.size.1 };
            let packer = Packer::new(&client.pixels);
            for rect in changed.into_iter().map(|rect| rect.intersection(visible)) {
                let max_rows = match client.encoding {
                    TIGHT_PNG => (tight::MAX_PIXELS / rect.width.max(1)).max(1),
                    _ => u32::MAX,
                };
                for band in bands(rect, max_rows) {
                    self.rect(canvas, band, client, &packer, &mut out)?;
                    count += 1;
                }
            }
        }
        if count == 0 {
            return Ok(Vec::new());
        }
        out[2..4].copy_from_slice(&count.to_be_bytes());
        Ok(out)
    }

    fn rect(
        &mut self,
        canvas: &Canvas,
        rect: Rect,
        client: &ClientFormat,
        packer: &Packer,
        out: &mut Vec<u8>,
    ) -> io::Result<()> {
        header(rect, client.encoding, out);
        match client.encoding {
            ZRLE => self.zlib.put(canvas, rect, packer, out),
            TIGHT_PNG => tight::put(canvas, rect, out)?,
            _ => {
                for y in rect.y..rect.y + rect.height {
                    canvas.rgb(y, rect.x, rect.width).for_each(|colour| packer.put(colour, out));
                }
            }
        }
        Ok(())
    }
}

/// Splits a rectangle into parts of at most `rows` rows.
fn bands(rect: Rect, rows: u32) -> impl Iterator<Item = Rect> {
    let step = rows.min(rect.height).max(1);
    let tops = (rect.y..rect.y + rect.height).step_by(step as usize);
    tops.map(move |y| Rect { y, height: step.min(rect.y + rect.height - y), ..rect })
        .filter(|band| !band.is_empty())
}

/// Writes the header of a rectangle. Coordinates fit into 16 bits, as those of all modes do.
fn header(rect: Rect, encoding: i32, out: &mut Vec<u8>) {
    for number in [rect.x, rect.y, rect.width, rect.height] {
        out.extend((number as u16).to_be_bytes());
    }
    out.extend(encoding.to_be_bytes());
}

/// Returns the ServerInit message: size, pixel format and title.
pub fn server_init(size: (u32, u32), name: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(24 + name.len());
    out.extend((size.0 as u16).to_be_bytes());
    out.extend((size.1 as u16).to_be_bytes());
    out.extend(PixelFormat::XRGB.bytes());
    out.extend((name.len() as u32).to_be_bytes());
    out.extend_from_slice(name.as_bytes());
    out
}
