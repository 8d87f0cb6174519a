//! Debian packages without installation: apt with separate state fetches and verifies packages,
//! `dpkg-deb` unpacks them.
//!
//! Maintainer scripts do not run, nothing is mounted, the host's package database stays unchanged,
//! and root is not needed. The host's apt settings (proxies, credentials) apply; signatures are
//! checked with Debian's archive keyring.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::cleanup::Process;
use crate::guest::last;

const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const KEYRING_REMEDY: &str =
    "Debian's archive keys are missing: run `apt-get install debian-archive-keyring` as root";
const RELEASE: &str = "trixie";
const BACKPORTS: &str = "trixie-backports";
const FETCH_LIMIT: Duration = Duration::from_secs(900);

/// Apt with lists, status and cache in one folder, for one release of Debian and its backports.
#[derive(Debug)]
pub struct Debs {
    folder: PathBuf,
    sources: Sources,
}

/// Part of Debian's archive.
#[derive(Clone, Copy, Debug)]
pub struct Sources {
    /// Types of packages: `deb`, `deb-src`.
    pub types: &'static str,
    /// Suites.
    pub suites: &'static [&'static str],
    /// Components, such as `main non-free`.
    pub components: &'static str,
}

impl Default for Sources {
    /// Returns the packages of the lab's release and its backports.
    fn default() -> Self {
        Self { types: "deb", suites: &[RELEASE, BACKPORTS], components: "main" }
    }
}

impl Debs {
    /// Returns true if the required tools are installed.
    pub fn possible() -> bool {
        ["apt-get", "apt-cache", "dpkg-deb", "tar"].iter().all(|tool| in_path(tool).is_some())
    }

    /// Sets up apt in `folder`, which may hold fetched packages of an earlier run, and reads the
    /// package lists.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::open_sources(folder, Sources::default())
    }

    /// Sets up apt as [`Self::open`], for another part of the archive.
    pub fn open_sources(folder: &Path, sources: Sources) -> Result<Self> {
        for sub in ["sources", "state/lists/partial", "cache/archives/partial", "log"] {
            let path = folder.join(sub);
            fs::create_dir_all(&path)
                .with_context(|| format!("Cannot make the folder {}", path.display()))?;
        }
        fs::write(folder.join("status"), "")?;
        let debs = Self { folder: folder.to_path_buf(), sources };
        install_keyring()?;
        let mirror = host_mirror();
        let first = debs.update(mirror.as_deref().unwrap_or(DEFAULT_MIRROR));
        match (first, mirror) {
            (Err(_), Some(_)) => debs.update(DEFAULT_MIRROR)?,
            (first, _) => first?,
        }
        Ok(debs)
    }

    fn update(&self, mirror: &str) -> Result<()> {
        let Sources { types, suites, components } = self.sources;
        let sources = format!(
            "Types: {types}\nURIs: {mirror}\nSuites: {}\n\
             Components: {components}\nArchitectures: amd64\nSigned-By: {KEYRING}\n",
            suites.join(" ")
        );
        fs::write(self.folder.join("sources/lab.sources"), sources)?;
        let mut command = self.apt("apt-get");
        command.args(["-o", "APT::Update::Error-Mode=any", "update"]);
        self.run(command).with_context(|| {
            format!("Cannot read Debian's package lists from {mirror}: check the network")
        })?;
        Ok(())
    }

    /// Fetches packages from backports, with all dependencies.
    pub fn fetch_closure(&self, packages: &[&str]) -> Result<()> {
        let mut command = self.apt("apt-get");
        command.args(["-y", "--download-only", "-t", BACKPORTS, "install"]);
        command.args(packages);
        self.run(command).context("Cannot fetch packages").map(drop)
    }

    /// Fetches packages of the release, with all dependencies. `name/release` selects another
    /// release.
    pub fn fetch_chosen(&self, packages: &[&str]) -> Result<()> {
        let mut command = self.apt("apt-get");
        command.args(["-y", "--download-only", "install"]).args(packages);
        self.run(command).context("Cannot fetch packages").map(drop)
    }

    /// Fetches single packages of the release, without dependencies.
    pub fn fetch(&self, packages: &[&str]) -> Result<()> {
        let mut command = self.apt("apt-get");
        command.current_dir(self.archives()).arg("download").args(packages);
        self.run(command).context("Cannot fetch packages").map(drop)
    }

    /// Fetches a source package and returns its upstream archive, not unpacked.
    pub fn fetch_source(&self, package: &str) -> Result<PathBuf> {
        let mut command = self.apt("apt-get");
        command.current_dir(self.archives()).args(["source", "--download-only", package]);
        self.run(command).context("Cannot fetch a source package")?;
        let found = fs::read_dir(self.archives())?.filter_map(|entry| Some(entry.ok()?.path()));
        let mut found = found.filter(|path| path.to_string_lossy().contains(".orig.tar"));
        found.next().with_context(|| format!("{package} has no upstream archive"))
    }

    /// Returns the first dependency of a metapackage such as `linux-image-amd64`.
    pub fn dependency(&self, package: &str) -> Result<String> {
        let first = self.dependencies(package)?.into_iter().next();
        first.with_context(|| format!("{package} has no dependencies"))
    }

    /// Returns the dependencies of a package, including alternatives.
    pub fn dependencies(&self, package: &str) -> Result<Vec<String>> {
        self.dependencies_in(package, RELEASE)
    }

    /// Returns the dependencies of a suite's version of a package, including alternatives.
    pub fn dependencies_in(&self, package: &str, suite: &str) -> Result<Vec<String>> {
        let mut command = self.apt("apt-cache");
        command.arg("-o").arg(format!("APT::Default-Release={suite}"));
        command.args(["depends", "--important", package]);
        let text = self.run(command)?;
        let names = text.lines().filter_map(|line| {
            line.trim().trim_start_matches('|').strip_prefix("Depends: ").map(str::to_owned)
        });
        Ok(names.collect())
    }

    /// Returns the fetched packages.
    pub fn packages(&self) -> Result<Vec<PathBuf>> {
        let mut found: Vec<_> = fs::read_dir(self.archives())?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .collect();
        found.sort();
        Ok(found)
    }

    /// Returns the fetched package with this name.
    pub fn package(&self, name: &str) -> Result<PathBuf> {
        let prefix = format!("{name}_");
        let matches = |path: &PathBuf| {
            path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&prefix))
        };
        let found = self.packages()?.into_iter().find(matches);
        found.with_context(|| format!("The package {name} was not fetched"))
    }

    /// Returns the folder of the fetched packages.
    pub fn archives(&self) -> PathBuf {
        self.folder.join("cache/archives")
    }

    fn apt(&self, tool: &str) -> Command {
        let at = |sub: &str| self.folder.join(sub).display().to_string();
        let mut command = Command::new(tool);
        for option in [
            "Dir::Etc::sourcelist=/dev/null".to_owned(),
            format!("Dir::Etc::sourceparts={}", at("sources")),
            "Dir::Etc::preferences=/dev/null".to_owned(),
            "Dir::Etc::preferencesparts=/dev/null".to_owned(),
            format!("Dir::State={}", at("state")),
            format!("Dir::State::status={}", at("status")),
            format!("Dir::Cache={}", at("cache")),
            format!("Dir::Log={}", at("log")),
            "APT::Architecture=amd64".to_owned(),
            "APT::Architectures=amd64".to_owned(),
            "APT::Install-Recommends=false".to_owned(),
            "APT::Sandbox::User=root".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::Retries=3".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false".to_owned(),
            "Debug::NoLocking=1".to_owned(),
        ] {
            command.arg("-o").arg(option);
        }
        command
    }

    /// Runs a command and returns its output. An error contains the command's error messages.
    fn run(&self, command: Command) -> Result<String> {
        run_quietly(command, &self.folder.join("log/last"))
    }
}

