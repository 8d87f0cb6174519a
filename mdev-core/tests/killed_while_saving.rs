//! A process that is killed while it saves definitions leaves each of them whole: the old one or the new one.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use mdev_core::definition::{Attrs, Definition, Start, Store};
use mdev_core::ids::VgpuId;
use uuid::Uuid;

/// Where the process that is to be killed saves.
const TREE: &str = "KILLED_WHILE_SAVING_TREE";
const ROUNDS: u64 = 30;

fn definition(turn: usize) -> Definition {
    // Of different lengths, so that a mixture of two would be seen.
    let attrs: Attrs =
        (0..turn % 50).map(|n| (format!("attribute-{n}"), "x".repeat(turn % 90))).collect();
    let start = if turn.is_multiple_of(2) { Start::Auto } else { Start::Manual };
    Definition { mdev_type: format!("SOFT-{turn}Q"), start, attrs }
}

const ID: VgpuId = VgpuId(Uuid::from_u128(0xa));

/// Not a test of its own: what the other one starts and kills.
#[test]
fn saves_for_ever_where_it_is_told_to() {
    let Some(tree) = std::env::var_os(TREE) else { return };
    let store = Store::open(Path::new(&tree)).unwrap();
    for turn in 0.. {
        store.save("soft0", ID, &definition(turn)).unwrap();
        if turn == 0 {
            println!("saving");
        }
    }
}

#[test]
fn a_definition_is_the_old_or_the_new_one_whenever_the_process_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut saved = 0;
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "saves_for_ever_where_it_is_told_to", "--nocapture"])
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
        // Spread over some saves, at no particular point of one.
        std::thread::sleep(Duration::from_micros(round * 331));
        child.kill().unwrap();
        child.wait().unwrap();

        let scan = Store::open(dir.path()).unwrap().scan().unwrap();
        assert!(scan.problems.is_empty(), "{:?}", scan.problems);
        assert_eq!(scan.definitions.len(), 1);
        let found = &scan.definitions[0].definition;
        let turn = found.mdev_type.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
        assert_eq!(*found, definition(turn));
        saved += turn;
        let left = std::fs::read_dir(dir.path().join("soft0")).unwrap().count();
        assert_eq!(left, 1, "what was left is cleaned up");
    }
    assert!(saved > 0, "the process was killed while it saved");
}
