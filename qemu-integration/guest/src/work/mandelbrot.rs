//! Picture of the Mandelbrot set, computed by the GPU in the displayed buffer.

use std::fmt;

use mdev_core::abi::program::{Kernel, Mandelbrot as Parameters};

use super::Work;
use crate::GuestError;
use crate::compute::{Launch, Shape};
use crate::device::Device;
use crate::memory::Buffer;
use crate::pushbuffer::Methods;

/// Approximate number of checked pixels, spread evenly.
const SAMPLES: u64 = 20_000;

/// One picture of XRGB8888 pixels.
pub struct Mandelbrot {
    surface: Buffer,
    parameters: Parameters,
    launch: Launch,
}

impl Mandelbrot {
    /// Draws into a buffer that holds `height` rows of `pitch` bytes.
    pub fn new(
        device: &Device,
        surface: Buffer,
        (width, height): (u32, u32),
        pitch: u32,
    ) -> Result<Self, GuestError> {
        let fits = u64::from(pitch) * u64::from(height) <= surface.len();
        if width == 0 || height == 0 || u64::from(pitch) < u64::from(width) * 4 || !fits {
            return Err(GuestError::Invalid(format!(
                "a picture of {width}x{height} with {pitch} bytes a row"
            )));
        }
        let parameters = Parameters {
            pixels: surface.va(),
            pitch,
            width,
            height,
            max_iterations: 256,
            left: 0.0,
            top: 0.0,
            step: 0.0,
            reserved: 0,
        };
        let launch =
            Launch::new(device, Kernel::Mandelbrot, Shape::plane(width, height), &parameters)?;
        let mut picture = Self { surface, parameters, launch };
        picture.look_at(-0.65, 0.0, 2.6);
        Ok(picture)
    }

    /// Sets the center and the height of the visible area. No run may be in flight.
    pub fn look_at(&mut self, re: f32, im: f32, height: f32) {
        let step = height / self.parameters.height as f32;
        self.parameters.step = step;
        self.parameters.left = re - step * self.parameters.width as f32 / 2.0;
        self.parameters.top = im - step * self.parameters.height as f32 / 2.0;
        self.launch.set_parameters(&self.parameters);
    }
}

impl fmt::Debug for Mandelbrot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mandelbrot({}x{})", self.parameters.width, self.parameters.height)
    }
}

impl Work for Mandelbrot {
    fn name(&self) -> &'static str {
        "mandelbrot"
    }

    fn amount(&self) -> (f64, &'static str) {
        (f64::from(self.parameters.width) * f64::from(self.parameters.height), "pixels")
    }

    fn prepare(&self) {
        self.surface.window().fill(0xaa);
    }

    fn push(&self, methods: &mut Methods) {
        self.launch.push(methods);
    }

    fn verify(&self) -> Result<u64, GuestError> {
        let Parameters { width, height, pitch, .. } = self.parameters;
        let stride = ((u64::from(width) * u64::from(height) / SAMPLES).isqrt() as u32).max(1);
        let window = self.surface.window();
        let mut checked = 0;
        for y in (0..height).step_by(stride as usize) {
            for x in (0..width).step_by(stride as usize) {
                let got = window.read32(u64::from(y) * u64::from(pitch) + u64::from(x) * 4);
                let right = self.parameters.pixel(x, y);
                if got != right {
                    return Err(GuestError::Wrong(format!(
                        "mandelbrot: pixel ({x}, {y}) is {got:#08x}, expected {right:#08x}"
                    )));
                }
                checked += 1;
            }
        }
        Ok(checked)
    }
}
