//! Program blobs of GPUs that execute no machine code. A blob names a built-in kernel of the
//! software GPU, or a fixed function of the device.
//!
//! The program address of a QMD points at a blob instead of at machine code. Parameters are in
//! constant buffer 0 from [`super::compute::PARAM_BASE`], with the layout of a CUDA kernel's
//! parameters, so that a launch is the same for blobs and for machine code.

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::control::Features;

/// First word of a blob: "TSKN".
pub const MAGIC: u32 = 0x4e4b_5354;
/// Version of the blob and of the parameter blocks below.
pub const VERSION: u32 = 1;
/// Alignment of a program's address in bytes, as hardware requires it.
pub const ALIGN: u64 = 128;

/// Program blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Program {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`VERSION`].
    pub version: u32,
    /// Number of a [`Kernel`].
    pub kernel: u32,
    /// Size of the kernel's parameters in bytes.
    pub param_bytes: u32,
}

/// Id of a fixed function, in [`Program::kernel`]. The device that implements a function defines
/// its id.
///
/// Ids start at [`FunctionId::FIRST`]; smaller numbers are the software GPU's kernels. A launch
/// with an id that the device does not implement faults the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FunctionId(pub u32);

impl FunctionId {
    /// Smallest id.
    pub const FIRST: u32 = 6;
}

/// Kernel that a blob names. The grid and block of the QMD bound the elements that are computed, as
/// on hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// `y[i] = a * x[i] + y[i]`; one thread per element, x only. Parameters: [`Saxpy`].
    Saxpy,
    /// `c = a * b`, row-major squares of f32; threads in x and y cover columns and rows.
    /// Parameters: [`Sgemm`].
    Sgemm,
    /// XRGB8888 pixels of the Mandelbrot set; threads in x and y cover columns and rows.
    /// Parameters: [`Mandelbrot`].
    Mandelbrot,
    /// Each thread iterates an LCG; thread 0 of each block then adds 1 to a counter. Parameters:
    /// [`Spin`].
    Spin,
    /// `c[i] = a[i] + b[i]`; one thread per element, x only. Parameters: [`VectorAdd`].
    VectorAdd,
    /// `x[i] = f(x[i])`, with the device's fixed function `f`; one thread per element, x only.
    /// Parameters: [`FixedFunction`].
    FixedFunction(FunctionId),
}

impl Kernel {
    /// Returns the kernel with this number, or `None` for a reserved number.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::Saxpy,
            2 => Self::Sgemm,
            3 => Self::Mandelbrot,
            4 => Self::Spin,
            5 => Self::VectorAdd,
            FunctionId::FIRST.. => Self::FixedFunction(FunctionId(number)),
            0 => return None,
        })
    }

    /// Returns the number of the kernel, for [`Program::kernel`].
    pub const fn number(self) -> u32 {
        match self {
            Self::Saxpy => 1,
            Self::Sgemm => 2,
            Self::Mandelbrot => 3,
            Self::Spin => 4,
            Self::VectorAdd => 5,
            Self::FixedFunction(FunctionId(id)) => id,
        }
    }

    /// Returns the size of the parameter block in bytes.
    pub const fn param_bytes(self) -> u32 {
        (match self {
            Self::Saxpy => size_of::<Saxpy>(),
            Self::Sgemm => size_of::<Sgemm>(),
            Self::Mandelbrot => size_of::<Mandelbrot>(),
            Self::Spin => size_of::<Spin>(),
            Self::VectorAdd => size_of::<VectorAdd>(),
            Self::FixedFunction(_) => size_of::<FixedFunction>(),
        }) as u32
    }

    /// Returns the feature of vGPUs that execute the kernel from a blob.
    pub const fn feature(self) -> Features {
        match self {
            Self::FixedFunction(_) => Features::FIXED_FUNCTION,
            _ => Features::SOFT_PROGRAMS,
        }
    }
}

/// Parameters of [`Kernel::Saxpy`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
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

/// Parameters of [`Kernel::FixedFunction`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct FixedFunction {
    /// GPU address of x, an array of 32-bit words.
    pub x: u64,
    /// Elements.
    pub n: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of [`Kernel::Sgemm`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Mandelbrot {
    /// GPU address of the first pixel.
    pub pixels: u64,
    /// Bytes from one row to the next.
    pub pitch: u32,
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Iterations after which a point counts as inside.
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
    /// Returns the color of the pixel in column `x` and row `y`.
    ///
    /// Every operation is an IEEE 754 single-precision operation, in this order, so that a guest
    /// can compare pictures bit by bit.
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

    /// Returns the XRGB8888 color of a point that escaped after `iterations`, from night blue to
    /// white. Points inside are black.
    pub const fn colour(iterations: u32) -> u32 {
        let t = 255 - 255 * 16 / (if iterations > 0xffff { 0xffff } else { iterations } + 16);
        (t * t / 255) << 16 | t << 8 | (64 + t * 191 / 255)
    }
}

/// Parameters of [`Kernel::Spin`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Spin {
    /// GPU address of a u32 counter.
    pub out: u64,
    /// Iterations of each thread; a kernel with `u32::MAX` does not end.
    pub iterations: u32,
    /// Zero.
    pub reserved: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_numbers_round_trip() {
        assert_eq!(Kernel::from_number(0), None);
        for number in (1..10).chain([u32::MAX]) {
            assert_eq!(Kernel::from_number(number).map(Kernel::number), Some(number));
        }
    }
}
