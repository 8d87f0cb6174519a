//! Tests of a power loss at any moment of a change: the old or the new definition remains.
//!
//! The tests compute every possible state of the disk and write it to a folder. Steps before a
//! later sync are on disk. Any subset of the other steps is on disk, in any order of names and
//! contents, and a file's contents end at any byte. (Every journaling file system guarantees more;
//! POSIX guarantees no more.)

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::*;
use crate::definition::{Attrs, Start};

const ID: VgpuId = VgpuId(Uuid::from_u128(0xa));
const OTHER: VgpuId = VgpuId(Uuid::from_u128(0xb));

/// Names and contents of a disk. A name refers to a file by number; contents are written to the
/// file.
#[derive(Clone, Debug, Default)]
struct Disk {
    names: BTreeMap<PathBuf, usize>,
    contents: BTreeMap<usize, Vec<u8>>,
}

impl Disk {
    /// Executes a step if its preconditions hold.
    fn apply(&mut self, step: &Step, file: usize, bytes: usize) {
        match step {
            Step::Write(path, text) => {
                self.names.insert(path.clone(), file);
                self.contents.insert(file, text[..bytes].to_vec());
            }
            Step::Rename(from, to) => {
                if let Some(number) = self.names.remove(from) {
                    self.names.insert(to.clone(), number);
                }
            }
            Step::Remove(path) => drop(self.names.remove(path)),
            Step::MakeFolder(_) | Step::SyncFile(_) | Step::SyncFolder(_) => {}
        }
    }

    /// Writes the disk's contents to an empty folder.
    fn lay_out(&self, dir: &Path) {
        for (name, file) in &self.names {
            let path = dir.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, &self.contents[file]).unwrap();
        }
    }
}

/// Returns true if a later executed step syncs this step.
fn is_on_disk(steps: &[Step], index: usize) -> bool {
    let in_folder = |path: &Path, folder: &Path| path.parent() == Some(folder);
    steps[index + 1..].iter().any(|later| match (&steps[index], later) {
        (Step::Write(path, _), Step::SyncFile(synced)) => path == synced,
        (Step::Rename(_, path) | Step::Remove(path), Step::SyncFolder(folder)) => {
            in_folder(path, folder)
        }
        (Step::MakeFolder(path), Step::SyncFolder(folder)) => in_folder(path, folder),
        _ => false,
    })
}

/// Returns every state of the disk after a power loss following the first `done` steps.
fn disks_after(before: &Disk, steps: &[Step], done: usize) -> Vec<Disk> {
    let steps = &steps[..done];
    let open: Vec<_> = (0..steps.len()).filter(|index| !is_on_disk(steps, *index)).collect();
    let mut disks = Vec::new();
    for chosen in 0..1_u32 << open.len() {
        let lost =
            |index| open.iter().position(|o| *o == index).is_some_and(|b| chosen >> b & 1 == 0);
        // Unsynced contents can end anywhere. A name can exist before its file's contents.
        let torn = steps.iter().enumerate().find_map(|(index, step)| match step {
            Step::Write(_, text) if open.contains(&index) => Some(text.len()),
            _ => None,
        });
        for bytes in 0..=torn.unwrap_or(0) {
            let mut disk = before.clone();
            for (index, step) in steps.iter().enumerate() {
                let is_write = matches!(step, Step::Write(..));
                let length = match step {
                    Step::Write(_, text) if torn.is_none() => text.len(),
                    // The name without its contents is an empty file.
                    Step::Write(..) if lost(index) => 0,
                    Step::Write(..) => bytes,
                    _ => 0,
                };
                if is_write || !lost(index) {
                    disk.apply(step, 1000 + index, length);
                }
            }
            disks.push(disk);
        }
    }
    disks
}

fn definition(mdev_type: &str, attrs: usize) -> Definition {
    let attrs: Attrs = (0..attrs).map(|n| (format!("attribute-{n}"), "x".repeat(n))).collect();
    Definition { mdev_type: mdev_type.into(), start: Start::Auto, attrs }
}

