//! Requests and output of each command, compared with golden files in `tests/golden`.
//!
//! The server is fake: these tests cover the formats that users and scripts read. Tests with the
//! real daemon are in the workspace's `tests`.
//!
//! `UPDATE_GOLDEN=1 cargo test -p vgpuctl --test golden` regenerates the files.
//!
//! * [`cases`]: command lines
//! * [`fake_vgpud`]: the server
//! * [`responses`]: the server's responses

#![allow(clippy::unwrap_used)]

mod cases;
mod fake_vgpud;
mod responses;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use self::cases::CASES;
use self::fake_vgpud::{Requests, serve};
use self::responses::{DEFINED, NONE, ON_SCREEN, PROGRAMS, RUNNING, TRANSIENT};

/// Runs a command line and returns its output, its requests and its exit status.
fn transcript(dir: &Path, requests: &Requests, line: &str) -> String {
    let uuids = [
        ("RUNNING", RUNNING),
        ("DEFINED", DEFINED),
        ("TRANSIENT", TRANSIENT),
        ("NONE", NONE),
        ("ON_SCREEN", ON_SCREEN),
        ("PROGRAMS", PROGRAMS),
    ];
    let full = uuids.iter().fold(line.to_owned(), |line, (name, uuid)| line.replace(name, uuid));
    let output = Command::new(env!("CARGO_BIN_EXE_vgpuctl"))
        .current_dir(dir)
        .env("TESSERA_CUDA_LIBRARY", "library.so")
        .env_remove("LD_PRELOAD")
        .args(if full.contains("--socket") { &[][..] } else { &["--socket", "vgpud.sock"] })
        .args(full.split(' ').filter(|word| !word.is_empty()))
        .output()
        .unwrap();
    let mut text = format!("$ vgpuctl {full}\n{}", String::from_utf8_lossy(&output.stdout));
    // mdevctl's JSON has no newline at the end.
    if !text.ends_with('\n') {
        text.push('\n');
    }
    for line in String::from_utf8_lossy(&output.stderr).lines() {
        let _ = writeln!(text, "stderr: {line}");
    }
    for request in requests.lock().unwrap().drain(..) {
        let _ = writeln!(text, "asked: {}", request.trim_end());
    }
    let _ = writeln!(text, "exit: {}\n", output.status.code().unwrap());
    text
}

/// A program for `run`.
const PROGRAM: &str = "echo \"$TESSERA_CUDA_SOCKET ${LD_PRELOAD##*/} $*\"; exit 3";

/// Returns the path of a library that every program has, for the loader to load.
fn a_library() -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut paths = maps.lines().filter_map(|line| line.split(' ').next_back());
    paths.find(|path| path.contains("/libc.so")).unwrap().to_owned()
}

#[test]
fn requests_and_output_match_the_golden_files() {
    let dir = tempfile::tempdir().unwrap();
    let requests = Requests::default();
    serve(&dir.path().join("vgpud.sock"), Arc::clone(&requests));
    fs::write(
        dir.path().join("vgpu.json"),
        r#"{ "mdev_type": "SOFT-1Q", "start": "auto", "attrs": [{ "core": "60" }] }"#,
    )
    .unwrap();
    fs::write(dir.path().join("bad.json"), "{ \"start\": \"auto\" }").unwrap();
    fs::write(dir.path().join("program.sh"), PROGRAM).unwrap();
    fs::write(dir.path().join("cuda.sock"), "").unwrap();
    std::os::unix::fs::symlink(a_library(), dir.path().join("library.so")).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut wrong = Vec::new();
    for (name, lines) in CASES {
        let got: String =
            lines.iter().map(|line| transcript(dir.path(), &requests, line)).collect();
        let file = golden.join(format!("{name}.txt"));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&file, &got).unwrap();
        }
        let expected = fs::read_to_string(&file).unwrap_or_default();
        if got != expected {
            wrong.push(format!("{}:\nexpected\n{expected}\ngot\n{got}", file.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(fs::read(dir.path().join("screen.png")).unwrap(), b"PNG");
}
