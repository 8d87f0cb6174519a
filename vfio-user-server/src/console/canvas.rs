//! What a screen looked like at the last look, and which parts of it changed when.
//!
//! The picture is kept as it is in video memory, so that finding what changed is a comparison of bytes. Changes are noted
//! by tiles, each with the number of the look that found it: a viewer that has seen the picture of one number needs the
//! tiles with higher ones, whatever other viewers have seen.

use font8x8::legacy::BASIC_LEGACY;

use super::readout::{Format, Shape};

/// Side of a tile, in pixels. ZRLE has the same.
pub const TILE: u32 = 64;

/// A part of a screen, in pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rect {
    /// From the left.
    pub x: u32,
    /// From the top.
    pub y: u32,
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
}

impl Rect {
    /// What is in both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let (x, y) = (self.x.max(other.x), self.y.max(other.y));
        let right = self.x.saturating_add(self.width).min(other.x.saturating_add(other.width));
        let bottom = self.y.saturating_add(self.height).min(other.y.saturating_add(other.height));
        Self { x, y, width: right.saturating_sub(x), height: bottom.saturating_sub(y) }
    }

    /// True where nothing is in it.
    pub fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0
    }
}

/// A picture.
#[derive(Debug)]
pub struct Canvas {
    shape: Shape,
    pixels: Vec<u8>,
    /// For each tile, the look that last found a change in it.
    changed: Vec<u64>,
    look: u64,
}

impl Canvas {
    /// A black one. `look` is the number of the look that found its shape.
    pub fn new(shape: Shape, look: u64) -> Self {
        let tiles = shape.width.div_ceil(TILE) * shape.height.div_ceil(TILE);
        Self {
            shape,
            pixels: vec![0; shape.row_bytes() * shape.height as usize],
            changed: vec![look; tiles as usize],
            look,
        }
    }

    /// A dark one that says something, for people: of that size, so that no window changes, unless that is too small.
    pub fn saying(text: &str, look: u64, (width, height): (u32, u32)) -> Self {
        const SCALE: u32 = 2;
        let fits = width >= 800 && height >= 120;
        let (width, height) = if fits { (width, height) } else { (800, 120) };
        let shape = Shape { width, height, format: Format::XRGB };
        let mut canvas = Self::new(shape, look);
        let left = width.saturating_sub(text.chars().count() as u32 * 8 * SCALE) / 2;
        let top = height / 2 - 4 * SCALE;
        for (place, glyph) in text.chars().enumerate() {
            let Some(rows) = BASIC_LEGACY.get(glyph as usize) else { continue };
            for (dot, row) in (0..64).map(|dot| (dot, rows[dot as usize / 8])) {
                let x = left + (place as u32 * 8 + dot % 8) * SCALE;
                let y = top + dot / 8 * SCALE;
                if row >> (dot % 8) & 1 == 1 {
                    canvas.light(Rect { x, y, width: SCALE, height: SCALE });
                }
            }
        }
        canvas
    }

    fn light(&mut self, dot: Rect) {
        let dot = dot.and(self.whole());
        for y in dot.y..dot.y + dot.height {
            let range = self.range(y, dot.x, dot.width);
            self.pixels[range].fill(0xc8);
        }
    }

    /// What its pixels are like.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// All of it.
    pub fn whole(&self) -> Rect {
        Rect { x: 0, y: 0, width: self.shape.width, height: self.shape.height }
    }

    /// The number of the last look that found a change.
    pub fn last_change(&self) -> u64 {
        self.look
    }

    fn range(&self, y: u32, x: u32, width: u32) -> std::ops::Range<usize> {
        let bytes = self.shape.format.bytes();
        let start = y as usize * self.shape.row_bytes() + x as usize * bytes;
        start..start + width as usize * bytes
    }

    /// Takes a row as the look of this number found it; whether it is another than before.
    pub fn put_row(&mut self, y: u32, row: &[u8], look: u64) -> bool {
        let whole = self.range(y, 0, self.shape.width);
        if self.pixels[whole.clone()] == *row {
            return false;
        }
        let across = self.shape.width.div_ceil(TILE);
        let tile_bytes = TILE as usize * self.shape.format.bytes();
        let old = &mut self.pixels[whole];
        let first = (y / TILE * across) as usize;
        for (tile, (old, new)) in old.chunks_mut(tile_bytes).zip(row.chunks(tile_bytes)).enumerate()
        {
            if *old != *new {
                old.copy_from_slice(new);
                self.changed[first + tile] = look;
            }
        }
        self.look = look;
        true
    }

