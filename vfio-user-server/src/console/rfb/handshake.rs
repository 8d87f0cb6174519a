//! Versions and passwords: how a viewer is let in.
//!
//! A connection that the control API has let in needs no password, nor does a UNIX socket that only its owner can open.
//! On loopback every user of the host can connect, so there a password is needed. The one that viewers know is VNC's: a
//! challenge encrypted with DES under eight characters. It is weak against who listens, whom loopback does not have, and
//! against who may guess as often as they like, which they may not: see the caller.

use std::io;

use des::Des;
use des::cipher::{Array, BlockCipherEncrypt, KeyInit};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const VERSION: &[u8; 12] = b"RFB 003.008\n";
const NONE: u8 = 1;
const VNC: u8 = 2;

/// Characters of a password: what VNC's key has room for.
pub const PASSWORD: usize = 8;

/// Lets a viewer in, with the right password where one is given. `false`: it was wrong, and the viewer knows.
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
            let what = format!("The viewer wants security of type {chosen}, which is not offered");
            return Err(invalid(what));
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
        // It is wrong whether or not the viewer waits to hear so.
        let _ = refuse(stream, minor).await;
        return Ok(false);
    }
    // Before 3.8, a viewer without a password is let in without a word.
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

/// Is let in by a server of ours that needs no password.
pub async fn join<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> io::Result<()> {
    let mut version = [0; 12];
    stream.read_exact(&mut version).await?;
    stream.write_all(VERSION).await?;
    let mut offer = [0; 2];
    stream.read_exact(&mut offer).await?;
    if version != *VERSION || offer != [1, NONE] {
        return Err(invalid("It does not serve a screen as this program knows it".into()));
    }
    stream.write_all(&[NONE]).await?;
    match stream.read_u32().await? {
        0 => Ok(()),
        _ => Err(invalid("It refuses to serve the screen".into())),
    }
}

/// The minor version that a viewer speaks: 3, 7 or 8. All others are to be taken for the first.
fn minor(version: [u8; 12]) -> io::Result<u8> {
    match &version {
        b"RFB 003.008\n" => Ok(8),
        b"RFB 003.007\n" => Ok(7),
        [b'R', b'F', b'B', b' ', .., b'\n'] => Ok(3),
        _ => Err(invalid("What has connected is no VNC viewer".into())),
    }
}

/// What the owner of a password makes of a challenge.
pub fn answer(challenge: [u8; 16], password: &[u8; PASSWORD]) -> [u8; 16] {
    // VNC's first implementation had the bits of each byte the other way round, and so have all since.
    let des = Des::new(&Array(password.map(u8::reverse_bits)));
    let mut answer = challenge;
    for half in answer.chunks_exact_mut(8) {
        if let Ok(block) = half.try_into() {
            des.encrypt_block(block);
        }
    }
    answer
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn a_challenge_is_answered_as_vnc_does() {
        // DES of a block of zeros under a key of zeros, which is the same either way round.
        let zeros = [0x8c, 0xa6, 0x4d, 0xe9, 0xc1, 0xb1, 0x23, 0xa7];
        assert_eq!(answer([0; 16], &[0; 8]), [zeros, zeros].concat()[..]);
    }

    #[test]
    fn both_ends_agree() {
        block_on(async {
            let (mut server, mut client) = tokio::io::duplex(64);
            let (served, joined) = tokio::join!(serve(&mut server, None), join(&mut client));
            assert!(served.unwrap());
            joined.unwrap();
        });
    }

    #[test]
    fn every_version_is_let_in_by_its_own_rules() {
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
                let mut said = Vec::new();
                client.read_to_end(&mut said).await.unwrap();
                assert_eq!(said, [VERSION, before, after].concat(), "{version:?}");
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
    fn who_speaks_no_rfb_is_sent_away() {
        block_on(async {
            for (said, choice, why) in [
                (b"GET / HTTP/1", 0, "What has connected is no VNC viewer"),
                (
                    b"RFB 003.008\n",
                    16,
                    "The viewer wants security of type 16, which is not offered",
                ),
            ] {
                let (mut server, mut client) = tokio::io::duplex(64);
                client.write_all(said).await.unwrap();
                client.write_all(&[choice]).await.unwrap();
                assert_eq!(serve(&mut server, None).await.unwrap_err().to_string(), why);
            }
            for (said, why) in [
                (&b"RFB 003.008\n\x01\x02\0\0\0\0"[..], "It does not serve a screen as this"),
                (b"RFB 003.008\n\x01\x01\0\0\0\x01", "It refuses to serve the screen"),
            ] {
                let (mut server, mut client) = tokio::io::duplex(64);
                server.write_all(said).await.unwrap();
                let refused = join(&mut client).await.unwrap_err().to_string();
                assert!(refused.starts_with(why), "{refused}");
            }
        });
    }
}
