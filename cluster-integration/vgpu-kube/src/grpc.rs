//! gRPC over UNIX sockets.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint};

/// Timeout of a call to kubelet.
const CALL_LIMIT: Duration = Duration::from_secs(10);

/// Listens at a path and replaces a file there. The folder is created if it is missing.
pub fn listen(path: &Path) -> io::Result<UnixListenerStream> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    Ok(UnixListenerStream::new(UnixListener::bind(path)?))
}

/// Connects to a socket.
pub async fn connect(path: &Path) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(format!("unix:{}", path.display()))?;
    endpoint.connect_timeout(CALL_LIMIT).timeout(CALL_LIMIT).connect().await
}

/// Identity of a file: a socket that is made anew at a path is another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
    /// File systems reuse inode numbers.
    changed: (i64, i64),
}

impl FileId {
    /// Returns the identity of the file at a path, if there is one.
    pub fn of(path: &Path) -> Option<Self> {
        let about = fs::metadata(path).ok()?;
        let changed = (about.ctime(), about.ctime_nsec());
        Some(Self { device: about.dev(), inode: about.ino(), changed })
    }
}

/// Listening socket that is removed when it is dropped, unless it was made anew.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    id: Option<FileId>,
}

impl SocketFile {
    /// Takes charge of the socket at a path.
    pub fn new(path: PathBuf) -> Self {
        let id = FileId::of(&path);
        Self { path, id }
    }

    /// Returns whether the socket is still at its path.
    pub fn is_there(&self) -> bool {
        self.id.is_some() && FileId::of(&self.path) == self.id
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}
