//! The tree that holds definitions: `<dir>/<parent>/<uuid>`, as mdevctl has it.
//!
//! A definition is replaced as a whole or not at all, whatever happens meanwhile, and is on disk when
//! [`Store::save`] returns. One process writes a tree. Its folder [`SCRIPTS`] is no parent's.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::{Definition, DefinitionError};
use crate::durable::{self, Step};
use crate::ids::VgpuId;

/// The folder of callout scripts, in the tree as mdevctl has it.
pub const SCRIPTS: &str = "scripts.d";

/// What unfinished files end with. They begin with a dot, so no uuid looks like one.
const TEMP_SUFFIX: &str = ".tmp";

/// A tree of definitions.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
}

/// A definition with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The physical GPU it is for.
    pub parent: String,
    /// Its name.
    pub vgpu: VgpuId,
    /// What it says.
    pub definition: Definition,
}

/// Something in the tree that is no definition.
#[derive(Debug)]
pub struct Problem {
    /// Where it is.
    pub path: PathBuf,
    /// What is wrong with it, in one line.
    pub error: StoreError,
}

/// What a tree holds.
#[derive(Debug, Default)]
pub struct Scan {
    /// Definitions, in the order of parents and then of uuids.
    pub definitions: Vec<Stored>,
    /// Everything that could not be read. It is left alone.
    pub problems: Vec<Problem>,
}

/// Why a definition was not read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system refused.
    #[error("Cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// What is there is no definition.
    #[error("{}: {source}", path.display())]
    Definition {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: DefinitionError,
    },
    /// A file whose name is no uuid.
    #[error("{}: not a definition: its name is not a uuid", .0.display())]
    Name(PathBuf),
    /// One uuid for two parents.
    #[error(
        "{}: not used: parent {parent} has a vGPU of that uuid; give one of them another", path.display()
    )]
    Double {
        /// The file that is not used.
        path: PathBuf,
        /// Where the definition is that is used.
        parent: String,
    },
    /// A parent whose name is no folder's.
    #[error("{0:?} cannot be a parent's name")]
    Parent(String),
}

fn io_error<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> StoreError + 'a {
    move |source| StoreError::Io { action, path: path.to_owned(), source }
}

impl Store {
    /// Opens the tree at `dir`, makes it where it is not there yet, and removes what an interrupted save left.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let store = Self { dir: dir.into() };
        fs::create_dir_all(&store.dir).map_err(io_error("create", &store.dir))?;
        for (_, folder) in store.parents()? {
            // A folder that cannot be read is reported by every scan; it stops nothing.
            for entry in read_dir(&folder).unwrap_or_default() {
                let name = entry.file_name();
                let name = name.to_string_lossy();
                if name.starts_with('.') && name.ends_with(TEMP_SUFFIX) {
                    let path = entry.path();
                    fs::remove_file(&path).map_err(io_error("remove", &path))?;
                }
            }
        }
        Ok(store)
    }

    /// Where the tree is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes a definition. It is on disk when this returns; before that, the old one is.
    pub fn save(
        &self,
        parent: &str,
        vgpu: VgpuId,
        definition: &Definition,
    ) -> Result<(), StoreError> {
        let path = self.folder(parent)?.join(vgpu.to_string());
        durable::run(&self.steps_to_save(parent, vgpu, definition)?).map_err(|error| {
            // The disk may be full: give back what was taken of it. The error that matters is the first one.
            let _ = fs::remove_file(temp(&path, vgpu));
            io_error("write", &path)(error)
        })
    }

    fn steps_to_save(
        &self,
        parent: &str,
        vgpu: VgpuId,
        definition: &Definition,
    ) -> Result<Vec<Step>, StoreError> {
        let path = self.folder(parent)?.join(vgpu.to_string());
        Ok(durable::replace(&path, &temp(&path, vgpu), definition.to_json().into_bytes()))
    }

    /// Reads a definition.
    pub fn load(&self, parent: &str, vgpu: VgpuId) -> Result<Definition, StoreError> {
        read_definition(&self.folder(parent)?.join(vgpu.to_string()))
    }

    /// Removes a definition. True where there was one; either way it is gone from disk when this returns.
    pub fn remove(&self, parent: &str, vgpu: VgpuId) -> Result<bool, StoreError> {
        let path = self.folder(parent)?.join(vgpu.to_string());
        match durable::run(&durable::remove(&path)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io_error("remove", &path)(error)),
        }
    }

    /// Reads the whole tree. One bad file does not hide the others.
    pub fn scan(&self) -> Result<Scan, StoreError> {
        let mut scan = Scan::default();
        for (parent, folder) in self.parents()? {
            match read_dir(&folder) {
                Ok(entries) => {
                    for entry in entries {
                        scan.add(&parent, &entry);
                    }
                }
                Err(error) => scan.problems.push(Problem { path: folder, error }),
            }
        }
        scan.set_doubles_apart(&self.dir);
        Ok(scan)
    }

    fn folder(&self, parent: &str) -> Result<PathBuf, StoreError> {
        let cannot_be = parent.is_empty() || parent == SCRIPTS;
        if cannot_be || parent.starts_with('.') || parent.contains(['/', '\0']) {
            return Err(StoreError::Parent(parent.to_owned()));
        }
        Ok(self.dir.join(parent))
    }

    /// The folders of the tree with the parents they are for, sorted. Other things beside them are not ours.
    fn parents(&self) -> Result<Vec<(String, PathBuf)>, StoreError> {
        let entries = read_dir(&self.dir)?.into_iter();
        Ok(entries
            .filter(|entry| entry.path().is_dir())
            .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
            .filter(|(parent, _)| self.folder(parent).is_ok())
            .collect())
    }
}

