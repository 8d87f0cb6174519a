//! The backend `soft`: `--parent soft:NAME[,vram=SIZE][,contexts=yes|no]`.

use std::sync::Arc;

use mdev_core::definition::store::SCRIPTS;
use mdev_core::units::{GIB, MIB};

use super::SoftGpu;
use crate::backend::{Backend, BoxError, OpenHardware, Opener, Parent};
use crate::mediator::Hardware;
use crate::parent_options::parse_size;

/// Default video memory in bytes. Pages are taken from the host as guests write to them.
const DEFAULT_VRAM: u64 = 8 * GIB;
/// Smallest video memory in bytes.
const MIN_VRAM: u64 = 256 * MIB;
/// Largest video memory in bytes.
const MAX_VRAM: u64 = 1 << 40;

/// The software GPU.
#[derive(Clone, Copy, Debug)]
pub struct SoftBackend;

/// A software GPU that is to be started.
#[derive(Debug)]
struct SoftParent {
    name: String,
    vram_bytes: u64,
    has_contexts: bool,
}

impl Backend for SoftBackend {
    fn name(&self) -> &'static str {
        "soft"
    }

    fn example(&self) -> &'static str {
        "soft:soft0,vram=8G"
    }

    fn parse(&self, place: Option<&str>, options: &[&str]) -> Result<Arc<dyn Parent>, String> {
        let name = place.unwrap_or_default();
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        // The directory of that name holds callout scripts.
        if name == SCRIPTS
            || name.is_empty()
            || name.len() > 32
            || name.starts_with('.')
            || !name.chars().all(allowed)
        {
            return Err(format!(
                "{name:?} is no name for a parent: use up to 32 letters, digits, and - _ . :"
            ));
        }
        let (mut vram_bytes, mut has_contexts) = (DEFAULT_VRAM, true);
        for option in options {
            match option.split_once('=') {
                Some(("vram", size)) => vram_bytes = parse_vram(size)?,
                Some(("contexts", "yes")) => has_contexts = true,
                Some(("contexts", "no")) => has_contexts = false,
                _ => {
                    return Err(format!(
                        "{option:?} is no option of a parent; there are vram=SIZE and \
                         contexts=yes|no"
                    ));
                }
            }
        }
        Ok(Arc::new(SoftParent { name: name.to_owned(), vram_bytes, has_contexts }))
    }
}

impl Parent for SoftParent {
    fn name(&self) -> &str {
        &self.name
    }

    fn backend(&self) -> &'static dyn Backend {
        &SoftBackend
    }

    fn argument(&self) -> String {
        let contexts = if self.has_contexts { "yes" } else { "no" };
        format!("soft:{},vram={}M,contexts={contexts}", self.name, self.vram_bytes / MIB)
    }

    fn opener(&self) -> Opener<'_> {
        Opener::Process(self)
    }
}

impl OpenHardware for SoftParent {
    fn vram_bytes(&self) -> u64 {
        self.vram_bytes
    }

    fn open(&self) -> Result<Arc<dyn Hardware>, BoxError> {
        let gpu = SoftGpu::new(&self.name, self.vram_bytes);
        Ok(Arc::new(if self.has_contexts { gpu.with_contexts() } else { gpu }))
    }
}

fn parse_vram(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).ok_or_else(|| {
        format!("vram={text} is no size: give MiB or GiB, as in vram=512M or vram=8G")
    })?;
    if bytes % MIB != 0 || !(MIN_VRAM..=MAX_VRAM).contains(&bytes) {
        return Err(format!("vram={text} is out of range: 256M to 1024G, in whole MiB"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_and_video_memory_are_parsed() {
        let parent = |place, options: &[&str]| SoftBackend.parse(Some(place), options).unwrap();
        let vram = |parent: &dyn Parent| match parent.opener() {
            Opener::Process(hardware) => hardware.vram_bytes(),
            other @ Opener::Manager(_) => panic!("{other:?}"),
        };
        let default = parent("soft0", &[]);
        assert_eq!((default.name(), vram(&*default)), ("soft0", 8 * GIB));
        let small = parent("a", &["vram=512M"]);
        assert_eq!((small.name(), vram(&*small)), ("a", 512 * MIB));
        assert_eq!(small.argument(), "soft:a,vram=512M,contexts=yes");
    }
}
