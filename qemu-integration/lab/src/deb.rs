//! `cargo lab deb`: the Debian package, made of `packaging/` and of the programs' generated manual
//! pages and completions.
//!
//! dpkg-deb, which the lab needs anyway, packs the files. The programs link to the build machine's
//! C library, and the package depends on a version that has the used symbols.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use flate2::{Compression, GzBuilder};

use crate::build::{self, Profile, Programs, workspace};
use crate::cleanup::Scratch;
use crate::progress::Progress;

mod documents;
pub mod guest;
pub mod kube;
mod pages;

/// Revision of the package, appended to the programs' version.
const REVISION: u32 = 1;

/// Options of the package.
#[derive(Clone, Debug)]
pub struct Options {
    /// Folder for the package.
    pub out: PathBuf,
    /// Build profile of the programs.
    pub profile: Profile,
}

/// Files copied from the source tree: source and target.
const FILES: [(&str, &str); 8] = [
    ("packaging/vgpud.socket", "usr/lib/systemd/system/vgpud.socket"),
    ("packaging/vgpu-parent@.service", "usr/lib/systemd/system/vgpu-parent@.service"),
    ("packaging/sysusers.conf", "usr/lib/sysusers.d/vgpud.conf"),
    ("packaging/tmpfiles.conf", "usr/lib/tmpfiles.d/vgpud.conf"),
    ("packaging/default", "etc/default/vgpud"),
    ("packaging/debian/copyright", "usr/share/doc/tessera/copyright"),
    ("packaging/prometheus/tessera-rules.yml", "usr/share/doc/tessera/examples/tessera-rules.yml"),
    ("packaging/grafana/tessera.json", "usr/share/doc/tessera/examples/grafana.json"),
];

/// Links to files in the same folder of the package, such as mdevctl's `lsmdev`.
const LINKS: [(&str, &str); 2] =
    [("usr/bin/lsvgpu", "vgpuctl"), ("usr/share/man/man1/lsvgpu.1.gz", "vgpuctl-list.1.gz")];

/// Programs and libraries of the package.
const BINARIES: [&str; 3] =
    ["usr/bin/vgpud", "usr/bin/vgpuctl", "usr/lib/tessera/libtessera_cuda.so"];

/// Scripts run by dpkg.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// Completions: the shell's name for vgpuctl, and the shell's folder for completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/vgpuctl"),
    ("zsh", "usr/share/zsh/vendor-completions/_vgpuctl"),
    ("fish", "usr/share/fish/vendor_completions.d/vgpuctl.fish"),
];

/// Writes the package and returns its path.
pub fn write(options: &Options, progress: &Progress) -> Result<PathBuf> {
    let programs = build::host_with(options.profile, progress)?;
    let library = build::cuda_library(options.profile, progress)?;
    let step = progress.step("Putting the package together");
    let scratch = Scratch::new()?;
    let stage = Stage::new(scratch.path(), "tessera", "packaging/debian");
    for to in BINARIES {
        let from = match to.strip_prefix("usr/bin/") {
            Some(name) => programs.find(name)?,
            None => library.as_path(),
        };
        stage.binary(to, from)?;
    }
    stage.copies(&FILES)?;
    documents::write(&stage)?;
    generated(&stage, &programs, scratch.path())?;
    for (link, to) in LINKS {
        stage.link(link, to)?;
    }
    stage.file("DEBIAN/conffiles", 0o644, b"/etc/default/vgpud\n")?;
    let package = stage.finish(options, "amd64", &SCRIPTS, &[stage.libc(&BINARIES)?])?;
    step.done();
    Ok(package)
}

/// Files of a package before packing.
struct Stage {
    root: PathBuf,
    /// Name of the package.
    name: &'static str,
    /// Folder of the package's control files in the source tree.
    debian: &'static str,
}

impl Stage {
    fn new(folder: &Path, name: &'static str, debian: &'static str) -> Self {
        Self { root: folder.join(name), name, debian }
    }

