//! Listening socket for VNC viewers.

use std::fs::{self, Permissions};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mdev_core::ids::VgpuId;
use rfb::handshake::{self, PASSWORD};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::time::timeout;

/// Timeout of the handshake, including typing a password.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(120);

/// TCP port of VNC display 0.
pub const FIRST_PORT: u16 = 5900;

/// Characters of passwords, without similar-looking ones.
const ALPHABET: &[u8] = b"abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789";

/// Listening socket for viewers.
#[derive(Debug)]
pub enum Listener {
    /// UNIX socket in a folder that only this user can enter.
    Unix {
        /// Listening socket.
        listener: UnixListener,
        /// Path of the socket.
        path: PathBuf,
        /// User who may connect, besides root.
        owner: u32,
        /// Folder of the socket, removed on drop.
        _folder: TempDir,
    },
    /// TCP port on loopback.
    Loopback {
        /// Listening socket.
        listener: TcpListener,
        /// Address of the socket.
        address: SocketAddr,
        /// Password for viewers.
        password: [u8; PASSWORD],
    },
}

impl Listener {
    /// Creates a UNIX socket.
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

    /// Opens a port on loopback: the given one, or a free one.
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
        Ok(Self::Loopback { listener, address, password: random_password()? })
    }

    /// Returns the password for viewers, if they need one.
    pub fn password(&self) -> Option<[u8; PASSWORD]> {
        match self {
            Self::Unix { .. } => None,
            Self::Loopback { password, .. } => Some(*password),
        }
    }

    /// Returns the socket's path or the address, for JSON output.
    pub fn names(&self) -> (Option<&Path>, Option<String>) {
        match self {
            Self::Unix { path, .. } => (Some(path), None),
            Self::Loopback { address, .. } => (None, Some(address.to_string())),
        }
    }

    /// Returns command lines of viewers that connect to this listener.
    pub fn viewer_commands(&self) -> Vec<String> {
        match self {
            Self::Unix { path, .. } => vec![format!("vncviewer {}", path.display())],
            Self::Loopback { address, .. } => vec![
                format!("vncviewer {}::{}", address.ip(), address.port()),
                format!("remote-viewer vnc://{address}"),
            ],
        }
    }

    /// Accepts the next viewer.
    pub async fn accept(&self) -> io::Result<Box<dyn ViewerStream>> {
        match self {
            Self::Loopback { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
            Self::Unix { listener, owner, .. } => {
                let (stream, _) = listener.accept().await?;
                let user = stream.peer_cred()?.uid();
                if user != *owner && user != 0 {
                    return Err(io::Error::new(
                        io::ErrorKind::PermissionDenied,
                        format!("user {user} is neither root nor the user who runs the view"),
                    ));
                }
                Ok(Box::new(stream))
            }
        }
    }
}

/// Does the server's side of the RFB handshake. Returns `false` for a wrong password.
pub async fn handshake(
    stream: &mut Box<dyn ViewerStream>,
    password: Option<&[u8; PASSWORD]>,
) -> io::Result<bool> {
    let handshake = handshake::serve(stream, password);
    timeout(HANDSHAKE_TIMEOUT, handshake)
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Returns a random password.
fn random_password() -> io::Result<[u8; PASSWORD]> {
    let mut password = [0; PASSWORD];
    let mut at = 0;
    while at < PASSWORD {
        let mut byte = [0];
        getrandom::fill(&mut byte).map_err(io::Error::other)?;
        // Rejection sampling: all characters are equally likely.
        let limit = 256 / ALPHABET.len() * ALPHABET.len();
        if usize::from(byte[0]) < limit {
            password[at] = ALPHABET[usize::from(byte[0]) % ALPHABET.len()];
            at += 1;
        }
    }
    Ok(password)
}

/// Connection of a viewer.
pub trait ViewerStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ViewerStream for T {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_random_characters_of_the_alphabet() {
        let (one, other) = (random_password().unwrap(), random_password().unwrap());
        assert!(one.iter().chain(&other).all(|byte| ALPHABET.contains(byte)));
        assert_ne!(one, other);
    }
}
