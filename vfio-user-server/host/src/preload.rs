//! The preload library, by which CUDA programs reach a vGPU.

use std::path::PathBuf;

/// File name of the library.
pub const LIBRARY: &str = "libtessera_cuda.so";
/// Environment variable with the path of a vGPU's socket for programs.
pub const SOCKET_VARIABLE: &str = "TESSERA_CUDA_SOCKET";

/// Returns the path of the installed library: beside this program, in `../lib/tessera` or in
/// `/usr/lib/tessera`.
pub fn installed() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let folder = own.parent()?;
    [folder.to_owned(), folder.parent()?.join("lib/tessera"), "/usr/lib/tessera".into()]
        .into_iter()
        .map(|folder| folder.join(LIBRARY))
        .find(|path| path.is_file())
}
