//! Last read picture of a screen, with its changes by tile.
//!
//! Pixels keep their format in video memory, so that changes are found by comparing bytes. Each
//! tile has the number of the last read that found a change in it. A viewer that has seen read N
//! needs the tiles with higher numbers, regardless of other viewers.

use font8x8::legacy::BASIC_LEGACY;

use crate::picture::{Format, Shape};

/// Width and height of a tile, in pixels; the same as ZRLE's.
pub const TILE: u32 = 64;

/// Rectangle on a screen, in pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rect {
    /// Left edge.
    pub x: u32,
    /// Top edge.
    pub y: u32,
    /// Width.
    pub width: u32,
    /// Height.
    pub height: u32,
}

impl Rect {
    /// Returns the intersection.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        let (x, y) = (self.x.max(other.x), self.y.max(other.y));
        let right = self.x.saturating_add(self.width).min(other.x.saturating_add(other.width));
        let bottom = self.y.saturating_add(self.height).min(other.y.saturating_add(other.height));
        Self { x, y, width: right.saturating_sub(x), height: bottom.saturating_sub(y) }
    }

    /// Returns whether the rectangle has no pixels.
    pub fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0
    }
}

/// Picture with its changes.
#[derive(Debug)]
pub struct Canvas {
    shape: Shape,
    pixels: Vec<u8>,
    /// For each tile, the number of the last read that found a change.
    changed: Vec<u64>,
    last_change: u64,
}

impl Canvas {
    /// Creates a black picture, first seen by the read with number `read`.
    pub fn new(shape: Shape, read: u64) -> Self {
        let tiles = shape.width.div_ceil(TILE) * shape.height.div_ceil(TILE);
        Self {
            shape,
            pixels: vec![0; shape.row_bytes() * shape.height as usize],
            changed: vec![read; tiles as usize],
            last_change: read,
        }
    }

    /// Creates a black picture with lines of text, in the given size or, if the text needs more, in
    /// a larger one.
    pub fn with_text(text: &str, read: u64, (width, height): (u32, u32)) -> Self {
        const SCALE: u32 = 2;
        const LINE: u32 = 12 * SCALE;
        let fits = width >= 800 && height >= 120;
        let (width, height) = if fits { (width, height) } else { (800, 120) };
        let shape = Shape { width, height, format: Format::XRGB };
        let mut canvas = Self::new(shape, read);
        let lines = text.lines().count() as u32;
        let top = (height / 2).saturating_sub(lines * LINE / 2);
        for (line, y) in text.lines().zip((top..).step_by(LINE as usize)) {
            let x = width.saturating_sub(line.chars().count() as u32 * 8 * SCALE) / 2;
            canvas.write_line(line, x, y, SCALE);
        }
        canvas
    }

    fn write_line(&mut self, line: &str, left: u32, top: u32, scale: u32) {
        for (place, glyph) in line.chars().enumerate() {
            let Some(rows) = BASIC_LEGACY.get(glyph as usize) else { continue };
            for (dot, row) in (0..64).map(|dot| (dot, rows[dot as usize / 8])) {
                let x = left + (place as u32 * 8 + dot % 8) * scale;
                let y = top + dot / 8 * scale;
                if row >> (dot % 8) & 1 == 1 {
                    self.fill(Rect { x, y, width: scale, height: scale });
                }
            }
        }
    }

    fn fill(&mut self, dot: Rect) {
        let dot = dot.intersection(self.whole());
        for y in dot.y..dot.y + dot.height {
            let range = self.range(y, dot.x, dot.width);
            self.pixels[range].fill(0xc8);
        }
    }

    /// Returns size and pixel format.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the rectangle of the whole picture.
    pub fn whole(&self) -> Rect {
        Rect { x: 0, y: 0, width: self.shape.width, height: self.shape.height }
    }

    /// Returns the number of the last read that found a change.
    pub fn last_change(&self) -> u64 {
        self.last_change
    }

    fn range(&self, y: u32, x: u32, width: u32) -> std::ops::Range<usize> {
        let bytes = self.shape.format.bytes();
        let start = y as usize * self.shape.row_bytes() + x as usize * bytes;
        start..start + width as usize * bytes
    }

    /// Stores a row from the read with number `read`. Returns whether the row has changed.
    pub fn put_row(&mut self, y: u32, row: &[u8], read: u64) -> bool {
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
                self.changed[first + tile] = read;
            }
        }
        self.last_change = read;
        true
    }

    /// Returns the tiles that have changed since the read with number `seen`, merged into few
    /// rectangles.
    pub fn changed_since(&self, seen: u64) -> Vec<Rect> {
        let across = self.shape.width.div_ceil(TILE);
        let mut done: Vec<Rect> = Vec::new();
        // Rectangles that end at the row of tiles above.
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

    /// Returns a part of a row as red, green and blue.
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
    fn new_picture_is_changed_and_equal_rows_are_not() {
        let mut canvas = canvas(130, 70);
        assert_eq!(canvas.changed_since(0), [canvas.whole()]);
        assert_eq!(canvas.changed_since(1), []);
        assert!(!canvas.put_row(3, &[0; 520], 2));
        assert_eq!((canvas.changed_since(1), canvas.last_change()), (Vec::new(), 1));
    }

    #[test]
    fn changes_are_relative_to_a_read() {
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
    fn text_is_drawn() {
        for (size, shown) in [((64, 48), (800, 120)), ((1920, 1200), (1920, 1200))] {
            let canvas = Canvas::with_text("The screen is off", 1, size);
            let Rect { width, height, .. } = canvas.whole();
            assert_eq!((width, height), shown);
            let all = (0..height).flat_map(|y| canvas.rgb(y, 0, width));
            let lit = all.filter(|p| *p != [0; 3]).count();
            assert!(lit > 500, "{lit}");
        }
        // Lines are below each other and centered.
        let lit = |text: &str, (from, to): (u32, u32)| {
            let canvas = Canvas::with_text(text, 1, (800, 120));
            let rows = (from..to).flat_map(|y| canvas.rgb(y, 0, 800).collect::<Vec<_>>());
            rows.filter(|p| *p != [0; 3]).count()
        };
        assert_eq!(lit("W\nWW", (36, 60)) * 2, lit("W\nWW", (60, 84)));
        assert_eq!(lit("W", (48, 72)), lit("W", (0, 120)));
        // Text that does not fit is cut off.
        Canvas::with_text(&"W".repeat(1000), 1, (0, 0));
        Canvas::with_text(&"W\n".repeat(1000), 1, (0, 0));
    }

    proptest! {
        /// The rectangles are exactly the changed tiles, without overlap.
        #[test]
        fn rectangles_are_the_changed_tiles(
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
