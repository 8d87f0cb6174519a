//! A process killed while it saves definitions leaves the old or the new version of each.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use mdev_core::definition::{Attrs, Definition, Start, Store};
use mdev_core::ids::VgpuId;
use uuid::Uuid;

/// Environment variable with the tree of the process that is killed.
const TREE: &str = "KILLED_WHILE_SAVING_TREE";
const ROUNDS: u64 = 30;

fn definition(generation: usize) -> Definition {
    // Different lengths, so that a mixture of two versions is detected.
    let attrs: Attrs = (0..generation % 50)
        .map(|n| (format!("attribute-{n}"), "x".repeat(generation % 90)))
        .collect();
    let start = if generation.is_multiple_of(2) { Start::Auto } else { Start::Manual };
    Definition { mdev_type: format!("SOFT-{generation}Q"), start, attrs }
}

const ID: VgpuId = VgpuId(Uuid::from_u128(0xa));

/// Saves definitions until killed. Does nothing unless started by the test below.
#[test]
fn saves_definitions_until_killed() {
    let Some(tree) = std::env::var_os(TREE) else { return };
    let store = Store::open(Path::new(&tree)).unwrap();
    for generation in 0.. {
        store.save("soft0", ID, &definition(generation)).unwrap();
        if generation == 0 {
            println!("saving");
        }
    }
}

#[test]
fn a_kill_at_any_time_leaves_the_old_or_the_new_definition() {
    let dir = tempfile::tempdir().unwrap();
    let mut saved = 0;
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "saves_definitions_until_killed", "--nocapture"])
            .env(TREE, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = Vec::new();
        let stdout = child.stdout.as_mut().unwrap();
        while !said.ends_with(b"saving\n") {
            let mut byte = [0];
            stdout.read_exact(&mut byte).unwrap();
            said.extend(byte);
        }
        // Kill times are spread over the duration of a save.
        std::thread::sleep(Duration::from_micros(round * 331));
        child.kill().unwrap();
        child.wait().unwrap();

        let scan = Store::open(dir.path()).unwrap().scan().unwrap();
        assert!(scan.problems.is_empty(), "{:?}", scan.problems);
        assert_eq!(scan.definitions.len(), 1);
        let found = &scan.definitions[0].definition;
        let generation =
            found.mdev_type.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
        assert_eq!(*found, definition(generation));
        saved += generation;
        let left = std::fs::read_dir(dir.path().join("soft0")).unwrap().count();
        assert_eq!(left, 1, "remains are cleaned up");
    }
    assert!(saved > 0, "the process was killed after its first save");
}
