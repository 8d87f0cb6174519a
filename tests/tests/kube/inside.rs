//! What programs in pods do. Pods start this program with one of these.

use std::fs;
use std::io::{ErrorKind, Write};
use std::os::fd::FromRawFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ipc::seqpacket::SeqPacket;
use system_tests::driver_api::{Cuda, OUT_OF_MEMORY, ok};

/// Environment variable that is set in pods.
pub const MARK: &str = "TESSERA_TEST_INSIDE";
/// Environment variable with the seconds after which [`computes`] ends; without it, never.
pub const SECONDS: &str = "TESSERA_TEST_SECONDS";
/// Variable with the path of the vGPU's socket for programs.
const SOCKET: &str = "TESSERA_CUDA_SOCKET";
/// Variable that loads the preload library.
const PRELOAD: &str = "LD_PRELOAD";
/// Bytes of a copy.
const LEN: usize = 32 << 20;

fn is_inside() -> bool {
    std::env::var_os(MARK).is_some()
}

/// Returns bytes that differ from place to place and from seed to seed.
fn pattern(len: usize, seed: u32) -> Vec<u8> {
    let mix = |index: usize| (index as u32 ^ seed).wrapping_mul(2_654_435_761).to_le_bytes()[3];
    (0..len).map(mix).collect()
}

/// Copies data to the vGPU, on it, and back, and compares.
#[test]
#[ignore = "runs in a pod only"]
fn copies() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let cuda = Cuda::with_context()?;
    println!("device {}", cuda.name()?);
    for len in [4, 4096, 65_536 + 12, 3 << 20] {
        let data = pattern(len, 1);
        let (first, second) = (cuda.alloc(len)?, cuda.alloc(len)?);
        cuda.upload(first, &data)?;
        ok("cuMemcpyDtoD", cuda.memcpy_dtod(second, first, len))?;
        ensure!(cuda.download(second, len)? == data, "{len} bytes differ");
    }
    let (_, total) = cuda.memory()?;
    println!("memory {total}");
    Ok(())
}

/// Fills and copies memory on the vGPU, checks each result, and reports rounds.
#[test]
#[ignore = "runs in a pod only"]
fn computes() -> Result<()> {
    /// Copies between checks: most of the work is the GPU's.
    const COPIES: u32 = 32;
    if !is_inside() {
        return Ok(());
    }
    let end = match std::env::var(SECONDS) {
        Ok(text) => Duration::from_secs(text.parse()?),
        Err(_) => Duration::MAX,
    };
    let cuda = Cuda::with_context()?;
    println!("device {}", cuda.name()?);
    let (first, second) = (cuda.alloc(LEN)?, cuda.alloc(LEN)?);
    let begun = Instant::now();
    let mut reported = Duration::ZERO;
    for round in 1_u32.. {
        ok("cuMemsetD32", cuda.memset_d32(first, round, LEN / 4))?;
        for _ in 0..COPIES {
            ok("cuMemcpyDtoD", cuda.memcpy_dtod(second, first, LEN))?;
        }
        let last = cuda.download(second + (LEN - 4) as u64, 4)?;
        ensure!(last == round.to_le_bytes(), "round {round}: {last:?}");
        let now = begun.elapsed();
        if now.saturating_sub(reported) > Duration::from_millis(100) {
            println!("round {round} {:.3}", now.as_secs_f64());
            std::io::stdout().flush()?;
            reported = now;
        }
        if now > end {
            break;
        }
    }
    Ok(())
}

/// Returns the UNIX sockets below a folder of the pod.
fn sockets(folder: &Path, found: &mut Vec<String>) {
    use std::os::unix::fs::FileTypeExt;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        let path = entry.path();
        let of_the_kernel = [Path::new("/proc"), Path::new("/sys")].contains(&path.as_path());
        if kind.is_socket() {
            found.push(path.to_string_lossy().into_owned());
        } else if kind.is_dir() && !of_the_kernel {
            sockets(&path, found);
        }
    }
}

/// Opens a path by a system call: the preload library cannot see it.
fn open_directly(path: &str) -> std::io::Result<()> {
    let path = std::ffi::CString::new(path)?;
    // SAFETY: the path ends with a zero byte and lives until the call returns. The new descriptor
    // has no other owner.
    let file =
        unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), libc::O_RDWR, 0) };
    if file < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor was opened above.
    drop(unsafe { std::os::fd::OwnedFd::from_raw_fd(i32::try_from(file).unwrap_or(-1)) });
    Ok(())
}

