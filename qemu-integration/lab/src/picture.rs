//! Checks of a saved screen: a console with text, or a picture of the Mandelbrot set.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use mdev_core::abi::program::Mandelbrot;

/// Size of a text cell. Larger fonts are multiples of this size.
const CELL: (usize, usize) = (8, 16);

/// RGB picture.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    /// Width in pixels.
    pub width: usize,
    /// Height in pixels.
    pub height: usize,
    pixels: Vec<u32>,
}

impl std::fmt::Debug for Picture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Picture({}x{})", self.width, self.height)
    }
}

impl Picture {
    /// Reads a PNG file with 8 bits per channel.
    pub fn read(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("Cannot open {}", path.display()))?;
        let wrong = || format!("{} is not a PNG file", path.display());
        let mut reader = png::Decoder::new(BufReader::new(file)).read_info().with_context(wrong)?;
        let size = reader.output_buffer_size().with_context(wrong)?;
        let mut bytes = vec![0; size];
        let info = reader.next_frame(&mut bytes).with_context(wrong)?;
        ensure!(
            info.bit_depth == png::BitDepth::Eight,
            "The picture does not have 8 bits per channel"
        );
        let samples = info.color_type.samples();
        let pixels = bytes[..info.buffer_size()]
            .chunks_exact(samples)
            .map(|pixel| match *pixel {
                [r, g, b] | [r, g, b, _] => u32::from_be_bytes([0, r, g, b]),
                [grey] | [grey, _] => u32::from_be_bytes([0, grey, grey, grey]),
                _ => 0,
            })
            .collect();
        Ok(Self { width: info.width as usize, height: info.height as usize, pixels })
    }

    /// Returns whether all pixels have one color.
    pub fn is_all(&self, colour: u32) -> bool {
        !self.pixels.is_empty() && self.pixels.iter().all(|pixel| *pixel == colour)
    }

    /// Checks that the picture shows text: a plain background and many characters of many shapes.
    pub fn check_text(&self) -> Result<()> {
        let mut colours = HashMap::new();
        for pixel in &self.pixels {
            *colours.entry(*pixel).or_insert(0usize) += 1;
        }
        let Some((&background, &plain)) = colours.iter().max_by_key(|(_, count)| **count) else {
            bail!("The picture is empty");
        };
        let ink = 100.0 - 100.0 * plain as f64 / self.pixels.len() as f64;
        ensure!(ink > 0.1, "The screen is blank");
        ensure!(ink < 40.0, "{ink:.0} % of the screen is not background: not a text console");
        let (mut characters, mut shapes) = (0, HashSet::new());
        for top in (0..self.height.saturating_sub(CELL.1 - 1)).step_by(CELL.1) {
            for left in (0..self.width.saturating_sub(CELL.0 - 1)).step_by(CELL.0) {
                let cell = (0..CELL.1).map(|y| {
                    let start = (top + y) * self.width + left;
                    let row = &self.pixels[start..start + CELL.0];
                    row.iter().fold(0u8, |bits, pixel| bits << 1 | u8::from(*pixel != background))
                });
                let cell: Vec<u8> = cell.collect();
                if cell.iter().any(|row| *row != 0) {
                    characters += 1;
                    let mut hasher = DefaultHasher::new();
                    cell.hash(&mut hasher);
                    shapes.insert(hasher.finish());
                }
            }
        }
        ensure!(
            characters >= 100 && shapes.len() >= 20,
            "The screen has {characters} characters of {} shapes: too few for a console",
            shapes.len()
        );
        Ok(())
    }

    /// Checks that the picture shows the Mandelbrot set: many colors of the kernel and no others, a
    /// part inside the set, and vertical symmetry.
    pub fn check_mandelbrot(&self) -> Result<()> {
        let palette: HashSet<u32> = (0..=0xffff).map(Mandelbrot::colour).chain([0]).collect();
        let foreign = self.pixels.iter().filter(|pixel| !palette.contains(pixel)).count();
        ensure!(foreign == 0, "{foreign} pixels have a colour that the picture does not have");
        let used: HashSet<_> = self.pixels.iter().collect();
        ensure!(used.len() >= 16, "Only {} colours: too few for the picture", used.len());
        let inside = self.pixels.iter().filter(|pixel| **pixel == 0).count();
        let inside = 100.0 * inside as f64 / self.pixels.len() as f64;
        ensure!(
            (5.0..60.0).contains(&inside),
            "{inside:.0} % of the picture is inside the set: it should be about a fifth"
        );
        let mut equal = 0;
        let half = self.height / 2;
        for y in 1..half {
            let (upper, lower) = ((half - y) * self.width, (half + y) * self.width);
            let rows = (&self.pixels[upper..][..self.width], &self.pixels[lower..][..self.width]);
            equal += rows.0.iter().zip(rows.1).filter(|(a, b)| a == b).count();
        }
        let mirrored = 100.0 * equal as f64 / (self.width * half.saturating_sub(1)).max(1) as f64;
        ensure!(mirrored > 80.0, "The halves mirror each other by {mirrored:.0} % only");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(width: usize, height: usize, pixel: impl Fn(usize, usize) -> u32) -> Picture {
        let pixels = (0..width * height).map(|i| pixel(i % width, i / width)).collect();
        Picture { width, height, pixels }
    }

    #[test]
    fn blank_screen_and_noise_are_rejected_as_text() {
        assert!(picture(640, 480, |_, _| 0x20_2020).check_text().is_err());
        let noise = picture(640, 480, |x, y| ((x * 7919 + y * 104_729) % 251) as u32);
        assert!(noise.check_text().is_err());
    }

    #[test]
    fn many_shapes_on_plain_background_are_text() {
        let text = picture(640, 480, |x, y| {
            let (column, row) = (x / 8, y / 16);
            let glyph = (column * 31 + row * 17) % 97;
            let on = column < 40 && x % 8 < 6 && (glyph >> (y % 7)) & 1 == 1 && y % 16 > 4;
            u32::from(on) * 0xaa_aaaa
        });
        text.check_text().unwrap();
        assert!(text.check_mandelbrot().is_err());
    }

    #[test]
    fn mandelbrot_picture_is_recognized() {
        let (width, height) = (320, 200);
        let step = 2.6 / height as f32;
        let drawing = Mandelbrot {
            pixels: 0,
            pitch: 0,
            width: width as u32,
            height: height as u32,
            max_iterations: 200,
            left: -0.65 - step * width as f32 / 2.0,
            top: -step * height as f32 / 2.0,
            step,
            reserved: 0,
        };
        let whole = picture(width, height, |x, y| drawing.pixel(x as u32, y as u32));
        whole.check_mandelbrot().unwrap();
        assert!(whole.check_text().is_err());
        let part =
            picture(width, height, |x, y| if y < 100 { whole.pixels[y * width + x] } else { 0 });
        assert!(part.check_mandelbrot().is_err());
    }
}