    fn file(&self, to: &str, mode: u32, bytes: &[u8]) -> Result<()> {
        let path = self.root.join(to);
        fs::create_dir_all(path.parent().unwrap_or(&self.root))?;
        fs::write(&path, bytes).with_context(|| format!("Cannot write {}", path.display()))?;
        fs::set_permissions(&path, Permissions::from_mode(mode))?;
        // Sets the permissions independently of the umask.
        for folder in path.ancestors().skip(1).take_while(|folder| folder.starts_with(&self.root)) {
            fs::set_permissions(folder, Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    /// Copies files from the source tree, given as source and target.
    fn copies(&self, files: &[(&str, &str)]) -> Result<()> {
        files.iter().try_for_each(|(from, to)| self.file(to, 0o644, &read(from)?))
    }

    /// Copies a program or a library, and strips it.
    fn binary(&self, to: &str, from: &Path) -> Result<()> {
        let mode = if Path::new(to).extension().is_some() { 0o644 } else { 0o755 };
        self.file(to, mode, &fs::read(from)?)?;
        strip(&self.root.join(to));
        Ok(())
    }

    /// Makes a symbolic link.
    fn link(&self, link: &str, to: &str) -> Result<()> {
        symlink(to, self.root.join(link)).with_context(|| format!("Cannot make the link {link}"))
    }

    /// Compresses a file reproducibly.
    fn packed(&self, to: &str, bytes: &[u8]) -> Result<()> {
        let mut packer = GzBuilder::new().write(Vec::new(), Compression::best());
        packer.write_all(bytes)?;
        self.file(to, 0o644, &packer.finish()?)
    }

    /// Adds a manual page, from the output of the program.
    fn page(&self, name: &str, section: &str, text: &str) -> Result<()> {
        let to = format!("usr/share/man/man{section}/{name}.{section}.gz");
        self.packed(&to, pages::tidy(text, name, section, &date("%Y-%m-%d")?).as_bytes())
    }

    /// Returns the placeholder of the required C library, and its version.
    fn libc(&self, binaries: &[&str]) -> Result<(&'static str, String)> {
        let mut libc = (0, 0);
        for name in binaries {
            libc = libc.max(libc_version(&fs::read(self.root.join(name))?));
        }
        Ok(("@LIBC@", format!("{}.{}", libc.0, libc.1)))
    }

    /// Adds changelogs and control files, and packs the package. `values` are those of further
    /// placeholders in `control.in`. Returns the package's path.
    fn finish(
        &self,
        options: &Options,
        architecture: &str,
        scripts: &[&str],
        values: &[(&str, String)],
    ) -> Result<PathBuf> {
        let Self { root, name, debian } = self;
        let version = format!("{}-{REVISION}", env!("CARGO_PKG_VERSION"));
        let document = |file: &str| format!("usr/share/doc/{name}/{file}");
        self.packed(&document("changelog.gz"), &read("CHANGELOG.md")?)?;
        let changelog = debian_changelog(name, &version)?;
        self.packed(&document("changelog.Debian.gz"), changelog.as_bytes())?;
        let overrides = read(&format!("{debian}/lintian-overrides"))?;
        self.file(&format!("usr/share/lintian/overrides/{name}"), 0o644, &overrides)?;
        let (files, kibibytes) = files_and_size(root)?;
        let mut control = text(&format!("{debian}/control.in"))?
            .replace("@VERSION@", &version)
            .replace("@SIZE@", &kibibytes.to_string());
        for (placeholder, value) in values {
            control = control.replace(placeholder, value);
        }
        self.file("DEBIAN/control", 0o644, control.as_bytes())?;
        self.file("DEBIAN/md5sums", 0o644, &md5_sums(root, &files)?)?;
        for script in scripts {
            let content = text(&format!("{debian}/{script}.in"))?
                .replace("@VERSION@", env!("CARGO_PKG_VERSION"));
            self.file(&format!("DEBIAN/{script}"), 0o755, content.as_bytes())?;
        }
        let package = options.out.join(format!("{name}_{version}_{architecture}.deb"));
        fs::create_dir_all(&options.out)?;
        let mut pack = Command::new("dpkg-deb");
        match options.profile {
            Profile::Dev => pack.args(["-Zgzip", "-z1"]),
            Profile::Release => pack.arg("-Zxz"),
        };
        pack.args(["--root-owner-group", "--build"]).arg(root).arg(&package);
        let done = pack.output().context("Cannot run dpkg-deb: it is in Debian's package dpkg")?;
        if !done.status.success() {
            bail!("dpkg-deb failed: {}", String::from_utf8_lossy(&done.stderr).trim());
        }
        Ok(package)
    }
}

/// Writes the manual pages and completions generated by the programs.
fn generated(stage: &Stage, programs: &Programs, scratch: &Path) -> Result<()> {
    let unit = text("packaging/vgpud.service.in")?;
    let devices = output(programs.find("vgpud")?, &["device-allow"])?;
    let unit = unit.replace("@DEVICE_ALLOW@", String::from_utf8_lossy(&devices).trim_end());
    stage.file("usr/lib/systemd/system/vgpud.service", 0o644, unit.as_bytes())?;
    let vgpuctl = programs.find("vgpuctl")?;
    for (shell, to) in COMPLETIONS {
        stage.file(to, 0o644, &output(vgpuctl, &["completions", shell])?)?;
    }
    let folder = scratch.join("pages");
    fs::create_dir(&folder)?;
    output(vgpuctl, &["man", &folder.to_string_lossy()])?;
    for file in fs::read_dir(&folder)? {
        let path = file?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        stage.page(&name, "1", &fs::read_to_string(&path)?)?;
    }
    stage.page("vgpud", "8", &String::from_utf8(output(programs.find("vgpud")?, &["man"])?)?)
}

fn output(program: &Path, args: &[&str]) -> Result<Vec<u8>> {
    let name = program.display();
    let done = Command::new(program).args(args).output();
    let done = done.with_context(|| format!("Cannot run {name}"))?;
    if !done.status.success() {
        bail!("{name} {args:?} failed: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(done.stdout)
}

/// Strips a program's symbols if binutils are available.
fn strip(program: &Path) {
    let done = Command::new("strip")
        .args(["--strip-unneeded", "--remove-section=.comment", "--remove-section=.note"])
        .arg(program)
        .output();
    if !done.is_ok_and(|done| done.status.success()) {
        eprintln!(
            "note: {} keeps its symbols: strip (binutils) is not installed",
            program.display()
        );
    }
}

fn read(path: &str) -> Result<Vec<u8>> {
    fs::read(workspace().join(path)).with_context(|| format!("No {path}"))
}

fn text(path: &str) -> Result<String> {
    Ok(String::from_utf8(read(path)?)?)
}

/// Returns the files of a package, and their size in KiB.
fn files_and_size(root: &Path) -> Result<(Vec<PathBuf>, u64)> {
    let mut files = Vec::new();
    list(root, root, &mut files)?;
    files.sort();
    let mut bytes = 0;
    for file in &files {
        bytes += fs::metadata(root.join(file))?.len();
    }
    Ok((files, bytes.div_ceil(1024)))
}

fn md5_sums(root: &Path, files: &[PathBuf]) -> Result<Vec<u8>> {
    let sums = Command::new("md5sum").args(files).current_dir(root).output();
    Ok(sums.context("Cannot run md5sum")?.stdout)
}

/// Returns the files that dpkg can check, which excludes links.
fn list(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            // The control files are not installed.
            if !path.ends_with("DEBIAN") {
                list(root, &path, files)?;
            }
        } else if !path.is_symlink() {
            files.push(path.strip_prefix(root)?.to_owned());
        }
    }
    Ok(())
}

/// Returns the newest C library version among a program's symbols.
fn libc_version(program: &[u8]) -> (u32, u32) {
    const MARK: &[u8] = b"GLIBC_";
    let mut newest = (0, 0);
    for at in program.windows(MARK.len()).enumerate().filter(|(_, w)| *w == MARK).map(|(at, _)| at)
    {
        let rest = &program[at + MARK.len()..];
        let end = rest.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.');
        let text = std::str::from_utf8(&rest[..end.unwrap_or(0)]).unwrap_or_default();
        let mut numbers = text.split('.').map(str::parse);
        if let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) {
            newest = newest.max((major, minor));
        }
    }
    newest
}

/// Returns the time of the last source change, formatted by `strftime`, so that builds are
/// reproducible.
fn date(format: &str) -> Result<String> {
    let commit = Command::new("git")
        .args(["log", "-1", &format!("--date=format:{format}"), "--format=%ad"])
        .current_dir(workspace())
        .output()
        .ok()
        .filter(|done| done.status.success() && !done.stdout.is_empty());
    let text = if let Some(done) = commit {
        done.stdout
    } else {
        let mut now = Command::new("date");
        now.env("LC_ALL", "C").arg(format!("+{format}"));
        now.output().context("Cannot run date")?.stdout
    };
    Ok(String::from_utf8(text)?.trim().to_owned())
}

fn debian_changelog(package: &str, version: &str) -> Result<String> {
    let date = date("%a, %d %b %Y %H:%M:%S %z")?;
    Ok(format!(
        "{package} ({version}) unstable; urgency=medium\n\n  * See changelog.gz.\n\n -- The Tessera authors \
         <tessera@localhost.invalid>  {date}\n"
    ))
}

/// Returns the size of a file in bytes.
pub fn size(path: &Path) -> Result<u64> {
    Ok(File::open(path)?.metadata()?.len())
}

#[cfg(test)]
mod tests {
    use super::libc_version;

    #[test]
    fn newest_symbol_version_is_required() {
        assert_eq!(libc_version(b"xGLIBC_2.2.5\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.9\0"), (2, 34));
        assert_eq!(libc_version(b"nothing"), (0, 0));
    }
}