/// Opens a device node of NVIDIA's driver by system calls, as its libraries would with
/// `nvidia-modprobe`: makes it where the kernel lets the pod make it.
fn make_and_open_node() -> std::io::Result<()> {
    const NODE: &str = "/tmp/nvidiactl";
    let path = std::ffi::CString::new(NODE)?;
    let (major, minor) = (195, 255);
    // SAFETY: the path ends with a zero byte and lives until the call returns.
    let made = unsafe {
        let device = libc::makedev(major, minor);
        libc::syscall(
            libc::SYS_mknodat,
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::S_IFCHR | 0o666,
            device,
        )
    };
    if made < 0 {
        return Err(std::io::Error::last_os_error());
    }
    open_directly(NODE)
}

/// A pod that asked for nothing has no socket, no library and no device of a GPU.
#[test]
#[ignore = "runs in a pod only"]
fn sees_no_gpu() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    ensure!(std::env::var_os(SOCKET).is_none() && std::env::var_os(PRELOAD).is_none());
    let mut found = Vec::new();
    sockets(Path::new("/"), &mut found);
    ensure!(found.is_empty(), "{found:?}");
    ensure!(Cuda::with_context().is_err(), "There is a libcuda with a device");
    refuses_nodes()
}

/// Checks that no device node of NVIDIA's driver can be opened.
fn refuses_nodes() -> Result<()> {
    for node in ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"] {
        let error = open_directly(node).err().map(|error| error.kind());
        // As root, libcuda without the preload library makes the nodes. They cannot be opened.
        let refused = matches!(error, Some(ErrorKind::NotFound | ErrorKind::PermissionDenied));
        ensure!(refused, "{node}: {error:?}");
    }
    let error = make_and_open_node().err().and_then(|error| error.raw_os_error());
    ensure!(error == Some(libc::EPERM), "A device node that the pod makes: {error:?}");
    Ok(())
}

/// Starts one of these tests anew, with a changed environment, and returns whether it passed.
fn passes(program: &str, change: impl FnOnce(&mut Command) -> &mut Command) -> Result<bool> {
    let mut command = Command::new("/program");
    command.args(["--exact", &format!("inside::{program}"), "--ignored", "--nocapture"]);
    change(&mut command);
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    // What fails, and why: to be read if it should not have failed.
    print!("{text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(text.contains("1 passed"))
}

/// A program cannot reach more than its vGPU, whatever it changes.
#[test]
#[ignore = "runs in a pod only"]
fn cannot_get_around_its_vgpu() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let own = std::env::var(SOCKET)?;
    let folder = Path::new(&own).parent().unwrap_or(Path::new("/"));
    ensure!(passes("copies", |command| command)?, "The vGPU does not work");
    ensure!(!passes("copies", |command| command.env_remove(PRELOAD))?, "Without preload");
    refuses_nodes()?;
    // No other vGPU, no control socket, no container runtime.
    let mut found = Vec::new();
    sockets(Path::new("/"), &mut found);
    ensure!(found.iter().all(|path| Path::new(path).parent() == Some(folder)), "{found:?}");
    for forged in ["/run/vgpud/control.sock", "/run/tessera/other/cuda.sock", "cuda.sock"] {
        let passed = passes("copies", |command| command.env(SOCKET, forged))?;
        ensure!(!passed, "{forged} leads to a vGPU");
    }
    ensure!(fs::write(folder.join("forged"), "").is_err(), "The vGPU's folder can be written");
    ensure!(fs::remove_file(&own).is_err(), "The vGPU's socket can be removed");
    // The type's memory is all there is.
    let cuda = Cuda::with_context()?;
    let (free, total) = cuda.memory()?;
    ensure!(total <= 2 << 30, "{total} bytes on a vGPU of 2 GiB");
    let mut ptr = 0;
    ensure!(cuda.mem_alloc(&raw mut ptr, free + (64 << 20))? == OUT_OF_MEMORY);
    Ok(())
}

/// A process of another user than the vGPU's cannot use its socket.
#[test]
#[ignore = "runs in a pod only"]
fn is_refused() -> Result<()> {
    if !is_inside() {
        return Ok(());
    }
    let socket = std::env::var(SOCKET)?;
    let refused = SeqPacket::connect(Path::new(&socket)).err().map(|error| error.kind());
    ensure!(refused == Some(ErrorKind::PermissionDenied), "{socket}: {refused:?}");
    ensure!(Cuda::with_context().is_err(), "libcuda finds a device");
    Ok(())
}
