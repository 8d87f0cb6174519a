//! Habits that CONTRIBUTING.md asks of all sources, and that neither rustfmt nor clippy checks.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of lines of a file.
const MAX_LINES: usize = 500;

/// Maximum width of a comment in columns, as `max_width` in rustfmt.toml for code.
const MAX_WIDTH: usize = 100;

/// Returns the Rust sources below a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                sources(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns whether a comment cannot be wrapped: a table, a link, or one long word.
fn is_one_piece(comment: &str) -> bool {
    let text = comment.trim_start_matches(['/', '!', ' ']);
    text.starts_with(['|', '[']) || text.split(' ').count() <= 2 || text.contains("──")
}

#[test]
fn files_are_short_and_comments_narrow() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let mut all = Vec::new();
    sources(root, &mut all);
    assert!(all.len() > 500, "{} sources below {}", all.len(), root.display());
    let mut faults = Vec::new();
    for path in all {
        let name = path.strip_prefix(root).unwrap().display();
        let text = fs::read_to_string(&path).unwrap();
        let lines = text.lines().count();
        if lines > MAX_LINES {
            faults.push(format!("{name} has {lines} lines"));
        }
        let mut is_example = false;
        for (index, line) in text.lines().enumerate() {
            is_example ^= line.trim_start().trim_start_matches(['/', '!', ' ']).starts_with("```");
            let width = line.chars().count();
            let is_comment = line.trim_start().starts_with("//");
            if is_comment && !is_example && width > MAX_WIDTH && !is_one_piece(line.trim_start()) {
                faults.push(format!("{name}:{} is {width} columns wide", index + 1));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Returns the code of a file without its tests, which are at its end.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    text.split("#[cfg(test)]\nmod ").next().unwrap_or_default().to_owned()
}

#[test]
fn files_of_others_are_read_with_a_limit_and_quoted_in_one_line() {
    // Programs of developers, and code that runs in the process whose files it reads.
    const OWN: [&str; 4] = ["tests", "fuzz", "qemu-integration/lab", "qemu-integration/cuda"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let mut all = Vec::new();
    sources(root, &mut all);
    let mut faults = Vec::new();
    for path in all {
        let name = path.strip_prefix(root).unwrap();
        let is_test = name.ends_with("tests.rs")
            || name.iter().any(|part| part == "tests" || part == "benches");
        if is_test || OWN.iter().any(|folder| name.starts_with(folder)) {
            continue;
        }
        let code = code(&path);
        if code.contains("fs::read(") || code.contains("fs::read_to_string(") {
            faults.push(format!("{}: read files by mdev_core::untrusted", name.display()));
        }
        if code.lines().any(|line| line.contains("one_line(") && line.contains("usize::MAX")) {
            faults.push(format!("{}: quote by untrusted::message", name.display()));
        }
        let is_printer = name.ends_with("vgpuctl/src/failure.rs");
        if name.starts_with("qemu-integration/vgpuctl") && !is_printer && code.contains("eprintln!")
        {
            faults.push(format!("{}: print messages by failure::say", name.display()));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn descriptors_of_others_are_received_and_closed_by_one_crate() {
    // The receiving call itself, a peek that takes no descriptors, and the one kind of connection
    // of the manager's runtime.
    const RECEIVERS: [&str; 2] = ["mdev-core/foreign-fds", "vfio-user-server/protocol/src/session"];
    const STREAM: &str = "vfio-user-server/daemon/src/foreign_stream.rs";
    const SERVERS: [&str; 3] = ["mdev-core", "vendor-backends", "vfio-user-server"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let (mut all, mut faults) = (Vec::new(), Vec::new());
    for folder in SERVERS {
        sources(&root.join(folder), &mut all);
    }
    for path in all {
        let name = path.strip_prefix(root).unwrap();
        let is_test = name.ends_with("tests.rs")
            || name
                .iter()
                .any(|part| ["tests", "benches", "examples"].iter().any(|it| part == *it));
        if is_test || RECEIVERS.iter().any(|of| name.starts_with(of)) {
            continue;
        }
        let code = code(&path);
        let is_code = |line: &&str| !line.trim_start().starts_with("//") && !line.contains("fn ");
        let code: String = code.lines().filter(is_code).collect();
        let calls = ["recvmsg(", "recvmsg::", "ControlMessageOwned", " recv(", "::recv("];
        for call in calls.iter().filter(|call| code.contains(**call)) {
            faults.push(format!("{}: {call}: receive by foreign_fds", name.display()));
        }
        let is_daemon = name.starts_with("vfio-user-server/daemon") && !name.ends_with(STREAM);
        if is_daemon && code.contains("UnixStream") {
            faults.push(format!("{}: connect by ForeignStream", name.display()));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
