//! The bundle: unpacked into an empty folder, and run with nothing of this machine but its kernel.
//!
//! It boots VMs, so it is `cargo lab test`'s and `cargo test --test bundle -- --ignored`'s.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::Command;

use lab::build::Profile;
use lab::bundle::{self, Options};
use lab::progress::Progress;
use serde_json::Value;

/// Whether a program asks for a dynamic loader: `PT_INTERP` among the program headers of an ELF file.
fn needs_a_loader(program: &Path) -> bool {
    const PT_INTERP: u32 = 3;
    let bytes = fs::read(program).unwrap();
    assert_eq!(&bytes[..4], b"\x7fELF", "{}", program.display());
    let half = |at: usize| usize::from(u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()));
    let first = u64::from_le_bytes(bytes[32..40].try_into().unwrap()) as usize;
    let (size, count) = (half(54), half(56));
    (0..count)
        .map(|index| first + index * size)
        .any(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) == PT_INTERP)
}

#[test]
#[ignore = "boots VMs: cargo lab test runs it"]
fn two_vms_share_a_gpu_with_nothing_but_the_bundle() {
    let scratch = tempfile::tempdir().unwrap();
    let archive = scratch.path().join("tessera.tar.gz");
    let options = Options { to: archive.clone(), profile: Profile::Dev, benchmark: false };
    let bytes = bundle::write(&options, &Progress::new()).unwrap();
    assert!(bytes <= 60 << 20, "{} MiB are more than promised", bytes >> 20);
    let mut unpack = Command::new("tar");
    unpack.arg("xzf").arg(&archive).current_dir(scratch.path());
    assert!(unpack.status().unwrap().success());
    let top = scratch.path().join("tessera");
    for program in ["run", "bin/vgpud", "bin/vgpuctl"] {
        assert!(!needs_a_loader(&top.join(program)), "{program} needs libraries of the host");
    }
    // Who is no longer root has to get in.
    fs::set_permissions(scratch.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();

    let mut demo = Command::new(top.join("run"));
    demo.args(["demo", "--parent", "soft", "--seconds", "2"]);
    demo.args(["--out", "out", "--json", "out/facts.json"]);
    let output = demo.env_clear().current_dir(scratch.path()).output().unwrap();
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("doorbells without an exit") && stdout.contains("All of it held."));
    let facts = fs::read(scratch.path().join("out/facts.json")).unwrap();
    let facts: Value = serde_json::from_slice(&facts).unwrap();
    let vms = facts["vms"].as_array().unwrap();
    assert_eq!(vms.len(), 2);
    for vm in vms {
        assert_eq!(vm["jobs_verified"], 5);
        assert!(vm["units_verified"].as_u64().unwrap() > 0);
    }
}
