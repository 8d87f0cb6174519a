//! Tree of definition files: `<dir>/<parent>/<uuid>`, as in mdevctl.
//!
//! A definition is replaced atomically and is on disk when [`Store::save`] returns. Only one
//! process writes a tree. The folder [`SCRIPTS`] is not a parent's.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::{Definition, DefinitionError};
use crate::durable::{self, Step};
use crate::ids::VgpuId;

/// Folder of callout scripts in mdevctl's tree.
pub const SCRIPTS: &str = "scripts.d";

/// Suffix of unfinished files. Their names start with a dot, so that they are not UUIDs.
const TEMP_SUFFIX: &str = ".tmp";

/// Tree of definitions.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
}

/// Definition with its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Parent.
    pub parent: String,
    /// Id of the vGPU.
    pub vgpu: VgpuId,
    /// The definition.
    pub definition: Definition,
}

/// File in the tree that is not a valid definition.
#[derive(Debug)]
pub struct Problem {
    /// Path.
    pub path: PathBuf,
    /// The error.
    pub error: StoreError,
}

/// Contents of a tree.
#[derive(Debug, Default)]
pub struct Scan {
    /// Definitions, ordered by parent and UUID.
    pub definitions: Vec<Stored>,
    /// Files that could not be read. They are left unchanged.
    pub problems: Vec<Problem>,
}

/// Error of reading or writing a definition.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Error of the file system.
    #[error("Cannot {action} {}: {source}", path.display())]
    Io {
        /// Operation.
        action: &'static str,
        /// Path.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The file is not a definition.
    #[error("{}: {source}", path.display())]
    Definition {
        /// Path.
        path: PathBuf,
        /// The error.
        source: DefinitionError,
    },
    /// The name of the file is not a UUID.
    #[error("{}: not a definition: its name is not a uuid", .0.display())]
    Name(PathBuf),
    /// Two parents have the same UUID.
    #[error(
        "{}: not used: parent {parent} has a vGPU of that uuid; give one of them another", path.display()
    )]
    Double {
        /// The ignored file.
        path: PathBuf,
        /// Parent of the definition in use.
        parent: String,
    },
    /// The parent's name cannot be the name of a folder.
    #[error("{0:?} cannot be a parent's name")]
    Parent(String),
}

fn io_error<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> StoreError + 'a {
    move |source| StoreError::Io { action, path: path.to_owned(), source }
}

impl Store {
    /// Opens or creates the tree at `dir`, and removes the remains of interrupted saves.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let store = Self { dir: dir.into() };
        fs::create_dir_all(&store.dir).map_err(io_error("create", &store.dir))?;
        for (_, folder) in store.parents()? {
            // Every scan reports an unreadable folder.
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

    /// Returns the folder of the tree.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes a definition. The new definition is on disk on return; before, the old definition is.
    pub fn save(
        &self,
        parent: &str,
        vgpu: VgpuId,
        definition: &Definition,
    ) -> Result<(), StoreError> {
        let path = self.folder(parent)?.join(vgpu.to_string());
        durable::run(&self.steps_to_save(parent, vgpu, definition)?).map_err(|error| {
            // The disk may be full: free the space again. Report only the first error.
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

    /// Removes a definition. Returns true if it existed. It is gone from the disk on return.
    pub fn remove(&self, parent: &str, vgpu: VgpuId) -> Result<bool, StoreError> {
        let path = self.folder(parent)?.join(vgpu.to_string());
        match durable::run(&durable::remove(&path)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io_error("remove", &path)(error)),
        }
    }

    /// Reads the whole tree. An invalid file does not hide the others.
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
        scan.remove_duplicates(&self.dir);
        Ok(scan)
    }

    fn folder(&self, parent: &str) -> Result<PathBuf, StoreError> {
        let cannot_be = parent.is_empty() || parent == SCRIPTS;
        if cannot_be || parent.starts_with('.') || parent.contains(['/', '\0']) {
            return Err(StoreError::Parent(parent.to_owned()));
        }
        Ok(self.dir.join(parent))
    }

    /// Returns the parents and their folders, sorted. Other entries are ignored.
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
        // Accept only the spelling that a save uses, so that two files cannot be one vGPU.
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

    /// Keeps one definition per UUID: that of the first parent in their order.
    fn remove_duplicates(&mut self, dir: &Path) {
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

/// Returns the path of a definition's temporary file.
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
    // Check the file type first: opening a pipe would block.
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
mod power_loss;
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
    fn definitions_have_mdevctls_paths() {
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
    fn an_invalid_file_does_not_hide_the_others() {
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
    fn a_uuid_is_used_for_one_parent_only() {
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
    fn the_scripts_folder_is_not_a_parent() {
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
            assert!(!temp.exists(), "remains are cleaned up");
            let scan = store.scan().unwrap();
            assert_eq!(scan.definitions.len(), 1);
            assert_eq!(scan.definitions[0].definition, definition("SOFT-1Q"));
            assert!(scan.problems.is_empty());
        }
        // A save replaces remains, too.
        fs::write(&temp, "left over").unwrap();
        store.save("soft0", A, &definition("SOFT-2Q")).unwrap();
        assert!(!temp.exists());
        assert_eq!(store.load("soft0", A).unwrap(), definition("SOFT-2Q"));
    }

    #[test]
    fn a_parents_name_cannot_leave_the_tree() {
        let (_dir, store) = store();
        for parent in ["", ".", "..", "../x", "a/b", "/etc", ".git", "a\0", "scripts.d"] {
            let saved = store.save(parent, A, &definition("SOFT-1Q"));
            assert!(matches!(saved, Err(StoreError::Parent(_))));
            assert!(matches!(store.remove(parent, A), Err(StoreError::Parent(_))));
        }
    }

    #[test]
    fn a_failed_save_reports_the_cause_and_leaves_no_file() {
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
        fn saved_definitions_are_loaded(definitions in prop::collection::vec(any_definition(), 1..4)) {
            let (_dir, store) = store();
            for definition in definitions {
                store.save("soft0", A, &definition).unwrap();
                prop_assert_eq!(store.load("soft0", A).unwrap(), definition);
            }
        }
    }
}
