//! Values of options in `--parent` arguments.

use mdev_core::units::{GIB, KIB, MIB};

/// Parses a size with a unit, such as `512M`, in bytes.
pub fn parse_size(text: &str) -> Option<u64> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit = match &text[split..] {
        "K" => KIB,
        "M" => MIB,
        "G" => GIB,
        _ => return None,
    };
    text[..split].parse::<u64>().ok()?.checked_mul(unit)
}
