//! Initramfs of the guest: a cpio archive ("newc") with busybox, the display modules, `vgpu-guest`
//! and an init script.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

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
        archive.folder(folder);
    }
    archive.file("init", 0o755, init.as_bytes());
    archive.file("agent.sh", 0o644, AGENT.as_bytes());
    archive.file("bin/busybox", 0o755, &read(&kernel.busybox)?);
    archive.link("bin/sh", "busybox");
    // A kernel without a folder of modules has none.
    let modules: &[&str] = if kernel.modules.exists() { &MODULES } else { &[] };
    let order = [modules.join("\n").as_str(), "\n"].concat();
    let order = if modules.is_empty() { "" } else { &order };
    archive.file("modules/order", 0o644, order.as_bytes());
    for module in modules {
        let file = format!("{module}.ko");
        let bytes = read(&kernel.modules.join(&file))?;
        archive.file(&format!("modules/{file}"), 0o644, &bytes);
    }
    for program in guest_programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        archive.file(&format!("bin/{name}"), 0o755, &read(program)?);
    }
    Ok(archive.finish())
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
        archive.folder(&folder);
    }
    let mut written = std::collections::BTreeSet::new();
    for (name, path) in files.iter().filter(|(name, _)| written.insert(name.clone())) {
        archive.file(name, 0o755, &read(path)?);
    }
    Ok(archive.finish())
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
        archive.folder(folder);
    }
    archive.file(file, 0o644, &read(cubin)?);
    Ok(archive.finish())
}

/// Writes archives to `target` atomically.
pub fn write(target: &Path, archives: &[Vec<u8>]) -> Result<()> {
    whole_file::write(target, &archives.concat())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("Cannot read {}", path.display()))
}

/// Builder of a newc archive: a header of 8-digit hexadecimal fields, the name and the bytes, all
/// aligned to 4.
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn folder(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    fn file(&mut self, name: &str, mode: u32, bytes: &[u8]) {
        self.entry(name, 0o100_000 | mode, bytes);
    }

    fn link(&mut self, name: &str, target: &str) {
        self.entry(name, 0o120_777, target.as_bytes());
    }

    fn entry(&mut self, name: &str, mode: u32, bytes: &[u8]) {
        self.entries += 1;
        let fields = [
            self.entries, // inode
            mode,
            0, // user
            0, // group
            1, // links
            0, // time
            bytes.len() as u32,
            0,
            0, // device
            0,
            0, // device that a special file stands for
            name.len() as u32 + 1,
            0, // checksum, unused
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(bytes);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        // Another archive may follow, so the end is aligned to 4 as well.
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_the_trailer_ends_the_archive() {
        let mut archive = Archive::default();
        archive.folder("bin");
        archive.file("bin/a", 0o755, b"12345");
        archive.link("bin/b", "a");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        assert!(bytes.starts_with(b"07070100000001000041ed"));
        // Second entry: 5 bytes of content, a name of 5 and its terminator.
        let second = &bytes[116..];
        assert_eq!(&second[..22], b"07070100000002000081ed");
        assert_eq!(&second[54..62], b"00000005");
        assert_eq!(&second[94..102], b"00000006");
        assert_eq!(&second[110..116], b"bin/a\0");
        assert_eq!(&second[116..124], b"12345\0\0\0");
        assert!(bytes.windows(11).any(|window| window == b"TRAILER!!!\0"));
    }
}