    /// What has changed since the look of that number: tiles, as few rectangles.
    pub fn changed_since(&self, seen: u64) -> Vec<Rect> {
        let across = self.shape.width.div_ceil(TILE);
        let mut done: Vec<Rect> = Vec::new();
        // Those that end at the row of tiles above.
        let mut open: Vec<Rect> = Vec::new();
        for (row, tiles) in (0..).zip(self.changed.chunks(across as usize)) {
            let y = row * TILE;
            let height = TILE.min(self.shape.height - y);
            let mut here: Vec<Rect> = Vec::new();
            for (column, _) in (0..).zip(tiles).filter(|(_, changed)| **changed > seen) {
                let x = column * TILE;
                let width = TILE.min(self.shape.width - x);
                match here.last_mut() {
                    Some(last) if last.x + last.width == x => last.width += width,
                    _ => here.push(Rect { x, y, width, height }),
                }
            }
            for rect in &mut here {
                let above = open.iter().position(|o| o.x == rect.x && o.width == rect.width);
                if let Some(above) = above {
                    let above = open.swap_remove(above);
                    *rect = Rect { height: above.height + rect.height, ..above };
                }
            }
            done.append(&mut open);
            open = here;
        }
        done.append(&mut open);
        done
    }

    /// A part of a row as red, green and blue.
    pub fn rgb(&self, y: u32, x: u32, width: u32) -> impl Iterator<Item = [u8; 3]> {
        let format = self.shape.format;
        let pixels = &self.pixels[self.range(y, x, width)];
        pixels.chunks_exact(format.bytes()).map(move |pixel| format.rgb(pixel))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn canvas(width: u32, height: u32) -> Canvas {
        Canvas::new(Shape { width, height, format: Format::XRGB }, 1)
    }

    #[test]
    fn a_new_picture_is_all_news_and_a_still_one_is_none() {
        let mut canvas = canvas(130, 70);
        assert_eq!(canvas.changed_since(0), [canvas.whole()]);
        assert_eq!(canvas.changed_since(1), []);
        assert!(!canvas.put_row(3, &[0; 520], 2));
        assert_eq!((canvas.changed_since(1), canvas.last_change()), (Vec::new(), 1));
    }

    #[test]
    fn each_viewer_gets_what_is_new_to_it() {
        let mut canvas = canvas(200, 200);
        let mut row = [0; 800];
        row[4 * 199] = 7;
        assert!(canvas.put_row(70, &row, 2));
        row[0] = 7;
        assert!(canvas.put_row(70, &row, 3));
        let (left, right) = (
            Rect { x: 0, y: 64, width: 64, height: 64 },
            Rect { x: 192, y: 64, width: 8, height: 64 },
        );
        assert_eq!(canvas.changed_since(2), [left]);
        assert_eq!(canvas.changed_since(1), [left, right]);
        assert_eq!(canvas.rgb(70, 0, 2).collect::<Vec<_>>(), [[0, 0, 7], [0, 0, 0]]);
    }

    #[test]
    fn words_are_seen() {
        for (size, shown) in [((64, 48), (800, 120)), ((1920, 1200), (1920, 1200))] {
            let canvas = Canvas::saying("The screen is off", 1, size);
            let Rect { width, height, .. } = canvas.whole();
            assert_eq!((width, height), shown);
            let all = (0..height).flat_map(|y| canvas.rgb(y, 0, width));
            let lit = all.filter(|p| *p != [0; 3]).count();
            assert!(lit > 500, "{lit}");
        }
        // More than fits is cut off.
        Canvas::saying(&"W".repeat(1000), 1, (0, 0));
    }

    proptest! {
        /// The rectangles are the changed tiles: all of them, none twice, nothing else.
        #[test]
        fn rectangles_cover_what_changed(
            width in 1_u32..300, height in 1_u32..300,
            dots in proptest::collection::vec((0_u32..300, 0_u32..300), 0..12),
        ) {
            let mut canvas = canvas(width, height);
            let mut expected = std::collections::BTreeSet::new();
            for (x, y) in dots {
                let (x, y) = (x % width, y % height);
                let mut row: Vec<u8> =
                    canvas.rgb(y, 0, width).flat_map(|[r, g, b]| [b, g, r, 0]).collect();
                row[x as usize * 4] = 1;
                canvas.put_row(y, &row, 2);
                expected.insert((x / TILE, y / TILE));
            }
            let mut found = std::collections::BTreeSet::new();
            for rect in canvas.changed_since(1) {
                prop_assert!(rect.x + rect.width <= width && rect.y + rect.height <= height);
                for tile_y in rect.y / TILE..(rect.y + rect.height).div_ceil(TILE) {
                    for tile_x in rect.x / TILE..(rect.x + rect.width).div_ceil(TILE) {
                        prop_assert!(found.insert((tile_x, tile_y)), "twice");
                    }
                }
            }
            prop_assert_eq!(found, expected);
        }
    }
}
