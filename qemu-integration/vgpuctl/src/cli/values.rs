//! Values on the command line that are more than words; and the help that lists attributes.

use std::fmt::Write as _;
use std::path::PathBuf;

use mdev_core::definition::{ATTRIBUTES, Attribute};
use mdev_core::ids::VgpuId;

use super::screens::Turns;

/// Help that ends with the attributes that there are.
pub fn with_attributes(help: &str) -> String {
    let mut text = format!("{help}\n\nAttributes (those with * can change while the vGPU runs):\n");
    for Attribute { name, values, default, about, live, .. } in ATTRIBUTES {
        let star = if *live { "*" } else { " " };
        // A String takes whatever is written to it.
        let _ = writeln!(text, "  {name:<15} {star} {values}; default: {default}\n      {about}");
    }
    text.truncate(text.trim_end().len());
    text
}

/// Milliseconds, in microseconds.
pub fn milliseconds(text: &str) -> Result<u64, String> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    match text.parse::<f64>() {
        // What is out of bounds is for vgpud to say; here it only has to be a number.
        #[allow(clippy::cast_sign_loss)]
        Ok(ms) if plain && ms.is_finite() => Ok((ms * 1e3).round() as u64),
        _ => Err("give milliseconds, for example 0.5 or 2".to_owned()),
    }
}

/// Seconds, or `off`.
pub fn turns(text: &str) -> Result<Turns, String> {
    match text {
        "off" => Ok(Turns(None)),
        // What is out of bounds is for vgpud to say.
        _ => text
            .parse()
            .map(|seconds| Turns(Some(seconds)))
            .map_err(|_| "give whole seconds, for example 10, or off".to_owned()),
    }
}

/// `UUID=PATH`
pub fn monitor(text: &str) -> Result<(VgpuId, PathBuf), String> {
    let pair = text.split_once('=').and_then(|(uuid, path)| Some((uuid.parse().ok()?, path)));
    match pair {
        Some((uuid, path)) if !path.is_empty() => Ok((uuid, path.into())),
        _ => Err("a monitor is UUID=PATH: a vGPU, and a QMP socket of its VM".to_owned()),
    }
}

/// `NAME=VALUE`
pub fn attribute(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("an attribute is NAME=VALUE, for example core=80".to_owned()),
    }
}

/// `OLD=NEW`
pub fn mapping(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() && !new.is_empty() => Ok((old.into(), new.into())),
        _ => Err("give what it is there and what it is here, as OLD=NEW".to_owned()),
    }
}
