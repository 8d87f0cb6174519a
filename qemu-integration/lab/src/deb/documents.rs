//! Documents of the package: README, the pages beside it and `docs/`, as in the source tree, so
//! that their links to each other hold.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::Stage;
use crate::build::workspace;

/// Folder of the documents in the package.
const FOLDER: &str = "usr/share/doc/tessera";
/// Pages beside README that it links.
const PAGES: [&str; 4] = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"];
/// Licences, which every Debian has: README's link, and the file.
const LICENCES: [(&str, &str); 2] =
    [("LICENSE-APACHE", "../../common-licenses/Apache-2.0"), ("LICENSE-MIT", "copyright")];

/// Writes the documents.
pub fn write(stage: &Stage) -> Result<()> {
    for page in PAGES {
        copy(stage, Path::new(page))?;
    }
    folder(stage, Path::new("docs"))?;
    for (link, file) in LICENCES {
        stage.link(&format!("{FOLDER}/{link}"), file)?;
    }
    Ok(())
}

/// Copies a folder of the source tree, with its folders.
fn folder(stage: &Stage, from: &Path) -> Result<()> {
    let path = workspace().join(from);
    for entry in fs::read_dir(&path).with_context(|| format!("No {}", path.display()))? {
        let entry = entry?;
        let inside = from.join(entry.file_name());
        if entry.file_type()?.is_dir() { folder(stage, &inside)? } else { copy(stage, &inside)? }
    }
    Ok(())
}

fn copy(stage: &Stage, page: &Path) -> Result<()> {
    let from = workspace().join(page);
    let bytes = fs::read(&from).with_context(|| format!("No {}", from.display()))?;
    stage.file(&Path::new(FOLDER).join(page).to_string_lossy(), 0o644, &bytes)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Returns the targets of a page's links, without those to the web and to places in the page.
    fn links(page: &Path) -> Vec<String> {
        let text = fs::read_to_string(page).unwrap();
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        let files = targets.filter_map(|(target, _)| target.split('#').next());
        files.filter(|file| !file.is_empty() && !file.contains("://")).map(str::to_owned).collect()
    }

    fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                pages(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }

    /// Links into the source code lead nowhere in the package; README has none.
    #[test]
    fn links_of_all_documents_hold_in_the_package() {
        let scratch = tempfile::tempdir().unwrap();
        let stage = Stage::new(scratch.path(), "tessera", "");
        write(&stage).unwrap();
        let folder = stage.root.join(FOLDER);
        let mut all = Vec::new();
        pages(&folder, &mut all);
        assert!(all.len() > 40 && all.contains(&folder.join("README.md")), "{all:?}");
        let mut checked = 0;
        for page in all {
            let inside = page.strip_prefix(&folder).unwrap().to_owned();
            for link in links(&page) {
                let near = |root: &Path| root.join(&inside).with_file_name(&link);
                let source = near(workspace());
                assert!(source.exists(), "{}: {link}", inside.display());
                let is_document = inside.starts_with("README.md")
                    || source.canonicalize().unwrap().starts_with(workspace().join("docs"));
                // A licence is a link to a file of Debian.
                let found = near(&folder).symlink_metadata().is_ok();
                assert!(found || !is_document, "{}: {link} is not packaged", inside.display());
                checked += 1;
            }
        }
        assert!(checked > 100, "{checked} links");
    }

    /// The versions that README asks for are those that the build and the doctor ask for.
    #[test]
    fn readme_names_the_required_versions() {
        let readme = fs::read_to_string(workspace().join("README.md")).unwrap();
        let rust = concat!("Rust ", env!("CARGO_PKG_RUST_VERSION"), " or newer");
        assert!(readme.contains(rust), "README does not say {rust:?}");
        let doctor = workspace().join("qemu-integration/vgpuctl/src/doctor/qemu.rs");
        let doctor = fs::read_to_string(doctor).unwrap();
        let version = doctor.split_once("MIN_VERSION: (u32, u32) = (").unwrap().1;
        let version = version.split_once(')').unwrap().0.replace(", ", ".");
        let qemu = format!("QEMU {version} or newer");
        assert!(readme.contains(&qemu), "README does not say {qemu:?}");
        let source = "deb http://deb.debian.org/debian trixie-backports main";
        assert!(readme.contains(source) && doctor.contains(source), "{source:?}");
    }
}
