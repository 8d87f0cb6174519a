//! The program with a libcuda of the test.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::{Command, Output};

/// Compiles a libcuda into a folder.
fn compile(folder: &Path, flags: &[&str]) {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_libcuda.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]).args(flags);
    let status = compiler.arg(source).arg("-o").arg(folder.join("libcuda.so.1")).status();
    assert!(status.unwrap().success());
}

fn run(folder: &Path, args: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_vgpu-checkpoint"));
    program.env("LD_LIBRARY_PATH", folder).args(args).output().unwrap()
}

#[test]
fn each_action_is_a_call_of_libcuda() {
    let folder = tempfile::tempdir().unwrap();
    compile(folder.path(), &[]);
    for (action, timeout) in [("lock", 5000), ("checkpoint", 0), ("restore", 0), ("unlock", 0)] {
        let output = run(folder.path(), &["--action", action, "--pid", "77", "--timeout", "5000"]);
        let expected = format!("{action} 77 {timeout}\n");
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{output:?}");
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn errors_are_one_line() {
    let folder = tempfile::tempdir().unwrap();
    compile(folder.path(), &[]);
    let refused = run(folder.path(), &["--action", "lock", "--pid", "13"]);
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(told, "operation not permitted (CUDA error 800)\n");
    assert_eq!(refused.status.code(), Some(1));

    compile(folder.path(), &["-DOLD"]);
    let old = run(folder.path(), &["--action", "unlock", "--pid", "7"]);
    let told = String::from_utf8_lossy(&old.stderr).into_owned();
    assert_eq!(told, "This libcuda cannot checkpoint; it takes 570 or newer\n");
}
