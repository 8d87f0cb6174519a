//! `run`: a CUDA program on a vGPU.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::errno::Errno;
use nix::unistd::{AccessFlags, access, geteuid};
use vgpud_api::Vgpu;

use super::transient::{Transient, cannot_run};
use vgpud_host::preload::{self, LIBRARY};

use crate::cli::Run;
use crate::failure::Failure;
use vgpud_client::Client;

/// Runs `run`. Does not return after the program has run.
pub async fn run(client: &Client, args: Run) -> Result<Vec<u8>, Failure> {
    let library = library()?;
    if let Some(vgpu) = args.vgpu.vgpu() {
        if !args.attrs.pairs().is_empty() {
            let message = "--name, --core and --attr are for a vGPU of this command, which needs \
                           --type; `vgpuctl modify` changes an existing vGPU";
            return Err(Failure::Usage(message.to_owned()));
        }
        let vgpu = client.vgpu(vgpu, None).await?;
        let mut command = command(&args.program, &library, &program_socket(&vgpu)?);
        let error = command.exec();
        return Err(cannot_run(&command.get_program().to_string_lossy(), &error));
    }
    let attrs = args.attrs.pairs();
    let transient = Transient { parent: args.parent, mdev_type: args.mdev_type, attrs };
    let program = args.program;
    transient
        .run(client, async |vgpu| Ok(command(&program, &library, &program_socket(vgpu)?)))
        .await
}

/// Returns the socket for programs of a running vGPU.
fn program_socket(vgpu: &Vgpu) -> Result<PathBuf, Failure> {
    let id = vgpu.uuid;
    let Some(vm_socket) = &vgpu.socket else {
        let message = format!("vGPU {id} is not running; start it: vgpuctl start -u {id}");
        return Err(Failure::NotNow(message));
    };
    let socket = Path::new(vm_socket).with_file_name("cuda.sock");
    match access(&socket, AccessFlags::W_OK) {
        Ok(()) => Ok(socket),
        Err(Errno::EACCES) => {
            let own = geteuid();
            let message = format!(
                "vGPU {id} belongs to another user; stop it, then: vgpuctl start -u {id} --owner {own}"
            );
            Err(Failure::NotNow(message))
        }
        Err(_) => {
            let message = format!(
                "vGPU {id} of type {} serves no programs: there is no {}; use a vGPU of a CUDA type",
                vgpu.mdev_type,
                socket.display()
            );
            Err(Failure::NotNow(message))
        }
    }
}

/// Returns the path of the preload library.
fn library() -> Result<PathBuf, Failure> {
    let path = match std::env::var_os("TESSERA_CUDA_LIBRARY") {
        Some(path) => {
            let path = std::path::absolute(path).map_err(Failure::start)?;
            if !path.is_file() {
                let path = path.display();
                let message = format!("There is no library {path}; correct TESSERA_CUDA_LIBRARY");
                return Err(Failure::Local(message));
            }
            path
        }
        None => preload::installed().ok_or_else(|| {
            let message = format!(
                "Cannot find {LIBRARY} beside vgpuctl, in ../lib/tessera or in /usr/lib/tessera; name \
                 its path in TESSERA_CUDA_LIBRARY"
            );
            Failure::Local(message)
        })?,
    };
    // LD_PRELOAD is a list without quoting.
    if path.as_os_str().as_encoded_bytes().iter().any(|byte| b" :".contains(byte)) {
        let path = path.display();
        let message = format!(
            "The loader cannot load {path}: the path has a space or a colon; move the library"
        );
        return Err(Failure::Local(message));
    }
    Ok(path)
}

/// Returns the command of a program with a vGPU.
fn command(program: &[OsString], library: &Path, socket: &Path) -> Command {
    let (name, args) = program
        .split_first()
        .map_or((OsStr::new(""), program), |(name, args)| (name.as_os_str(), args));
    let mut preload = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut command = Command::new(name);
    command.args(args).env("LD_PRELOAD", preload).env(preload::SOCKET_VARIABLE, socket);
    command
}
