//! UEFI firmware for VMs: OVMF from Debian's archive, unpacked into the lab's cache.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cache::{self, cache_folder};
use crate::cleanup::Scratch;
use crate::debs::{self, Debs};
use crate::progress::Progress;

/// Version of the cached folder's contents.
const LAYOUT: &str = "ovmf-1";
/// Folder of the images in the package.
const IMAGES: &str = "usr/share/OVMF";
const CODE: &str = "OVMF_CODE_4M.fd";
const VARIABLES: &str = "OVMF_VARS_4M.fd";

/// Images of the firmware.
#[derive(Clone, Debug)]
pub struct Ovmf {
    folder: PathBuf,
}

impl Ovmf {
    /// Finds or fetches the firmware.
    pub fn open(progress: &Progress) -> Result<Self> {
        let cache = cache_folder()?;
        let found = |folder: &Path| folder.exists().then(|| Self { folder: folder.to_owned() });
        cache::find_or_prepare(&cache, LAYOUT, progress, found, |folder, fetched| {
            if !Debs::possible() {
                bail!("OVMF comes as a Debian package: run this on Debian or Ubuntu");
            }
            let step = progress.step("Fetching UEFI firmware");
            let raw = Scratch::at(cache.join("ovmf-raw"))?;
            let debs = Debs::open(fetched)?;
            debs.fetch(&["ovmf"])?;
            let patterns = [CODE, VARIABLES].map(|name| format!("*/{name}"));
            let patterns: Vec<_> = patterns.iter().map(String::as_str).collect();
            debs::unpack_some(&debs.package("ovmf")?, raw.path(), &patterns)?;
            for name in [CODE, VARIABLES] {
                fs::rename(raw.path().join(IMAGES).join(name), folder.join(name))
                    .with_context(|| format!("Debian's package ovmf has no {name}"))?;
            }
            step.done();
            Ok(())
        })
    }

    /// Returns QEMU's arguments. `folder` gets a copy of the variables, which a VM writes to.
    pub fn args(&self, folder: &Path) -> Result<Vec<String>> {
        let variables = folder.join(VARIABLES);
        fs::copy(self.folder.join(VARIABLES), &variables)
            .with_context(|| format!("Cannot write {}", variables.display()))?;
        let drive = |path: &Path, more: &str| {
            ["-drive".to_owned(), format!("if=pflash,format=raw,file={}{more}", path.display())]
        };
        let code = drive(&self.folder.join(CODE), ",readonly=on");
        Ok(code.into_iter().chain(drive(&variables, "")).collect())
    }
}