/// Runs a command and discards its output unless the command fails. An interrupt ends the command.
pub fn run_quietly(mut command: Command, log: &Path) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let (out, err) = (log.with_extension("out"), log.with_extension("err"));
    command.stdin(Stdio::null()).stdout(fs::File::create(&out)?).stderr(fs::File::create(&err)?);
    command.env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
    let status = Process::spawn(command, Signal::SIGTERM)?.wait(FETCH_LIMIT)?;
    if !status.success() {
        let complaint = fs::read_to_string(&err).unwrap_or_default();
        let lines = complaint.lines().filter(|line| !line.is_empty());
        let tail = last(&lines.collect::<Vec<_>>(), 3).join("; ");
        match status.signal() {
            Some(signal) => bail!("{name} was ended by signal {signal}"),
            None => bail!("{name} failed: {tail}"),
        }
    }
    let text = String::from_utf8_lossy(&fs::read(&out)?).into_owned();
    fs::remove_file(&out)?;
    fs::remove_file(&err)?;
    Ok(text)
}

/// Removes parts of unpacked packages that nothing reads.
pub(crate) fn remove_parts(root: &Path, parts: &[&str]) {
    for part in parts {
        let _ = fs::remove_dir_all(root.join(part));
    }
}

/// Unpacks packages below `root`, several in parallel.
pub fn unpack(packages: &[PathBuf], root: &Path) -> Result<()> {
    merge_usr(root)?;
    let share = packages.len().div_ceil(2).max(1);
    thread::scope(|scope| {
        let workers: Vec<_> = packages
            .chunks(share)
            .enumerate()
            .map(|(index, packages)| {
                let log = root.join(format!(".unpack{index}"));
                scope.spawn(move || {
                    for package in packages {
                        let mut command = Command::new("dpkg-deb");
                        command.arg("-x").arg(package).arg(root);
                        run_quietly(command, &log)
                            .with_context(|| format!("Cannot unpack {}", package.display()))?;
                    }
                    anyhow::Ok(())
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

/// Unpacks the members of one package that match shell patterns.
pub fn unpack_some(package: &Path, root: &Path, patterns: &[&str]) -> Result<()> {
    const SCRIPT: &str = r#"p=$1 r=$2; shift 2
        dpkg-deb --fsys-tarfile "$p" | tar -x -C "$r" --wildcards "$@""#;
    fs::create_dir_all(root)?;
    unpack_by(SCRIPT, package, root, patterns)
}

/// Unpacks a package into a folder by a shell script, which gets both and `args`. Only its pipe
/// needs a shell.
fn unpack_by(
    script: &str,
    package: &Path,
    folder: &Path,
    args: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> Result<()> {
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(package).arg(folder).args(args);
    run_quietly(command, &folder.join(".unpack"))
        .with_context(|| format!("Cannot unpack {}", package.display()))
        .map(drop)
}

/// Returns the package with the sources of a kernel, such as `linux-source-6.12`, by the kernel's
/// release.
pub fn linux_source(release: &str) -> String {
    let mut numbers = release.split('.');
    let (major, minor) = (numbers.next().unwrap_or(""), numbers.next().unwrap_or(""));
    format!("linux-source-{major}.{minor}")
}

/// Unpacks those of a kernel's sources into `folder` that arguments of tar(1) choose. `package` is
/// the file of the package `name`.
pub fn unpack_linux_source(
    package: &Path,
    name: &str,
    folder: &Path,
    choice: &[String],
) -> Result<()> {
    const SCRIPT: &str = r#"p=$1 b=$2 n=$3; shift 3
        dpkg-deb --fsys-tarfile "$p" | tar -xO "./usr/src/$n.tar.xz" |
            tar -xJ -C "$b" --strip-components=1 "$@""#;
    let name_and_choice = std::iter::once(name).chain(choice.iter().map(String::as_str));
    unpack_by(SCRIPT, package, folder, name_and_choice)
}

/// Links `/lib` and similar folders into `/usr`, as on every installed Debian.
fn merge_usr(root: &Path) -> Result<()> {
    for name in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(root.join("usr").join(name))?;
        let link = root.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(format!("usr/{name}"), link)?;
        }
    }
    Ok(())
}

/// Finds Debian's archive keys: installed on Debian, and in a package of other distributions.
fn install_keyring() -> Result<()> {
    if Path::new(KEYRING).exists() {
        return Ok(());
    }
    if !nix::unistd::geteuid().is_root() {
        bail!(KEYRING_REMEDY);
    }
    let log = std::env::temp_dir().join(format!("tessera-keyring-{}", std::process::id()));
    for args in [&["update"][..], &["install", "-y", "debian-archive-keyring"]] {
        let mut command = Command::new("apt-get");
        command.args(args);
        run_quietly(command, &log).context(KEYRING_REMEDY)?;
    }
    Ok(())
}

/// Returns the mirror of the host's apt, if the host is a Debian.
fn host_mirror() -> Option<String> {
    let mut texts = vec![fs::read_to_string("/etc/apt/sources.list").unwrap_or_default()];
    for entry in fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten() {
        texts.push(fs::read_to_string(entry.path()).unwrap_or_default());
    }
    texts.iter().find_map(|text| mirror_in(text))
}

/// Returns the first archive in a sources file (either format) that looks like a full mirror of
/// Debian.
fn mirror_in(text: &str) -> Option<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| line.starts_with("deb ") || line.starts_with("URIs:"))
        .flat_map(str::split_whitespace)
        .filter(|word| word.starts_with("http://") || word.starts_with("https://"))
        .map(|word| word.trim_end_matches('/'))
        .find(|word| word.ends_with("/debian"))
        .map(str::to_owned)
}

/// Finds a program in the path.
pub fn in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::mirror_in;

    #[test]
    fn host_mirror_is_found_in_both_formats() {
        let deb822 = "# a comment\nTypes: deb\nURIs: http://mirror.example/debian/\nSuites: x\n";
        assert_eq!(mirror_in(deb822).as_deref(), Some("http://mirror.example/debian"));
        let lines = "deb https://packages.example/other main\n\
                     deb [arch=amd64] https://mirror.example/debian bookworm main\n";
        assert_eq!(mirror_in(lines).as_deref(), Some("https://mirror.example/debian"));
        assert_eq!(mirror_in("deb http://mirror.example/debian-security x main"), None);
        assert_eq!(mirror_in("# deb http://mirror.example/debian x main"), None);
    }
}
