//! Where viewers connect.

use std::fs::{self, Permissions};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use mdev_core::ids::VgpuId;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;
use vfio_user_server::console::rfb::handshake::{self, PASSWORD};

/// How long a viewer may take to say who it is, a person who types a password included.
const GREETING: Duration = Duration::from_secs(120);

/// VNC's ports begin here: its displays are counted from it.
const FIRST_PORT: u16 = 5900;

/// Characters of a password: those that are not mistaken for each other.
const ALPHABET: &[u8] = b"abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789";

/// Where viewers connect.
#[derive(Debug)]
pub enum Door {
    /// A socket in a folder that only this user can enter.
    Unix {
        /// It listens.
        listener: UnixListener,
        /// Where.
        path: PathBuf,
        /// Who may connect, besides root.
        owner: u32,
        /// Gone with this.
        _folder: TempDir,
    },
    /// A port of this host's own.
    Loopback {
        /// It listens.
        listener: TcpListener,
        /// Where.
        address: SocketAddr,
        /// What a viewer has to know.
        password: [u8; PASSWORD],
    },
}

impl Door {
    /// A UNIX socket.
    pub fn unix(id: VgpuId) -> io::Result<Self> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let base = runtime.filter(|folder| folder.is_dir()).unwrap_or_else(std::env::temp_dir);
        let mut folder = tempfile::Builder::new();
        folder.prefix("vgpu-view-").permissions(Permissions::from_mode(0o700));
        let folder = folder.tempdir_in(base)?;
        let owner = fs::metadata(folder.path())?.uid();
        let path = folder.path().join(format!("{}.vnc", &id.to_string()[..8]));
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        Ok(Self::Unix { listener, path, owner, _folder: folder })
    }

    /// A port on loopback: this one, or one that is free.
    pub async fn loopback(port: Option<u16>) -> io::Result<Self> {
        let (mut port, last) = port.map_or((FIRST_PORT, FIRST_PORT + 99), |port| (port, port));
        let listener = loop {
            match TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
                Err(_) if port < last => port += 1,
                Err(error) => {
                    return Err(io::Error::new(error.kind(), format!("port {port}: {error}")));
                }
                Ok(listener) => break listener,
            }
        };
        let address = listener.local_addr()?;
        Ok(Self::Loopback { listener, address, password: password()? })
    }

    /// What a viewer has to know.
    pub fn password(&self) -> Option<[u8; PASSWORD]> {
        match self {
            Self::Unix { .. } => None,
            Self::Loopback { password, .. } => Some(*password),
        }
    }

    /// Its socket's path and its address, for programs.
    pub fn names(&self) -> (Option<&Path>, Option<String>) {
        match self {
            Self::Unix { path, .. } => (Some(path), None),
            Self::Loopback { address, .. } => (None, Some(address.to_string())),
        }
    }

    /// How to connect, for people: a line for each kind of viewer.
    pub fn ways(&self) -> Vec<String> {
        match self {
            Self::Unix { path, .. } => vec![format!("vncviewer {}", path.display())],
            Self::Loopback { address, .. } => vec![
                format!("vncviewer {}::{}", address.ip(), address.port()),
                format!("remote-viewer vnc://{address}"),
            ],
        }
    }

    /// The next viewer.
    pub async fn accept(&self) -> io::Result<Caller> {
        match self {
            Self::Loopback { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok(Caller::Loopback(stream))
            }
            Self::Unix { listener, owner, .. } => {
                let (stream, _) = listener.accept().await?;
                let who = stream.peer_cred()?.uid();
                if who != *owner && who != 0 {
                    return Err(io::Error::new(
                        io::ErrorKind::PermissionDenied,
                        format!("user {who} is not the one who views"),
                    ));
                }
                Ok(Caller::Unix(stream))
            }
        }
    }
}

/// Lets a viewer in; `false`: its password was wrong.
pub async fn greet(caller: &mut Caller, password: Option<&[u8; PASSWORD]>) -> io::Result<bool> {
    let greeting = handshake::serve(caller, password);
    timeout(GREETING, greeting).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// A password of its own for each door.
fn password() -> io::Result<[u8; PASSWORD]> {
    let mut password = [0; PASSWORD];
    let mut at = 0;
    while at < PASSWORD {
        let mut byte = [0];
        getrandom::fill(&mut byte).map_err(io::Error::other)?;
        // Each character as likely as any other: bytes beyond the last whole round are drawn again.
        let rounds = 256 / ALPHABET.len() * ALPHABET.len();
        if usize::from(byte[0]) < rounds {
            password[at] = ALPHABET[usize::from(byte[0]) % ALPHABET.len()];
            at += 1;
        }
    }
    Ok(password)
}

/// A viewer's connection.
#[derive(Debug)]
pub enum Caller {
    /// On a UNIX socket.
    Unix(UnixStream),
    /// On loopback.
    Loopback(TcpStream),
}

impl AsyncRead for Caller {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Loopback(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Caller {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Loopback(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
            Self::Loopback(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Loopback(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_eight_characters_that_can_be_told_apart() {
        let (one, other) = (password().unwrap(), password().unwrap());
        assert!(one.iter().chain(&other).all(|byte| ALPHABET.contains(byte)));
        assert_ne!(one, other);
    }
}