impl Scan {
    fn add(&mut self, parent: &str, entry: &fs::DirEntry) {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') {
            return;
        }
        let path = entry.path();
        // Only the one spelling that a save uses: two files must not be one vGPU.
        let vgpu = name.parse::<VgpuId>().ok().filter(|vgpu| vgpu.to_string() == name);
        let Some(vgpu) = vgpu else {
            let error = StoreError::Name(path.clone());
            self.problems.push(Problem { path, error });
            return;
        };
        match read_definition(&path) {
            Ok(definition) => {
                self.definitions.push(Stored { parent: parent.to_owned(), vgpu, definition });
            }
            Err(error) => self.problems.push(Problem { path, error }),
        }
    }

    /// A uuid is one vGPU, which is on one parent: the first in the order of parents.
    fn set_doubles_apart(&mut self, dir: &Path) {
        let mut seen = HashMap::new();
        let problems = &mut self.problems;
        self.definitions.retain(|stored| {
            let first = seen.entry(stored.vgpu).or_insert_with(|| stored.parent.clone());
            let path = dir.join(&stored.parent).join(stored.vgpu.to_string());
            if *first != stored.parent {
                let error = StoreError::Double { path: path.clone(), parent: first.clone() };
                problems.push(Problem { path, error });
            }
            *first == stored.parent
        });
    }
}

/// Where a definition is written before it takes its place.
fn temp(path: &Path, vgpu: VgpuId) -> PathBuf {
    path.with_file_name(format!(".{vgpu}{TEMP_SUFFIX}"))
}

fn read_dir(dir: &Path) -> Result<Vec<fs::DirEntry>, StoreError> {
    let mut entries = fs::read_dir(dir)
        .and_then(Iterator::collect::<io::Result<Vec<_>>>)
        .map_err(io_error("read", dir))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    Ok(entries)
}

fn read_definition(path: &Path) -> Result<Definition, StoreError> {
    // A name in this tree is no proof of a file: opening a pipe would never end.
    let kind = fs::metadata(path).map_err(io_error("read", path))?;
    if !kind.is_file() {
        return Err(io_error("read", path)(io::Error::other("not a file")));
    }
    let mut text = Vec::new();
    File::open(path)
        .and_then(|file| file.take(Definition::MAX_BYTES as u64 + 1).read_to_end(&mut text))
        .map_err(io_error("read", path))?;
    Definition::from_json(&text)
        .map_err(|source| StoreError::Definition { path: path.to_owned(), source })
}

