//! Power that is lost at any moment of a change leaves the old definition or the new one.
//!
//! What a disk may hold then is computed, and laid out: of the steps that were done, those that a later wait covered are
//! on disk; of the others any selection is, in any order of names and contents, and a file's contents up to any byte.
//! (That is less than any journaling file system promises, and what POSIX does.)

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::*;
use crate::definition::{Attrs, Start};

const ID: VgpuId = VgpuId(Uuid::from_u128(0xa));
const OTHER: VgpuId = VgpuId(Uuid::from_u128(0xb));

/// Names and contents. A name leads to a file, which has a number; what is written goes to the file, not to the name.
#[derive(Clone, Debug, Default)]
struct Disk {
    names: BTreeMap<PathBuf, usize>,
    contents: BTreeMap<usize, Vec<u8>>,
}

impl Disk {
    /// Does a step, where all that it needs is there.
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

    /// Lays it out in a folder that is empty otherwise.
    fn lay_out(&self, dir: &Path) {
        for (name, file) in &self.names {
            let path = dir.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, &self.contents[file]).unwrap();
        }
    }
}

/// True where a step is waited for by a later one of those that were done.
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

/// Every disk that may be left when power is lost after the first `done` steps.
fn disks_after(before: &Disk, steps: &[Step], done: usize) -> Vec<Disk> {
    let steps = &steps[..done];
    let open: Vec<_> = (0..steps.len()).filter(|index| !is_on_disk(steps, *index)).collect();
    let mut disks = Vec::new();
    for chosen in 0..1_u32 << open.len() {
        let lost =
            |index| open.iter().position(|o| *o == index).is_some_and(|b| chosen >> b & 1 == 0);
        // Contents that were not waited for may end anywhere. A name can be there before its file's contents.
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
                    // Lost contents with a name that was kept: an empty file.
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

/// What a tree says of a vGPU after a restart. Nothing in it is a problem, and nothing is left over.
fn read(dir: &Path) -> Option<Definition> {
    let store = Store::open(dir).unwrap();
    let scan = store.scan().unwrap();
    assert!(scan.problems.is_empty(), "{:?}", scan.problems);
    let other = scan.definitions.iter().find(|stored| stored.vgpu == OTHER).unwrap();
    assert_eq!(other.definition, definition("SOFT-OTHER", 1), "its neighbour is as it was");
    let names = fs::read_dir(dir.join("soft0")).unwrap().count();
    assert_eq!(names, scan.definitions.len(), "what was left is cleaned up");
    scan.definitions.into_iter().find(|stored| stored.vgpu == ID).map(|stored| stored.definition)
}

/// Loses power at every moment of a change from one definition to another, and reads what is left.
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
            assert!(done < steps.len() || found == new, "{found:?} when the command had returned");
            seen += 1;
        }
    }
    seen
}

#[test]
fn a_definition_is_the_old_or_the_new_one_wherever_power_is_lost() {
    let (one, two) = (definition("SOFT-1Q", 2), definition("SOFT-2Q", 5));
    let seen = [
        lose_power(None, Some(&one)),
        lose_power(Some(&one), Some(&two)),
        lose_power(Some(&two), Some(&one)),
        lose_power(Some(&one), None),
    ];
    // Far fewer would mean that the steps were not torn apart.
    assert!(seen.iter().sum::<usize>() > 1000, "{seen:?}");
}

#[test]
fn the_model_finds_what_a_missing_wait_would_cost() {
    // A rename before the contents are on disk: what is there then may be half of it.
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
    // And one that nobody waited for may not be there.
    let disks = disks_after(&Disk::default(), &steps, 2);
    assert!(disks.iter().any(|disk| !disk.names.contains_key(&path)));
}
