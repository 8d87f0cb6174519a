//! Handshake: protocol versions and security types.
//!
//! A connection that the control API has authorized needs no password, nor does a UNIX socket that
//! only its owner can open. On loopback every user of the host can connect, so a password is
//! needed. Viewers support VNC authentication: a challenge encrypted with DES and a key of eight
//! characters. It is weak against eavesdropping, which loopback excludes, and against unlimited
//! guessing, which the caller prevents.

use std::io;

use des::Des;
use des::cipher::{Array, BlockCipherEncrypt, KeyInit};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const VERSION: &[u8; 12] = b"RFB 003.008\n";
const NONE: u8 = 1;
const VNC: u8 = 2;

/// Length of a password in characters: the size of VNC's key.
pub const PASSWORD: usize = 8;

/// Performs the server's handshake, with VNC authentication if a password is given. Returns whether
/// the viewer is authenticated; a wrong password is reported to the viewer.
pub async fn serve<S>(stream: &mut S, password: Option<&[u8; PASSWORD]>) -> io::Result<bool>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    stream.write_all(VERSION).await?;
    let mut version = [0; 12];
    stream.read_exact(&mut version).await?;
    let minor = minor(version)?;
    let kind = if password.is_some() { VNC } else { NONE };
    if minor == 3 {
        stream.write_all(&[0, 0, 0, kind]).await?;
    } else {
        stream.write_all(&[1, kind]).await?;
        let chosen = stream.read_u8().await?;
        if chosen != kind {
            let message =
                format!("The viewer wants security of type {chosen}, which is not offered");
            return Err(invalid(message));
        }
    }
    let right = match password {
        None => true,
        Some(password) => {
            let mut challenge = [0; 16];
            getrandom::fill(&mut challenge).map_err(io::Error::other)?;
            stream.write_all(&challenge).await?;
            let mut response = [0; 16];
            stream.read_exact(&mut response).await?;
            response.ct_eq(&answer(challenge, password)).into()
        }
    };
    if !right {
        // The viewer may have disconnected.
        let _ = refuse(stream, minor).await;
        return Ok(false);
    }
    // Before version 3.8, security type None has no SecurityResult.
    if password.is_some() || minor >= 8 {
        stream.write_all(&[0; 4]).await?;
    }
    stream.flush().await?;
    Ok(true)
}

async fn refuse<S: AsyncWrite + Unpin>(stream: &mut S, minor: u8) -> io::Result<()> {
    stream.write_all(&1_u32.to_be_bytes()).await?;
    if minor >= 8 {
        let reason = b"Wrong password";
        stream.write_all(&(reason.len() as u32).to_be_bytes()).await?;
        stream.write_all(reason).await?;
    }
    stream.flush().await
}

/// Performs the client's handshake with a server of this crate, without a password.
pub async fn join<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> io::Result<()> {
    let mut version = [0; 12];
    stream.read_exact(&mut version).await?;
    stream.write_all(VERSION).await?;
    let mut offer = [0; 2];
    stream.read_exact(&mut offer).await?;
    if version != *VERSION || offer != [1, NONE] {
        return Err(invalid("The server does not speak RFB 3.8 without a password".into()));
    }
    stream.write_all(&[NONE]).await?;
    match stream.read_u32().await? {
        0 => Ok(()),
        _ => Err(invalid("The server refuses to serve the screen".into())),
    }
}

/// Returns a viewer's minor version: 3, 7 or 8. Other versions count as 3 (RFC 6143, section
/// 7.1.1).
fn minor(version: [u8; 12]) -> io::Result<u8> {
    match &version {
        b"RFB 003.008\n" => Ok(8),
        b"RFB 003.007\n" => Ok(7),
        [b'R', b'F', b'B', b' ', .., b'\n'] => Ok(3),
        _ => Err(invalid("The client is not a VNC viewer".into())),
    }
}

