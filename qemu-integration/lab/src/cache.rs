//! Cache of the lab: folders that are prepared once, such as unpacked packages.
//!
//! A complete folder appears by one rename. An interrupted preparation keeps its fetched packages
//! for the next run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

use crate::cleanup::Scratch;
use crate::progress::Progress;

/// Reason why this machine cannot prepare a folder. Tests that need the folder are then skipped.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Unavailable(pub String);

/// Makes an error the reason why something is [`Unavailable`].
pub(crate) fn unavailable(error: &anyhow::Error) -> anyhow::Error {
    Unavailable(format!("{error:#}")).into()
}

/// Returns the lab's cache folder.
pub fn cache_folder() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let base = base.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    Ok(base.context("Neither XDG_CACHE_HOME nor HOME is set")?.join("tessera/lab"))
}

/// Finds a folder of the cache, or prepares it.
///
/// `find` returns what a complete folder has. `prepare` fills the first folder, which becomes the
/// one in the cache, and may fetch files into the second one, which is kept if it fails.
pub(crate) fn find_or_prepare<T>(
    cache: &Path,
    name: &str,
    progress: &Progress,
    find: impl Fn(&Path) -> Option<T>,
    prepare: impl FnOnce(&Path, &Path) -> Result<()>,
) -> Result<T> {
    let folder = cache.join(name);
    if let Some(found) = find(&folder) {
        return Ok(found);
    }
    let _lock = lock(cache, progress)?;
    if let Some(found) = find(&folder) {
        return Ok(found);
    }
    let partial = Scratch::at(cache.join(format!("{name}.partial")))?;
    let fetched = cache.join(format!("{name}.fetched"));
    prepare(partial.path(), &fetched)?;
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    partial.rename(&folder)?;
    let _ = fs::remove_dir_all(&fetched);
    find(&folder).with_context(|| {
        format!("The files in {0} do not work: remove {0} and try again", folder.display())
    })
}

/// Separates the reason why this machine cannot prepare a folder from other errors.
pub(crate) fn or_reason<T>(result: Result<T>) -> Result<Result<T, String>> {
    match result.map_err(anyhow::Error::downcast) {
        Ok(found) => Ok(Ok(found)),
        Err(Ok(Unavailable(reason))) => Ok(Err(reason)),
        Err(Err(error)) => Err(error),
    }
}

/// Creates the cache and waits for concurrent preparations.
pub(crate) fn lock(cache: &Path, progress: &Progress) -> Result<Flock<fs::File>> {
    fs::create_dir_all(cache)
        .with_context(|| format!("Cannot make the folder {}", cache.display()))?;
    let path = cache.join("lock");
    let open =
        || fs::File::create(&path).with_context(|| format!("Cannot open {}", path.display()));
    if let Ok(lock) = Flock::lock(open()?, FlockArg::LockExclusiveNonblock) {
        return Ok(lock);
    }
    let step = progress.step("Waiting for another run that prepares the lab");
    let lock = Flock::lock(open()?, FlockArg::LockExclusive)
        .map_err(|(_, errno)| errno)
        .with_context(|| format!("Cannot lock {}", path.display()))?;
    step.done();
    Ok(lock)
}
