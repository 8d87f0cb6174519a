//! `vgpuctl run` with the real daemon and the real preload library.

use std::fs;
use std::process::{Command, Output};

use anyhow::{Context, Result};
use system_tests::vgpuctl::{path, vgpuctl};
use system_tests::{Vgpud, cuda_library};

/// Runs a program on a vGPU.
fn run(vgpud: &Vgpud, args: &[&str]) -> Result<Output> {
    let mut command = Command::new(path()?);
    command.arg("--socket").arg(vgpud.api_socket()).arg("run").args(args);
    command.env("TESSERA_CUDA_LIBRARY", cuda_library()?).env_remove("LD_PRELOAD");
    Ok(command.output()?)
}

#[test]
fn a_program_gets_the_library_and_its_vgpus_socket() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpuctl(&vgpud, "start -p soft0 -t SOFT-256MC")?;
    let socket = vgpud.vgpu_dir(&uuid).join("cuda.sock");
    if !socket.exists() {
        // A vGPU that serves no programs.
        fs::write(&socket, "")?;
    }
    let script = "echo $TESSERA_CUDA_SOCKET; cat /proc/self/maps; exit 3";
    let output = run(&vgpud, &["-u", &uuid, "--", "sh", "-c", script])?;
    let text = String::from_utf8(output.stdout)?;
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(3), &b""[..]));
    assert_eq!(text.lines().next().context("No line")?, socket.to_string_lossy());
    assert!(text.contains("/libtessera_cuda.so"), "{text}");
    Ok(())
}

#[test]
fn a_vgpu_made_for_a_program_is_gone_afterwards() -> Result<()> {
    let vgpud = Vgpud::start()?;
    // Also if the program cannot run.
    for program in ["true", "/nonexistent/program"] {
        run(&vgpud, &["-t", "SOFT-256MC", "--core", "20", "--", program])?;
        assert_eq!(vgpuctl(&vgpud, "list")?, "");
    }
    Ok(())
}
