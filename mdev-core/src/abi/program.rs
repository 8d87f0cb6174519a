//! Programs of silicon that runs no machine code: small blobs that name one of its built-in kernels. The software GPU has
//! all of them; a device with a unit for one of them has that one.
//!
//! A QMD's program address points at a blob where hardware would have machine code. Parameters lie in constant buffer 0
//! from [`super::compute::PARAM_BASE`], laid out as a CUDA kernel's would be, so a launch looks alike on both silicons.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::control::Features;

/// First word of a blob: "TSKN".
pub const MAGIC: u32 = 0x4e4b_5354;
/// Version of the blob and of the parameter blocks below.
pub const VERSION: u32 = 1;
/// Alignment of a program's address in bytes, as hardware asks for.
pub const ALIGN: u64 = 128;

/// A program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Program {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`VERSION`].
    pub version: u32,
    /// A [`Kernel`].
    pub kernel: u32,
    /// Bytes of parameters that the kernel reads.
    pub param_bytes: u32,
}

/// The built-in kernels. The grid and block of the QMD bound the elements that are computed, as on hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kernel {
    /// `y[i] = a * x[i] + y[i]`; one thread per element, x only. Parameters: [`Saxpy`].
    Saxpy = 1,
    /// `c = a * b`, row-major squares of f32; threads in x and y cover columns and rows. Parameters: [`Sgemm`].
    Sgemm = 2,
    /// XRGB8888 pixels of the Mandelbrot set; threads in x and y cover columns and rows. Parameters: [`Mandelbrot`].
    Mandelbrot = 3,
    /// Each thread iterates an LCG; thread 0 of each block then adds 1 to a counter. Parameters: [`Spin`].
    Spin = 4,
    /// `c[i] = a[i] + b[i]`; one thread per element, x only. Parameters: [`VectorAdd`].
    VectorAdd = 5,
    /// `x[i] = x[i]!`, modulo 2^32; one thread per element, x only. Parameters: [`Factorial`].
    Factorial = 6,
}

impl Kernel {
    /// The kernel with this number, if there is one.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::Saxpy,
            2 => Self::Sgemm,
            3 => Self::Mandelbrot,
            4 => Self::Spin,
            5 => Self::VectorAdd,
            6 => Self::Factorial,
            _ => return None,
        })
    }

    /// Bytes of its parameter block.
    pub const fn param_bytes(self) -> u32 {
        (match self {
            Self::Saxpy => size_of::<Saxpy>(),
            Self::Sgemm => size_of::<Sgemm>(),
            Self::Mandelbrot => size_of::<Mandelbrot>(),
            Self::Spin => size_of::<Spin>(),
            Self::VectorAdd => size_of::<VectorAdd>(),
            Self::Factorial => size_of::<Factorial>(),
        }) as u32
    }

    /// What a vGPU has that runs it as a named program.
    pub const fn feature(self) -> Features {
        match self {
            Self::Factorial => Features::FACTORIAL,
            _ => Features::SOFT_PROGRAMS,
        }
    }
}

/// Parameters of [`Kernel::Saxpy`].
#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Saxpy {
    /// GPU address of x.
    pub x: u64,
    /// GPU address of y.
    pub y: u64,
    /// Factor.
    pub a: f32,
    /// Elements.
    pub n: u32,
}

/// Parameters of [`Kernel::VectorAdd`].
#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VectorAdd {
    /// GPU address of a.
    pub a: u64,
    /// GPU address of b.
    pub b: u64,
    /// GPU address of c.
    pub c: u64,
    /// Elements.
    pub n: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of [`Kernel::Factorial`].
#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Factorial {
    /// GPU address of x: 32-bit words.
    pub x: u64,
    /// Elements.
    pub n: u32,
    /// Zero.
    pub reserved: u32,
}

impl Factorial {
    /// From here on factorials are multiples of 2^32.
    pub const ZERO_FROM: u32 = 34;

    /// `n!`, modulo 2^32.
    pub fn of(n: u32) -> u32 {
        if n < Self::ZERO_FROM { (1..=n).fold(1, u32::wrapping_mul) } else { 0 }
    }
}

/// Parameters of [`Kernel::Sgemm`].
#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Sgemm {
    /// GPU address of a.
    pub a: u64,
    /// GPU address of b.
    pub b: u64,
    /// GPU address of c.
    pub c: u64,
    /// Rows and columns.
    pub n: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of [`Kernel::Mandelbrot`].
#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Mandelbrot {
    /// GPU address of the first pixel.
    pub pixels: u64,
    /// Bytes from one row to the next.
    pub pitch: u32,
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Iterations at which a point counts as inside.
    pub max_iterations: u32,
    /// Real part of the top left pixel.
    pub left: f32,
    /// Imaginary part of the top left pixel.
    pub top: f32,
    /// Step per pixel.
    pub step: f32,
    /// Zero.
    pub reserved: u32,
}

impl Mandelbrot {
    /// The colour of the pixel in column `x` and row `y`, which is what the kernel writes there.
    ///
    /// Every operation is one IEEE 754 single, in this order, so that a guest can check a picture bit by bit.
    pub fn pixel(&self, x: u32, y: u32) -> u32 {
        let (re, im) = (self.left + x as f32 * self.step, self.top + y as f32 * self.step);
        let (mut zr, mut zi, mut n) = (0.0f32, 0.0f32, 0);
        while n < self.max_iterations {
            let (zr2, zi2) = (zr * zr, zi * zi);
            if zr2 + zi2 > 4.0 {
                return Self::colour(n);
            }
            zi = (zr + zr) * zi + im;
            zr = zr2 - zi2 + re;
            n += 1;
        }
        0
    }

    /// XRGB8888 of a point that escaped after `iterations`: from night blue to white. Points inside are black.
    pub const fn colour(iterations: u32) -> u32 {
        let t = 255 - 255 * 16 / (if iterations > 0xffff { 0xffff } else { iterations } + 16);
        (t * t / 255) << 16 | t << 8 | (64 + t * 191 / 255)
    }
}

/// Parameters of [`Kernel::Spin`].
#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Spin {
    /// GPU address of a u32 counter.
    pub out: u64,
    /// Iterations of each thread; `u32::MAX` never ends.
    pub iterations: u32,
    /// Zero.
    pub reserved: u32,
}

#[cfg(test)]
mod tests {
    use super::Factorial;

    #[test]
    fn factorials_are_those_of_the_definition() {
        assert_eq!([0, 1, 5, 12].map(Factorial::of), [1, 1, 120, 479_001_600]);
        let mut product = 1u32;
        for n in 1..200 {
            product = product.wrapping_mul(n);
            assert_eq!(Factorial::of(n), product, "{n}");
        }
    }
}
