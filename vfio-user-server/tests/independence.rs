//! The server knows nothing of vGPUs: a device of another kind can be built on it.

// Clippy knows only the functions marked as tests, not those that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::{Path, PathBuf};

/// What belongs to `vgpud`.
const ROLES: [&str; 8] =
    ["api", "manager", "worker", "main.rs", "metrics.rs", "private.rs", "spawn.rs", "lib.rs"];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if ROLES.iter().any(|role| path.file_name().unwrap() == *role) {
            continue;
        }
        if path.is_dir() { sources(&path, found) } else { found.push(path) }
    }
}

#[test]
fn nothing_of_the_server_names_a_vgpu() {
    let mut found = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    assert!(found.len() > 15, "{found:?}");
    for path in found {
        let text = fs::read_to_string(&path).unwrap();
        let uses = ["mdev_core", "vendor_backends", "vgpu", "crate::worker", "crate::private"];
        for word in uses {
            let named = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            let named: Vec<_> = named.filter(|line| line.contains(word)).collect();
            assert!(named.is_empty(), "{}: {named:?}", path.display());
        }
    }
}

#[test]
fn the_example_has_less_than_a_hundred_lines() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/scratch.rs");
    let lines = fs::read_to_string(example).unwrap().lines().count();
    assert!(lines < 100, "{lines}");
}