#[cfg(test)]
mod power;
#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::super::tests::any_definition;
    use super::*;
    use crate::definition::{Attrs, Start};

    const A: VgpuId = VgpuId(Uuid::from_u128(0xa));
    const B: VgpuId = VgpuId(Uuid::from_u128(0xb));

    fn definition(mdev_type: &str) -> Definition {
        Definition { mdev_type: mdev_type.into(), start: Start::Auto, attrs: Attrs::default() }
    }

    fn store() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path().join("tree")).unwrap();
        (dir, store)
    }

    #[test]
    fn definitions_are_where_mdevctl_has_them() {
        let (_dir, store) = store();
        store.save("0000:3b:00.0", A, &definition("H100-16C")).unwrap();
        let path = store.dir().join("0000:3b:00.0/00000000-0000-0000-0000-00000000000a");
        assert_eq!(Definition::from_json(&fs::read(path).unwrap()).unwrap().mdev_type, "H100-16C");
        store.save("soft0", B, &definition("SOFT-1Q")).unwrap();
        let scan = store.scan().unwrap();
        let found: Vec<_> = scan.definitions.iter().map(|s| (s.parent.as_str(), s.vgpu)).collect();
        assert_eq!(found, [("0000:3b:00.0", A), ("soft0", B)]);
        assert!(store.remove("soft0", B).unwrap());
        assert!(!store.remove("soft0", B).unwrap());
        assert!(!store.remove("soft9", B).unwrap());
        assert_eq!(store.scan().unwrap().definitions.len(), 1);
    }

    #[test]
    fn one_bad_file_does_not_hide_the_others() {
        let (_dir, store) = store();
        store.save("soft0", A, &definition("SOFT-1Q")).unwrap();
        let folder = store.dir().join("soft0");
        fs::write(folder.join(B.to_string()), "{\"mdev_type\":").unwrap();
        fs::create_dir(folder.join(Uuid::from_u128(0xc).to_string())).unwrap();
        fs::write(folder.join("notes.txt"), "").unwrap();
        fs::write(store.dir().join("README"), "").unwrap();
        fs::create_dir_all(store.dir().join(".git/x")).unwrap();
        let scan = store.scan().unwrap();
        assert_eq!(scan.definitions.len(), 1);
        let lines: Vec<_> = scan.problems.iter().map(|p| p.error.to_string()).collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].contains("Not a vGPU definition"), "{lines:?}");
        assert!(lines[1].contains("not a file"), "{lines:?}");
        assert!(lines[2].contains("its name is not a uuid"), "{lines:?}");
    }

    #[test]
    fn a_uuid_is_one_vgpu_on_one_parent() {
        let (_dir, store) = store();
        store.save("soft1", A, &definition("SOFT-2Q")).unwrap();
        store.save("soft0", A, &definition("SOFT-1Q")).unwrap();
        let scan = store.scan().unwrap();
        assert_eq!(scan.definitions.len(), 1);
        assert_eq!(scan.definitions[0].parent, "soft0");
        let problem = scan.problems[0].error.to_string();
        assert!(problem.contains("parent soft0 has a vGPU of that uuid"), "{problem}");
        assert!(scan.problems[0].path.starts_with(store.dir().join("soft1")));
    }

    #[test]
    fn scripts_are_no_parents_definitions() {
        let (_dir, store) = store();
        fs::create_dir_all(store.dir().join("scripts.d/callouts")).unwrap();
        assert!(store.scan().unwrap().problems.is_empty());
    }

    #[test]
    fn a_save_killed_at_any_byte_leaves_the_old_definition() {
        let (_dir, store) = store();
        store.save("soft0", A, &definition("SOFT-1Q")).unwrap();
        let new = definition("SOFT-2Q").to_json();
        let temp = store.dir().join(format!("soft0/.{A}.tmp"));
        for written in 0..=new.len() {
            fs::write(&temp, &new.as_bytes()[..written]).unwrap();
            let store = Store::open(store.dir()).unwrap();
            assert!(!temp.exists(), "what was left is cleaned up");
            let scan = store.scan().unwrap();
            assert_eq!(scan.definitions.len(), 1);
            assert_eq!(scan.definitions[0].definition, definition("SOFT-1Q"));
            assert!(scan.problems.is_empty());
        }
        // A save over a leftover works too.
        fs::write(&temp, "left over").unwrap();
        store.save("soft0", A, &definition("SOFT-2Q")).unwrap();
        assert!(!temp.exists());
        assert_eq!(store.load("soft0", A).unwrap(), definition("SOFT-2Q"));
    }

    #[test]
    fn a_parent_cannot_lead_out_of_the_tree() {
        let (_dir, store) = store();
        for parent in ["", ".", "..", "../x", "a/b", "/etc", ".git", "a\0", "scripts.d"] {
            let saved = store.save(parent, A, &definition("SOFT-1Q"));
            assert!(matches!(saved, Err(StoreError::Parent(_))));
            assert!(matches!(store.remove(parent, A), Err(StoreError::Parent(_))));
        }
    }

    #[test]
    fn a_failed_save_says_why_and_leaves_nothing() {
        let (_dir, store) = store();
        let target = store.dir().join(format!("soft0/{A}"));
        fs::create_dir_all(target.join("x")).unwrap();
        let error = store.save("soft0", A, &definition("SOFT-1Q")).unwrap_err().to_string();
        assert!(error.starts_with(&format!("Cannot write {}: ", target.display())), "{error}");
        assert!(!store.dir().join(format!("soft0/.{A}.tmp")).exists());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn what_is_saved_is_loaded(definitions in prop::collection::vec(any_definition(), 1..4)) {
            let (_dir, store) = store();
            for definition in definitions {
                store.save("soft0", A, &definition).unwrap();
                prop_assert_eq!(store.load("soft0", A).unwrap(), definition);
            }
        }
    }
}
