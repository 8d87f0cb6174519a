//! Files that other processes see either whole or not at all.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};

/// Writes a file under another name and renames it to `target`. Creates the folder if necessary.
pub fn write(target: &Path, bytes: &[u8]) -> Result<()> {
    let folder = target.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)
        .with_context(|| format!("Cannot make the folder {}", folder.display()))?;
    let file = tempfile::NamedTempFile::new_in(folder)
        .with_context(|| format!("Cannot write to {}", folder.display()))?;
    fs::write(file.path(), bytes)
        .with_context(|| format!("Cannot write to {}", folder.display()))?;
    fs::set_permissions(file.path(), Permissions::from_mode(0o644))?;
    file.persist(target).with_context(|| format!("Cannot write {}", target.display()))?;
    Ok(())
}
