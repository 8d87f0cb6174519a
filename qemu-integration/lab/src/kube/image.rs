//! Container images made of files of this machine, in the format of `docker save`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tar::{Builder, EntryType, Header};

use crate::cleanup::Scratch;

/// Programs of busybox that an image offers.
const APPLETS: [&str; 10] =
    ["cat", "env", "find", "id", "kill", "ls", "mkdir", "sh", "sleep", "timeout"];

/// Program of a container that names none, such as a pod's sandbox.
const ENTRYPOINT: [&str; 2] = ["/bin/sleep", "2147483647"];

/// Contents of an image.
#[allow(missing_debug_implementations, reason = "tar's builder has none")]
pub struct Image {
    name: String,
    layer: Builder<File>,
    folder: Scratch,
    environment: Vec<String>,
}

impl Image {
    /// Creates an image with a static busybox.
    pub fn new(name: &str, busybox: &Path) -> Result<Self> {
        let folder = Scratch::new()?;
        let layer = Builder::new(File::create(folder.path().join("layer.tar"))?);
        let mut image = Self { name: name.to_owned(), layer, folder, environment: Vec::new() };
        image.variable("PATH", "/bin");
        for (name, mode) in [("bin", 0o755), ("tmp", 0o1777), ("etc", 0o755)] {
            let mut header = Header::new_gnu();
            header.set_entry_type(EntryType::Directory);
            header.set_mode(mode);
            header.set_size(0);
            image.layer.append_data(&mut header, name, std::io::empty())?;
        }
        image.add(busybox, "/bin/busybox")?;
        for applet in APPLETS {
            let mut header = Header::new_gnu();
            header.set_entry_type(EntryType::Symlink);
            header.set_size(0);
            image.layer.append_link(&mut header, format!("bin/{applet}"), "busybox")?;
        }
        Ok(image)
    }

    /// Sets an environment variable of the image's containers.
    pub fn variable(&mut self, name: &str, value: &str) {
        self.environment.push(format!("{name}={value}"));
    }

    /// Adds a file of this machine, readable and executable by every user.
    pub fn add(&mut self, file: &Path, inside: &str) -> Result<()> {
        let mut source =
            File::open(file).with_context(|| format!("Cannot read {}", file.display()))?;
        let mut header = Header::new_gnu();
        header.set_mode(0o755);
        header.set_size(source.metadata()?.len());
        self.layer.append_data(&mut header, inside.trim_start_matches('/'), &mut source)?;
        Ok(())
    }

    /// Adds a dynamically linked program and its libraries, at the libraries' paths on this
    /// machine.
    pub fn add_program(&mut self, program: &Path, inside: &str) -> Result<()> {
        self.add(program, inside)?;
        self.add_libraries(program)
    }

    /// Adds the libraries that a program or library needs, at their paths on this machine.
    pub fn add_libraries(&mut self, of: &Path) -> Result<()> {
        for library in libraries(of)? {
            self.add(&library, &library.to_string_lossy())?;
        }
        Ok(())
    }

    /// Writes the image.
    pub fn write(self, to: &Path) -> Result<()> {
        let folder = self.folder.path();
        self.layer.into_inner()?.sync_data().ok();
        let layer = folder.join("layer.tar");
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": { "Env": self.environment, "Entrypoint": ENTRYPOINT },
            "rootfs": { "type": "layers", "diff_ids": [digest(&layer)?] },
        });
        let manifest =
            json!([{ "Config": "config.json", "RepoTags": [self.name], "Layers": ["layer.tar"] }]);
        fs::write(folder.join("config.json"), config.to_string())?;
        fs::write(folder.join("manifest.json"), manifest.to_string())?;
        let file = File::create(to).with_context(|| format!("Cannot write {}", to.display()))?;
        let mut archive = Builder::new(file);
        for name in ["manifest.json", "config.json", "layer.tar"] {
            archive.append_path_with_name(folder.join(name), name)?;
        }
        archive.finish()?;
        Ok(())
    }
}

/// Returns the libraries of a program and its loader.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("Cannot run ldd")?;
    if !output.status.success() {
        bail!("ldd cannot read {}", program.display());
    }
    // "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f...)", "/lib64/ld-linux... (0x...)"
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let paths = text.lines().filter_map(|line| {
        let path = line.rsplit_once(" (0x")?.0.trim();
        let path = path.rsplit_once("=> ").map_or(path, |(_, path)| path);
        path.starts_with('/').then(|| PathBuf::from(path))
    });
    Ok(paths.collect())
}

/// Returns a file's digest, as images name it.
fn digest(file: &Path) -> Result<String> {
    let output = Command::new("sha256sum").arg(file).output().context("Cannot run sha256sum")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let Some(hex) = text.split_whitespace().next().filter(|hex| hex.len() == 64) else {
        bail!("sha256sum cannot read {}", file.display());
    };
    Ok(format!("sha256:{hex}"))
}
