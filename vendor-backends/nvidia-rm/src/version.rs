//! Driver versions and the layouts of their structures.

use std::fmt;

/// Sizes of the structures that differ between series of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Series: the number before the first dot of the version.
    pub series: u16,
    /// Size of `NVOS46_PARAMETERS` (mapping at a GPU virtual address), in bytes.
    pub map_dma: usize,
    /// Size of `NV_VASPACE_ALLOCATION_PARAMETERS`, in bytes.
    pub va_space: usize,
    /// Size of `NVA06F_CTRL_GPFIFO_SCHEDULE_PARAMS`, in bytes.
    pub schedule: usize,
    /// Size of `NV_CHANNEL_ALLOC_PARAMS`, in bytes.
    pub channel: usize,
}

/// Supported series. 580 is tested on hardware; the other layouts are from the published headers. A
/// test compares all but 610.
const SUPPORTED: &[Layout] = &[
    Layout { series: 570, map_dma: 56, va_space: 48, schedule: 2, channel: 368 },
    Layout { series: 575, map_dma: 56, va_space: 48, schedule: 3, channel: 368 },
    Layout { series: 580, map_dma: 64, va_space: 56, schedule: 3, channel: 368 },
    Layout { series: 590, map_dma: 64, va_space: 56, schedule: 3, channel: 368 },
    Layout { series: 595, map_dma: 64, va_space: 56, schedule: 3, channel: 368 },
    Layout { series: 610, map_dma: 64, va_space: 56, schedule: 3, channel: 376 },
];

/// Layout of programs with a libcuda of series 550. GPUs with a driver of this series are not
/// supported.
const PROGRAMS_550: Layout =
    Layout { series: 550, map_dma: 56, va_space: 48, schedule: 2, channel: 360 };

/// Error for a driver of an unsupported series.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedDriver(String);

impl fmt::Display for UnsupportedDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let supported: Vec<_> = SUPPORTED.iter().map(|layout| layout.series.to_string()).collect();
        write!(
            f,
            "NVIDIA driver {} is not supported: install a driver of series {}, or a newer Tessera",
            self.0,
            supported.join(", ")
        )
    }
}

impl std::error::Error for UnsupportedDriver {}

impl Layout {
    /// Returns the layout of a driver version such as `580.142`.
    pub fn of(version: &str) -> Result<Self, UnsupportedDriver> {
        let version = version.trim();
        let series = version.split('.').next().and_then(|series| series.parse::<u16>().ok());
        SUPPORTED
            .iter()
            .find(|layout| Some(layout.series) == series)
            .copied()
            .ok_or_else(|| UnsupportedDriver(version.chars().take(40).collect()))
    }

    /// Returns the layout for programs with a libcuda of a version. Series 550 is for GPUs without
    /// a driver: Debian has its libcuda.
    pub fn of_programs(version: &str) -> Result<Self, UnsupportedDriver> {
        if version.starts_with("550.") {
            return Ok(PROGRAMS_550);
        }
        Self::of(version)
    }

    /// Returns the offset of `RUSD_PERF_DEVICE_UTILIZATION` in the page with the GPU's state
    /// (`NV00DE_SHARED_DATA`), and the length of its numbers, in bytes.
    pub fn utilization(&self) -> (u64, usize) {
        match self.series {
            ..560 => (72, 1),
            560..575 => (112, 4),
            575..590 => (1976, 4),
            590.. => (1992, 4),
        }
    }

    /// Returns all supported layouts.
    pub fn supported() -> &'static [Self] {
        SUPPORTED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_found_by_the_series() {
        assert_eq!(Layout::of("580.159.04\n").unwrap().map_dma, 64);
        let old = Layout::of("570.86.15").unwrap();
        assert_eq!((old.map_dma, old.va_space, old.schedule), (56, 48, 2));
        assert_eq!(Layout::of("610.43").unwrap().channel, 376);
    }

    #[test]
    fn an_unsupported_driver_is_refused_in_one_line() {
        for version in ["565.57.01", "", "unknown", "99999999.1", "-580.1"] {
            let line = Layout::of(version).unwrap_err().to_string();
            assert!(
                line.contains("570, 575, 580, 590, 595, 610") && !line.contains('\n'),
                "{line}"
            );
        }
    }
}
