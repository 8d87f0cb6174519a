//! Parsers of option values, and the help text that lists attributes.

use std::fmt::Write as _;
use std::path::PathBuf;

use mdev_core::definition::{ATTRIBUTES, Attribute, VgpuRef};

use super::screens::RotationInterval;

/// Appends the list of attributes to a help text.
pub fn with_attributes(help: &str) -> String {
    let mut text = format!("{help}\n\nAttributes (those with * can change while the vGPU runs):\n");
    for Attribute { name, values, default, about, live, .. } in ATTRIBUTES {
        let star = if *live { "*" } else { " " };
        // Writing to a String does not fail.
        let _ = writeln!(text, "  {name:<15} {star} {values}; default: {default}\n      {about}");
    }
    text.truncate(text.trim_end().len());
    text
}

/// Parses milliseconds and returns microseconds.
pub fn milliseconds(text: &str) -> Result<u64, String> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    match text.parse::<f64>() {
        // vgpud checks the bounds.
        #[allow(clippy::cast_sign_loss)]
        Ok(ms) if plain && ms.is_finite() => Ok((ms * 1e3).round() as u64),
        _ => Err("give milliseconds, for example 0.5 or 2".to_owned()),
    }
}

/// Parses seconds or `off`.
pub fn rotation_interval(text: &str) -> Result<RotationInterval, String> {
    match text {
        "off" => Ok(RotationInterval(None)),
        // vgpud checks the bounds.
        _ => text
            .parse()
            .map(|seconds| RotationInterval(Some(seconds)))
            .map_err(|_| "give whole seconds, for example 10, or off".to_owned()),
    }
}

/// Where a VM is moved to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveAddress {
    /// Host and port.
    Tcp(String),
    /// Path of a socket.
    Unix(PathBuf),
}

impl std::fmt::Display for MoveAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Parses `HOST:PORT` or `unix:PATH`.
pub fn move_address(text: &str) -> Result<MoveAddress, String> {
    if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
        return Ok(MoveAddress::Unix(path.into()));
    }
    let parts = text.rsplit_once(':');
    let port = parts.filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
    match port {
        Some(Ok(_)) => Ok(MoveAddress::Tcp(text.to_owned())),
        _ => Err("an address is HOST:PORT or unix:PATH, for example host2:7070".to_owned()),
    }
}

/// Parses `VGPU=PATH`.
pub fn monitor(text: &str) -> Result<(VgpuRef, PathBuf), String> {
    let pair = text.split_once('=').and_then(|(vgpu, path)| Some((vgpu.parse().ok()?, path)));
    match pair {
        Some((vgpu, path)) if !path.is_empty() => Ok((vgpu, path.into())),
        _ => Err("a monitor is VGPU=PATH: a vGPU and the QMP socket of its VM".to_owned()),
    }
}

/// Parses `NAME=VALUE`.
pub fn attribute(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("an attribute is NAME=VALUE, for example core=80".to_owned()),
    }
}

/// Parses the size of a VM's memory and returns it with its unit. As for QEMU's `-m`, MiB is the
/// default unit.
pub fn memory_size(text: &str) -> Result<String, String> {
    let (number, unit) = match text.char_indices().last() {
        Some((last, unit @ ('k' | 'K' | 'm' | 'M' | 'g' | 'G' | 't' | 'T'))) => {
            (&text[..last], unit.to_ascii_uppercase())
        }
        _ => (text, 'M'),
    };
    let plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    match number.parse::<f64>() {
        Ok(size) if plain && size > 0.0 => Ok(format!("{number}{unit}")),
        _ => Err("give a size, for example 512M or 4G".to_owned()),
    }
}

/// Parses `OLD=NEW`.
pub fn mapping(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() && !new.is_empty() => Ok((old.into(), new.into())),
        _ => Err("give a mapping as OLD=NEW".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_memory_have_a_unit() {
        for (text, size) in [("2G", "2G"), ("512", "512M"), ("1.5g", "1.5G"), ("1024k", "1024K")] {
            assert_eq!(memory_size(text).as_deref(), Ok(size));
        }
        for text in
            ["lots", "", "G", "0", "0G", "-1G", "1e3", "2GB", "2 G", "2G,slots=4", "inf", "²G"]
        {
            assert!(memory_size(text).is_err(), "{text}");
        }
    }
}
