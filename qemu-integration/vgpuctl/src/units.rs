//! Formatting of times and sizes for people.

/// Formats nanoseconds in ms or s.
pub fn seconds(ns: u64) -> String {
    match ns {
        1..100_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

/// Formats microseconds in us, ms or s.
pub fn micros(us: u64) -> String {
    let unit = TimeUnit::of(us);
    format!("{} {}", unit.number(us), unit.name())
}

/// Formats a median and a 99th percentile in microseconds, with the unit of the latter.
pub fn quantiles(p50_us: u64, p99_us: u64) -> String {
    let unit = TimeUnit::of(p99_us);
    format!("{}/{} {}", unit.number(p50_us), unit.number(p99_us), unit.name())
}

#[derive(Clone, Copy)]
enum TimeUnit {
    Micros,
    Millis,
    Seconds,
}

impl TimeUnit {
    /// Returns the unit for a time in microseconds.
    fn of(us: u64) -> Self {
        match us {
            0..1000 => Self::Micros,
            1000..100_000 => Self::Millis,
            _ => Self::Seconds,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Micros => "us",
            Self::Millis => "ms",
            Self::Seconds => "s",
        }
    }

    fn number(self, us: u64) -> String {
        match self {
            Self::Micros => us.to_string(),
            Self::Millis => format!("{:.1}", us as f64 / 1e3),
            Self::Seconds => format!("{:.2}", us as f64 / 1e6),
        }
    }
}

/// Formats bytes in MiB or GiB.
pub fn memory(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    match bytes {
        0 => "0".to_owned(),
        _ if bytes >= 100 * GIB => format!("{:.0} GiB", bytes as f64 / GIB as f64),
        _ if bytes >= GIB => format!("{:.1} GiB", bytes as f64 / GIB as f64),
        _ => format!("{} MiB", bytes.div_ceil(MIB)),
    }
}

/// Formats a limit, or returns `none` if there is no limit.
pub fn limit<T>(limit: Option<T>, none: &str, format: impl FnOnce(T) -> String) -> String {
    limit.map_or_else(|| none.to_owned(), format)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit_that_fits() {
        assert_eq!([micros(0), micros(999), micros(1000)], ["0 us", "999 us", "1.0 ms"]);
        assert_eq!([micros(99_900), micros(100_000)], ["99.9 ms", "0.10 s"]);
        assert_eq!(quantiles(6, 40), "6/40 us");
        assert_eq!(quantiles(40, 12_000), "0.0/12.0 ms");
        assert_eq!(quantiles(99_000, 17_179_870), "0.10/17.18 s");
    }
}
