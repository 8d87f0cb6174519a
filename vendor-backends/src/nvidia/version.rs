//! Which driver runs, and what its structures look like.

use std::fmt;

/// What differs between series of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The series: the number before the first dot.
    pub series: u16,
    /// `NVOS46_PARAMETERS` (mapping at a GPU virtual address), in bytes.
    pub map_dma: usize,
    /// `NV_VASPACE_ALLOCATION_PARAMETERS`.
    pub va_space: usize,
    /// `NVA06F_CTRL_GPFIFO_SCHEDULE_PARAMS`.
    pub schedule: usize,
    /// `NV_CHANNEL_ALLOC_PARAMS`.
    pub channel: usize,
}

/// The series that are known. 580 was run; the others were read in the driver's published headers.
const KNOWN: &[Layout] = &[
    Layout { series: 570, map_dma: 56, va_space: 48, schedule: 2, channel: 368 },
    Layout { series: 575, map_dma: 56, va_space: 48, schedule: 3, channel: 368 },
    Layout { series: 580, map_dma: 64, va_space: 56, schedule: 3, channel: 368 },
    Layout { series: 590, map_dma: 64, va_space: 56, schedule: 3, channel: 368 },
    Layout { series: 595, map_dma: 64, va_space: 56, schedule: 3, channel: 368 },
    Layout { series: 610, map_dma: 64, va_space: 56, schedule: 3, channel: 376 },
];

/// A driver whose structures nobody has looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownDriver(String);

impl fmt::Display for UnknownDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known: Vec<_> = KNOWN.iter().map(|layout| layout.series.to_string()).collect();
        write!(
            f,
            "NVIDIA's driver {} is of no series that is known here ({}): use one of those, or a newer Tessera",
            self.0,
            known.join(", ")
        )
    }
}

impl std::error::Error for UnknownDriver {}

impl Layout {
    /// The layout of a driver that calls itself `version`, such as `580.142`.
    pub fn of(version: &str) -> Result<Self, UnknownDriver> {
        let version = version.trim();
        let series = version.split('.').next().and_then(|series| series.parse::<u16>().ok());
        KNOWN
            .iter()
            .find(|layout| Some(layout.series) == series)
            .copied()
            .ok_or_else(|| UnknownDriver(version.chars().take(40).collect()))
    }

    /// All that are known.
    pub fn known() -> &'static [Self] {
        KNOWN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_is_known_by_its_series() {
        assert_eq!(Layout::of("580.159.04\n").unwrap().map_dma, 64);
        let old = Layout::of("570.86.15").unwrap();
        assert_eq!((old.map_dma, old.va_space, old.schedule), (56, 48, 2));
        assert_eq!(Layout::of("610.43").unwrap().channel, 376);
    }

    #[test]
    fn an_unknown_driver_is_refused_in_one_line() {
        for version in ["565.57.01", "", "unknown", "99999999.1", "-580.1"] {
            let line = Layout::of(version).unwrap_err().to_string();
            assert!(
                line.contains("570, 575, 580, 590, 595, 610") && !line.contains('\n'),
                "{line}"
            );
        }
    }
}