/// Returns the response to a challenge: DES with the password as key.
pub fn answer(challenge: [u8; 16], password: &[u8; PASSWORD]) -> [u8; 16] {
    // VNC reverses the bits of each byte of the key.
    let des = Des::new(&Array(password.map(u8::reverse_bits)));
    let mut answer = challenge;
    for half in answer.chunks_exact_mut(8) {
        if let Ok(block) = half.try_into() {
            des.encrypt_block(block);
        }
    }
    answer
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn response_to_a_challenge_is_vnc_s() {
        // DES of a zero block with a zero key, which bit reversal does not change.
        let zeros = [0x8c, 0xa6, 0x4d, 0xe9, 0xc1, 0xb1, 0x23, 0xa7];
        assert_eq!(answer([0; 16], &[0; 8]), [zeros, zeros].concat()[..]);
    }

    #[test]
    fn client_and_server_agree() {
        block_on(async {
            let (mut server, mut client) = tokio::io::duplex(64);
            let (served, joined) = tokio::join!(serve(&mut server, None), join(&mut client));
            assert!(served.unwrap());
            joined.unwrap();
        });
    }

    #[test]
    fn every_version_follows_its_rules() {
        block_on(async {
            for (version, choice, before, after) in [
                (b"RFB 003.008\n", &[1][..], &[1, 1][..], &[0, 0, 0, 0][..]),
                (b"RFB 003.007\n", &[1], &[1, 1], &[]),
                (b"RFB 003.003\n", &[], &[0, 0, 0, 1], &[]),
                (b"RFB 004.001\n", &[], &[0, 0, 0, 1], &[]),
            ] {
                let (mut server, mut client) = tokio::io::duplex(64);
                client.write_all(version).await.unwrap();
                client.write_all(choice).await.unwrap();
                assert!(serve(&mut server, None).await.unwrap());
                drop(server);
                let mut sent = Vec::new();
                client.read_to_end(&mut sent).await.unwrap();
                assert_eq!(sent, [VERSION, before, after].concat(), "{version:?}");
            }
        });
    }

    #[test]
    fn a_wrong_password_is_refused() {
        block_on(async {
            for (password, right) in [(b"secret12", true), (b"secret13", false)] {
                let (mut server, mut client) = tokio::io::duplex(256);
                let viewer = async {
                    let mut hello = [0; 12];
                    client.read_exact(&mut hello).await.unwrap();
                    client.write_all(VERSION).await.unwrap();
                    let mut offer = [0; 2];
                    client.read_exact(&mut offer).await.unwrap();
                    assert_eq!(offer, [1, VNC]);
                    client.write_all(&[VNC]).await.unwrap();
                    let mut challenge = [0; 16];
                    client.read_exact(&mut challenge).await.unwrap();
                    client.write_all(&answer(challenge, password)).await.unwrap();
                    client.read_u32().await.unwrap()
                };
                let (served, result) = tokio::join!(serve(&mut server, Some(b"secret12")), viewer);
                assert_eq!((served.unwrap(), result == 0), (right, right));
            }
        });
    }

    #[test]
    fn other_protocols_are_refused() {
        block_on(async {
            for (sent, choice, reason) in [
                (b"GET / HTTP/1", 0, "The client is not a VNC viewer"),
                (
                    b"RFB 003.008\n",
                    16,
                    "The viewer wants security of type 16, which is not offered",
                ),
            ] {
                let (mut server, mut client) = tokio::io::duplex(64);
                client.write_all(sent).await.unwrap();
                client.write_all(&[choice]).await.unwrap();
                assert_eq!(serve(&mut server, None).await.unwrap_err().to_string(), reason);
            }
            for (sent, reason) in [
                (&b"RFB 003.008\n\x01\x02\0\0\0\0"[..], "The server does not speak RFB 3.8"),
                (b"RFB 003.008\n\x01\x01\0\0\0\x01", "The server refuses to serve the screen"),
            ] {
                let (mut server, mut client) = tokio::io::duplex(64);
                server.write_all(sent).await.unwrap();
                let refused = join(&mut client).await.unwrap_err().to_string();
                assert!(refused.starts_with(reason), "{refused}");
            }
        });
    }
}
