//! Third-party programs that display consoles: a browser and a VNC client.
//!
//! Debian packages, unpacked into the cache folder and run by their own dynamic loader: headless
//! Chromium, and `gvnccapture` of gtk-vnc, the library that virt-manager uses for screens.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::{self, cache_folder};
use crate::debs::{self, Debs};
use crate::progress::Progress;

/// Version of the cached folder's contents.
const LAYOUT: &str = "viewers-1";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "lib64/ld-linux-x86-64.so.2";
const CHROMIUM: &str = "usr/lib/chromium";

/// Files that a headless program does not read.
const NOT_NEEDED: [&str; 4] =
    ["usr/share/doc", "usr/share/locale", "usr/share/icons", "usr/share/man"];

/// Unpacked viewers.
#[derive(Clone, Debug)]
pub struct Viewers {
    root: PathBuf,
}

impl Viewers {
    /// Finds the viewers in the cache, or fetches about 100 MiB.
    pub fn open(progress: &Progress) -> Result<Self> {
        let cache = cache_folder()?;
        let found = |folder: &Path| folder.exists().then(|| Self { root: folder.join("root") });
        cache::find_or_prepare(&cache, LAYOUT, progress, found, |folder, fetched| {
            if !cfg!(target_arch = "x86_64") || !Debs::possible() {
                bail!(
                    "a browser for the tests is fetched as Debian packages, on x86-64 with apt-get and dpkg-deb"
                );
            }
            let step = progress.step("Fetching a browser and a VNC client");
            let debs = Debs::open(fetched)?;
            debs.fetch_closure(&["chromium-headless-shell", "fonts-dejavu-core", "libgvnc-1.0-0"])?;
            // Excludes files for a window.
            debs.fetch(&["gvncviewer", "libgdk-pixbuf-2.0-0", "libgdk-pixbuf2.0-common"])?;
            step.done();
            let step = progress.step("Unpacking them");
            let root = folder.join("root");
            debs::unpack(&debs.packages()?, &root)?;
            debs::remove_parts(&root, &NOT_NEEDED);
            Self { root }.wire(&cache.join(LAYOUT).join("root"))?;
            step.done();
            Ok(())
        })
    }

    /// Prepares the browser's folder: Chromium restarts itself by the path of its executable and
    /// finds its files next to it, so the loader must be in the same folder.
    fn wire(&self, root: &Path) -> Result<()> {
        fs::copy(self.root.join(LOADER), self.root.join(CHROMIUM).join("loader"))?;
        let (root, chromium) = (root.display(), root.join(CHROMIUM));
        let chromium = chromium.display();
        let start = self.root.join(CHROMIUM).join("start");
        fs::write(
            &start,
            format!(
                "#!/bin/sh\nexec '{chromium}/loader' --library-path \
                 '{root}/{LIBRARIES}:{root}/{LIBRARIES}/pulseaudio:{chromium}' \
                 '{chromium}/chromium-headless-shell' \"$@\"\n"
            ),
        )?;
        fs::set_permissions(&start, fs::Permissions::from_mode(0o755))?;
        fs::write(
            self.root.join("fonts.conf"),
            format!(
                "<?xml version=\"1.0\"?>\n<!DOCTYPE fontconfig SYSTEM \"fonts.dtd\">\n<fontconfig>\
                 <dir>{root}/usr/share/fonts</dir><cachedir>{root}/fonts.cache</cachedir></fontconfig>\n"
            ),
        )
        .context("Cannot write the fonts' configuration")
    }

    /// Returns a command for a headless browser with its files in `profile`, an empty folder.
    pub fn chromium(&self, profile: &Path) -> Command {
        let start = self.root.join(CHROMIUM).join("start");
        let mut command = Command::new(&start);
        command.env("FONTCONFIG_FILE", self.root.join("fonts.conf"));
        command.args([
            "--headless",
            "--no-sandbox",
            "--no-zygote",
            "--disable-gpu",
            "--disable-quic",
        ]);
        command.args(["--no-first-run", "--disable-background-networking", "--disable-sync"]);
        command.args([
            "--disable-component-update",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
        ]);
        command.arg(format!("--user-data-dir={}", profile.display()));
        command.arg(format!("--browser-subprocess-path={}", start.display()));
        command
    }

    /// Returns a command for gtk-vnc's client, which saves a screen as a picture.
    pub fn gvnccapture(&self) -> Command {
        let mut command = Command::new(self.root.join(LOADER));
        command.arg("--library-path").arg(self.root.join(LIBRARIES));
        command.arg(self.root.join("usr/bin/gvnccapture"));
        command
    }
}
