//! What the library reads when it is loaded.

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;

use crate::sys::next;

/// Environment variable with the path of the vGPU's socket.
const VARIABLE: &CStr = c"TESSERA_CUDA_SOCKET";

/// Maximum length of the path of a UNIX socket.
const MAX_PATH: usize = 107;

/// Path of the vGPU's socket.
///
/// A copy: programs overwrite their environment, for example to set their title.
#[derive(Debug)]
struct SocketPath {
    bytes: [u8; MAX_PATH],
    len: usize,
}

static SOCKET: OnceLock<SocketPath> = OnceLock::new();

/// Returns the path of the vGPU's socket, if the program has a vGPU.
pub fn socket() -> Option<&'static [u8]> {
    SOCKET.get().and_then(|path| path.bytes.get(..path.len))
}

/// Runs when the library is loaded, before the program. Takes no memory.
extern "C" fn load() {
    next::resolve();
    if let Some(value) = variable()
        && !value.is_empty()
    {
        // A path that is too long is cut off, and cannot be connected to.
        let len = value.len().min(MAX_PATH);
        let mut bytes = [0; MAX_PATH];
        bytes[..len].copy_from_slice(&value[..len]);
        let _ = SOCKET.set(SocketPath { bytes, len });
    }
}

unsafe extern "C" {
    fn secure_getenv(name: *const c_char) -> *const c_char;
}

/// Returns the variable. A program with more rights than its user does not get it.
fn variable() -> Option<&'static [u8]> {
    // SAFETY: the name has a terminator.
    let value = unsafe { secure_getenv(VARIABLE.as_ptr()) };
    // SAFETY: getenv returns null or a string, which nothing changes before the program runs.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) }.to_bytes())
}

// The loader calls the functions in this section.
#[cfg_attr(not(test), used)]
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
#[allow(dead_code)]
static LOAD: extern "C" fn() = load;

/// Tells the user once why the program has no GPU. Programs print less: "no CUDA-capable device".
pub fn report(path: &[u8], error: Errno) {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    if REPORTED.swap(true, Ordering::Relaxed) {
        return;
    }
    let path = String::from_utf8_lossy(path);
    let remedy = match error {
        Errno::ENOENT | Errno::ECONNREFUSED => "start the vGPU: vgpuctl start -u UUID",
        Errno::EACCES => "start the vGPU for this user: vgpuctl start -u UUID --owner USER",
        Errno::EPROTO => "the library and vgpud are of different releases; update the older one",
        Errno::EBUSY => "the vGPU serves a VM; use another vGPU",
        _ => "see vgpud's log",
    };
    let line = format!("tessera-cuda: Cannot use the vGPU at {path}: {}; {remedy}\n", error.desc());
    // A program without a standard error is not told.
    let _ = nix::unistd::write(std::io::stderr(), line.as_bytes());
}
