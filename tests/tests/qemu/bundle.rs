//! The bundle: unpacked into an empty folder, and run with only this machine's kernel.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::Command;

use lab::build::Profile;
use lab::bundle::{self, Options};
use lab::guest_driver::Kernels;
use lab::progress::Progress;
use lab::root::Root;
use serde_json::Value;

/// Returns whether an ELF file has a `PT_INTERP` program header, that is, needs a dynamic loader.
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
fn two_vms_share_a_gpu_with_the_bundle_alone() {
    let scratch = tempfile::tempdir().unwrap();
    let archive = scratch.path().join("tessera.tar.gz");
    let options = Options { to: archive.clone(), profile: Profile::Dev, benchmark: false };
    let bytes = bundle::write(&options, &Progress::new()).unwrap();
    assert!(bytes <= 60 << 20, "the bundle has {} MiB", bytes >> 20);
    let mut unpack = Command::new("tar");
    unpack.arg("xzf").arg(&archive).current_dir(scratch.path());
    assert!(unpack.status().unwrap().success());
    let top = scratch.path().join("tessera");
    for program in ["run", "bin/vgpud", "bin/vgpuctl"] {
        assert!(!needs_a_loader(&top.join(program)), "{program} needs libraries of the host");
    }
    // The module for CUDA in VMs, with its source and licence.
    let kernel = Root::open_own(&Progress::new()).unwrap().kernel;
    if let Ok(kernels) = Kernels::open(&Progress::new()).unwrap()
        && kernels.for_kernel(&kernel).is_ok()
    {
        for file in ["vm/tessera_guest.ko", "guest-driver/main.c", "guest-driver/LICENSE"] {
            assert!(top.join(file).is_file(), "no {file}");
        }
    }
    // The lab drops root and must be able to enter the folder.
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
