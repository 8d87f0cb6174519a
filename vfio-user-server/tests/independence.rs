//! The server knows nothing of vGPUs: a device of another kind can be built on it.

// Clippy knows only the functions marked as tests, not those that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::path::{Path, PathBuf};

/// The server's modules. All others are roles of `vgpud`.
const SERVER: [&str; 15] = [
    "device.rs",
    "dma.rs",
    "errno.rs",
    "fds.rs",
    "guide.rs",
    "irq.rs",
    "layout.rs",
    "migration.rs",
    "patience.rs",
    "proto",
    "session",
    "session.rs",
    "sys.rs",
    "transfer.rs",
    "transport.rs",
];

fn sources(path: PathBuf, found: &mut Vec<PathBuf>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            sources(entry.unwrap().path(), found);
        }
    } else {
        found.push(path);
    }
}

#[test]
fn nothing_of_the_server_names_a_vgpu() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    for name in SERVER {
        sources(folder.join(name), &mut found);
    }
    for path in found {
        let text = fs::read_to_string(&path).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            let words = ["mdev_core", "vendor_backends", "vgpu", "crate::worker", "crate::private"];
            assert!(!words.iter().any(|word| line.contains(word)), "{}: {line}", path.display());
        }
    }
}

#[test]
fn the_example_has_less_than_a_hundred_lines() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/scratch.rs");
    let lines = fs::read_to_string(example).unwrap().lines().count();
    assert!(lines < 100, "{lines}");
}
