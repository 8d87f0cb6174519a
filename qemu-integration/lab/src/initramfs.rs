//! Initramfs of the guest: a cpio archive ("newc") with busybox, the display modules, `vgpu-guest`
//! and an init script.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use cpio::newc;

use crate::kernel::{Kernel, MODULES};
use crate::whole_file;

const INIT: &str = include_str!("init.sh");

/// Path of the script that runs the host's commands.
pub const AGENT: &str = include_str!("agent.sh");

/// Default path of `vgpu-guest`'s machine code.
const CUBIN: [&str; 3] = ["lib", "lib/tessera", "lib/tessera/kernels.cubin"];

/// Builds the archive.
pub fn archive(kernel: &Kernel, guest_programs: &[PathBuf]) -> Result<Vec<u8>> {
    archive_with(INIT, kernel, guest_programs)
}

/// Builds the archive with another first process.
pub fn archive_with(init: &str, kernel: &Kernel, guest_programs: &[PathBuf]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "modules", "proc", "sys", "tmp"] {
        archive.folder(folder)?;
    }
    archive.file("init", 0o755, init.as_bytes())?;
    archive.file("agent.sh", 0o644, AGENT.as_bytes())?;
    archive.file("bin/busybox", 0o755, &read(&kernel.busybox)?)?;
    archive.link("bin/sh", "busybox")?;
    // A kernel without a folder of modules has none.
    let modules: &[&str] = if kernel.modules.exists() { &MODULES } else { &[] };
    let order = [modules.join("\n").as_str(), "\n"].concat();
    let order = if modules.is_empty() { "" } else { &order };
    archive.file("modules/order", 0o644, order.as_bytes())?;
    for module in modules {
        let file = format!("{module}.ko");
        let bytes = read(&kernel.modules.join(&file))?;
        archive.file(&format!("modules/{file}"), 0o644, &bytes)?;
    }
    for program in guest_programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        archive.file(&format!("bin/{name}"), 0o755, &read(program)?)?;
    }
    archive.finish()
}

/// Builds an archive from files of this machine, keyed by their paths in the archive.
pub fn extra(files: &[(String, PathBuf)]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    let mut folders = std::collections::BTreeSet::new();
    for (name, _) in files {
        let parents = Path::new(name).ancestors().skip(1).filter_map(Path::to_str);
        folders.extend(parents.filter(|folder| !folder.is_empty()).map(str::to_owned));
    }
    // Shorter names first, so that a folder precedes its contents.
    for folder in folders {
        archive.folder(&folder)?;
    }
    let mut written = std::collections::BTreeSet::new();
    for (name, path) in files.iter().filter(|(name, _)| written.insert(name.clone())) {
        archive.file(name, 0o755, &read(path)?)?;
    }
    archive.finish()
}

/// Copies a program to a folder without its symbols, so that an archive with it is smaller.
///
/// The copy keeps the symbols on a machine without `strip`, which is a part of binutils.
pub fn stripped(program: &Path, folder: &Path) -> Result<PathBuf> {
    let name = program.file_name().context("A program without a name")?;
    let copy = folder.join(name);
    std::fs::copy(program, &copy).with_context(|| format!("Cannot copy {}", program.display()))?;
    let _ = Command::new("strip").arg(&copy).stderr(Stdio::null()).status();
    Ok(copy)
}

/// Builds an archive with machine code for `vgpu-guest`. The kernel accepts several concatenated
/// archives.
pub fn machine_code(cubin: &Path) -> Result<Vec<u8>> {
    let [folders @ .., file] = CUBIN;
    let mut archive = Archive::default();
    for folder in folders {
        archive.folder(folder)?;
    }
    archive.file(file, 0o644, &read(cubin)?)?;
    archive.finish()
}

/// Writes archives to `target` atomically.
pub fn write(target: &Path, archives: &[Vec<u8>]) -> Result<()> {
    whole_file::write(target, &archives.concat())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("Cannot read {}", path.display()))
}

/// Builder of a newc archive.
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn folder(&mut self, name: &str) -> Result<()> {
        self.entry(name, 0o040_755, &[])
    }

    fn file(&mut self, name: &str, mode: u32, bytes: &[u8]) -> Result<()> {
        self.entry(name, 0o100_000 | mode, bytes)
    }

    fn link(&mut self, name: &str, target: &str) -> Result<()> {
        self.entry(name, 0o120_777, target.as_bytes())
    }

    fn entry(&mut self, name: &str, mode: u32, bytes: &[u8]) -> Result<()> {
        self.entries += 1;
        let len = u32::try_from(bytes.len()).with_context(|| format!("{name} is too long"))?;
        let entry = newc::Builder::new(name).ino(self.entries).nlink(1).mode(mode);
        let mut writer = entry.write(&mut self.bytes, len);
        writer.write_all(bytes)?;
        writer.finish()?;
        Ok(())
    }

    fn finish(self) -> Result<Vec<u8>> {
        let mut bytes = newc::trailer(self.bytes)?;
        // Another archive may follow.
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn entries_are_aligned_and_the_trailer_ends_the_archive() {
        let mut archive = Archive::default();
        archive.folder("bin").unwrap();
        archive.file("bin/a", 0o755, b"12345").unwrap();
        archive.link("bin/b", "a").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let entry = |bytes: &[u8]| {
            let mut reader = newc::Reader::new(std::io::Cursor::new(bytes.to_vec())).unwrap();
            let mut contents = Vec::new();
            reader.read_to_end(&mut contents).unwrap();
            let name = reader.entry().name().to_owned();
            let mode = reader.entry().mode();
            let rest = reader.finish().unwrap();
            let rest = rest.get_ref()[rest.position() as usize..].to_vec();
            ((name, mode, contents), rest)
        };
        let (folder, rest) = entry(&bytes);
        assert_eq!(folder, ("bin".into(), 0o040_755, Vec::new()));
        let (file, rest) = entry(&rest);
        assert_eq!(file, ("bin/a".into(), 0o100_755, b"12345".to_vec()));
        let (link, rest) = entry(&rest);
        assert_eq!(link, ("bin/b".into(), 0o120_777, b"a".to_vec()));
        assert_eq!(entry(&rest).0.0, "TRAILER!!!");
    }
}
