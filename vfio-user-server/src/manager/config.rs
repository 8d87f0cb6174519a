//! What `vgpud run` is told.

use std::path::PathBuf;
use std::str::FromStr;

use mdev_core::units::{GIB, KIB, MIB};

/// Where the manager works, and which physical GPUs it shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Sockets and locks.
    pub run_dir: PathBuf,
    /// Definitions.
    pub config_dir: PathBuf,
    /// The physical GPUs.
    pub parents: Vec<ParentConfig>,
}

/// One physical GPU: `soft:NAME[,vram=SIZE]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParentConfig {
    /// Its name: a folder of that name is made.
    pub name: String,
    /// Video memory, in bytes.
    pub vram_bytes: u64,
}

/// Video memory of a software GPU that is not told otherwise. It is memory that vGPUs may use, not memory in use: pages
/// are taken from the host as guests write to them.
const DEFAULT_VRAM: u64 = 8 * GIB;

/// The most that a software GPU can have.
const MAX_VRAM: u64 = 1 << 40;

impl FromStr for ParentConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix("soft:") else {
            return Err("begin with \"soft:\", as in soft:soft0,vram=8G".into());
        };
        let mut parts = rest.split(',');
        let name = parts.next().unwrap_or_default();
        let fine = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        if name.is_empty() || name.len() > 32 || name.starts_with('.') || !name.chars().all(fine) {
            return Err(format!(
                "{name:?} is no name for a parent: use up to 32 letters, digits, and - _ . :"
            ));
        }
        let mut parent = Self { name: name.into(), vram_bytes: DEFAULT_VRAM };
        for part in parts {
            match part.split_once('=') {
                Some(("vram", size)) => parent.vram_bytes = parse_vram(size)?,
                _ => return Err(format!("{part:?} is no option of a parent; there is vram=SIZE")),
            }
        }
        Ok(parent)
    }
}

fn parse_vram(text: &str) -> Result<u64, String> {
    let wrong = || format!("vram={text} is no size: give MiB or GiB, as in vram=512M or vram=8G");
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit = match &text[split..] {
        "K" => KIB,
        "M" => MIB,
        "G" => GIB,
        _ => return Err(wrong()),
    };
    let number: u64 = text[..split].parse().map_err(|_| wrong())?;
    let bytes = number.checked_mul(unit).ok_or_else(wrong)?;
    if bytes % MIB != 0 || !(256 * MIB..=MAX_VRAM).contains(&bytes) {
        return Err(format!("vram={text} is out of range: 256M to 1024G, in whole MiB"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_read() {
        let parent: ParentConfig = "soft:soft0".parse().unwrap();
        assert_eq!(parent, ParentConfig { name: "soft0".into(), vram_bytes: 8 * GIB });
        assert_eq!("soft:a,vram=512M".parse::<ParentConfig>().unwrap().vram_bytes, 512 * MIB);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("soft0", "begin with"),
            ("soft:", "no name"),
            ("soft:../x", "no name"),
            ("soft:.", "no name"),
            ("soft:a,vram=8", "no size"),
            ("soft:a,vram=G", "no size"),
            ("soft:a,vram=99999999999999999999G", "no size"),
            ("soft:a,vram=1M", "out of range"),
            ("soft:a,cores=3", "no option"),
        ] {
            let error = text.parse::<ParentConfig>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