/// Returns the definition of a vGPU after a restart, and checks that no problems and no temporary
/// files remain.
fn read(dir: &Path) -> Option<Definition> {
    let store = Store::open(dir).unwrap();
    let scan = store.scan().unwrap();
    assert!(scan.problems.is_empty(), "{:?}", scan.problems);
    let other = scan.definitions.iter().find(|stored| stored.vgpu == OTHER).unwrap();
    assert_eq!(other.definition, definition("SOFT-OTHER", 1), "the other definition is unchanged");
    let names = fs::read_dir(dir.join("soft0")).unwrap().count();
    assert_eq!(names, scan.definitions.len(), "remains are cleaned up");
    scan.definitions.into_iter().find(|stored| stored.vgpu == ID).map(|stored| stored.definition)
}

/// Simulates a power loss at every moment of a change, and checks the definition after it.
fn lose_power(old: Option<&Definition>, new: Option<&Definition>) -> usize {
    let base = tempfile::tempdir().unwrap();
    let store = Store::open(base.path()).unwrap();
    store.save("soft0", OTHER, &definition("SOFT-OTHER", 1)).unwrap();
    let relative = |path: &Path| path.strip_prefix(base.path()).unwrap_or(path).to_owned();
    let folder = base.path().join("soft0");
    let steps = match new {
        Some(new) => store.steps_to_save("soft0", ID, new).unwrap(),
        None => durable::remove(&folder.join(ID.to_string())),
    };
    let steps: Vec<_> = steps
        .iter()
        .map(|step| match step {
            Step::MakeFolder(path) => Step::MakeFolder(relative(path)),
            Step::Write(path, text) => Step::Write(relative(path), text.clone()),
            Step::SyncFile(path) => Step::SyncFile(relative(path)),
            Step::Rename(from, to) => Step::Rename(relative(from), relative(to)),
            Step::Remove(path) => Step::Remove(relative(path)),
            Step::SyncFolder(path) => Step::SyncFolder(relative(path)),
        })
        .collect();
    let mut before = Disk::default();
    let mut there = |vgpu: VgpuId, definition: &Definition, file| {
        before.names.insert(Path::new("soft0").join(vgpu.to_string()), file);
        before.contents.insert(file, definition.to_json().into_bytes());
    };
    there(OTHER, &definition("SOFT-OTHER", 1), 1);
    if let Some(old) = old {
        there(ID, old, 2);
    }
    let mut seen = 0;
    for done in 0..=steps.len() {
        for disk in disks_after(&before, &steps, done) {
            let dir = tempfile::tempdir().unwrap();
            disk.lay_out(dir.path());
            let found = read(dir.path());
            let found = found.as_ref();
            assert!(found == old || found == new, "after {done} of {steps:?}: {found:?}, {disk:?}");
            assert!(done < steps.len() || found == new, "{found:?} after the change returned");
            seen += 1;
        }
    }
    seen
}

#[test]
fn a_power_loss_leaves_the_old_or_the_new_definition() {
    let (one, two) = (definition("SOFT-1Q", 2), definition("SOFT-2Q", 5));
    let seen = [
        lose_power(None, Some(&one)),
        lose_power(Some(&one), Some(&two)),
        lose_power(Some(&two), Some(&one)),
        lose_power(Some(&one), None),
    ];
    // A much smaller number would mean that the steps were not separated.
    assert!(seen.iter().sum::<usize>() > 1000, "{seen:?}");
}

#[test]
fn the_model_detects_a_missing_sync() {
    // A rename without a sync of the contents can leave half of the contents.
    let (path, temp) = (PathBuf::from("soft0/x"), PathBuf::from("soft0/.x.tmp"));
    let steps = [
        Step::Write(temp.clone(), b"12".to_vec()),
        Step::Rename(temp, path.clone()),
        Step::SyncFolder("soft0".into()),
    ];
    let disks = disks_after(&Disk::default(), &steps, steps.len());
    let contents: Vec<_> = disks.iter().map(|disk| &disk.contents[&disk.names[&path]]).collect();
    assert!(contents.iter().any(|text| text.as_slice() == b"1"), "{contents:?}");
    assert!(contents.iter().any(|text| text.is_empty()) && contents.iter().any(|t| t.len() == 2));
    // A rename without a sync of the folder can be lost.
    let disks = disks_after(&Disk::default(), &steps, 2);
    assert!(disks.iter().any(|disk| !disk.names.contains_key(&path)));
}
