//! Formatting of times and sizes for people.

/// Formats nanoseconds in ms or s.
pub fn seconds(ns: u64) -> String {
    match ns {
        1..100_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
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
