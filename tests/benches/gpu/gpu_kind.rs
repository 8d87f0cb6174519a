//! GPUs that the benchmark measures.

use std::path::Path;

use clap::ValueEnum;
use system_tests::outcome::measuring;

/// GPU to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GpuKind {
    /// The software GPU.
    Soft,
    /// This machine's NVIDIA GPU.
    Nvidia,
}

impl GpuKind {
    /// Returns the value of `--parent`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Nvidia => "nvidia",
        }
    }

    /// Returns the value of `vgpud --parent`.
    pub const fn argument(self) -> &'static str {
        match self {
            Self::Soft => "soft:soft0",
            Self::Nvidia => "nvidia",
        }
    }

    /// Returns the kind of this machine's GPU.
    pub fn here() -> Self {
        // A test shows that the benchmark works, on every machine and as every user.
        if measuring() && nvidia_is_here() { Self::Nvidia } else { Self::Soft }
    }

    /// Returns how long a load runs before it is measured, and for how long it is, in milliseconds.
    pub const fn times(self, quick: bool) -> (u64, u64) {
        match (quick, self) {
            (true, _) => (200, 500),
            (false, Self::Nvidia) => (1000, 3000),
            (false, Self::Soft) => (500, 4000),
        }
    }
}

/// Returns whether this machine has the device nodes of NVIDIA's driver.
pub fn nvidia_is_here() -> bool {
    Path::new("/dev/nvidiactl").exists()
}
