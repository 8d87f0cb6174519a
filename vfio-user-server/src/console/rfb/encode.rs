//! Updates: what is new of a picture, as a viewer wants it.

use std::io;

use super::pixels::{Packer, PixelFormat};
use super::tight::{self, TIGHT_PNG};
use super::zrle::{self, ZRLE};
use crate::console::canvas::{Canvas, Rect};

const RAW: i32 = 0;
const DESKTOP_SIZE: i32 = -223;
const KEY_PLACES: i32 = -258;

/// What a viewer can take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// How pixels are to be sent.
    pub format: PixelFormat,
    encoding: i32,
    resizes: bool,
    places: bool,
}

impl Default for Wishes {
    fn default() -> Self {
        Self { format: PixelFormat::XRGB, encoding: RAW, resizes: false, places: false }
    }
}

impl Wishes {
    /// Chooses from what it can decode, best first.
    pub fn choose(&mut self, encodings: &[i32]) {
        let best = encodings.iter().find(|one| [RAW, ZRLE, TIGHT_PNG].contains(one));
        self.encoding = best.copied().unwrap_or(RAW);
        self.resizes = encodings.contains(&DESKTOP_SIZE);
        self.places = encodings.contains(&KEY_PLACES);
    }
}

/// What goes on from one update of a viewer to the next.
#[derive(Debug)]
pub struct Encoder {
    /// The size that the viewer takes the screen to have.
    pub size: (u32, u32),
    /// The last look that it has seen.
    pub seen: u64,
    told_places: bool,
    zlib: zrle::Stream,
}

impl Encoder {
    /// A viewer that was told this size, and has seen nothing.
    pub fn new(size: (u32, u32)) -> Self {
        Self { size, seen: 0, told_places: false, zlib: zrle::Stream::default() }
    }

    /// What is new to a viewer; nothing where nothing of it is on the viewer's screen. `all`: it has lost what it saw.
    pub fn update(&mut self, canvas: &Canvas, wishes: &Wishes, all: bool) -> io::Result<Vec<u8>> {
        let mut out = vec![0; 4];
        let mut count = 0_u16;
        if wishes.places && !self.told_places {
            self.told_places = true;
            head(Rect::default(), KEY_PLACES, &mut out);
            count += 1;
        }
        let (width, height) = (canvas.shape().width, canvas.shape().height);
        let seen = if all { None } else { Some(self.seen) };
        if (width, height) != self.size && wishes.resizes {
            self.size = (width, height);
            // What it saw was of the old size: the next update has all of it.
            self.seen = 0;
            head(Rect { x: 0, y: 0, width, height }, DESKTOP_SIZE, &mut out);
            count += 1;
        } else {
            let news = match seen {
                Some(seen) => canvas.changed_since(seen),
                None => vec![canvas.whole()],
            };
            self.seen = canvas.last_change();
            let visible = Rect { x: 0, y: 0, width: self.size.0, height: self.size.1 };
            let packer = Packer::new(&wishes.format);
            for rect in news.into_iter().map(|rect| rect.and(visible)) {
                let most = match wishes.encoding {
                    TIGHT_PNG => (tight::MAX_PIXELS / rect.width.max(1)).max(1),
                    _ => u32::MAX,
                };
                for band in bands(rect, most) {
                    self.rect(canvas, band, wishes, &packer, &mut out)?;
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
        wishes: &Wishes,
        packer: &Packer,
        out: &mut Vec<u8>,
    ) -> io::Result<()> {
        head(rect, wishes.encoding, out);
        match wishes.encoding {
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

/// A rectangle in pieces of at most so many rows.
fn bands(rect: Rect, rows: u32) -> impl Iterator<Item = Rect> {
    let step = rows.min(rect.height).max(1);
    let tops = (rect.y..rect.y + rect.height).step_by(step as usize);
    tops.map(move |y| Rect { y, height: step.min(rect.y + rect.height - y), ..rect })
        .filter(|band| !band.is_empty())
}

/// The beginning of every rectangle. No side is longer than the largest mode's.
fn head(rect: Rect, encoding: i32, out: &mut Vec<u8>) {
    for number in [rect.x, rect.y, rect.width, rect.height] {
        out.extend((number as u16).to_be_bytes());
    }
    out.extend(encoding.to_be_bytes());
}

/// What a viewer is told first: the screen's size, the format, its name.
pub fn server_init(size: (u32, u32), name: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(24 + name.len());
    out.extend((size.0 as u16).to_be_bytes());
    out.extend((size.1 as u16).to_be_bytes());
    out.extend(PixelFormat::XRGB.bytes());
    out.extend((name.len() as u32).to_be_bytes());
    out.extend_from_slice(name.as_bytes());
    out
}
