//! What tells a process from a later one with the same id.
//!
//! A process that has connected may end and leave its connection to a child. Another process of the
//! same user can then get the id, by starting children until one has it.

use std::os::fd::AsFd;

use nix::sys::socket::{getsockopt, sockopt};
use nix::sys::stat::fstat;
use nix::sys::statfs::{FsType, fstatfs};

use super::Source;

/// Type of the file system of pidfds, whose inodes have numbers that are used once.
const PID_FS: FsType = FsType(0x5049_4446);

/// Marks the number of a connection. Inodes have smaller ones.
const OF_CONNECTION: u64 = 1 << 63;

/// Returns a number of the process that made a connection, which no other process of its id has.
/// Where the kernel has none (before Linux 6.9, or if the process is gone), it is the connection's:
/// another connection counts as another process then.
pub fn of(socket: &impl AsFd, source: Source) -> u64 {
    of_process(socket).unwrap_or(OF_CONNECTION | u64::from(source.0))
}

fn of_process(socket: &impl AsFd) -> Option<u64> {
    let pidfd = getsockopt(socket, sockopt::PeerPidfd).ok()?;
    let is_unique = fstatfs(&pidfd).ok()?.filesystem_type() == PID_FS;
    is_unique.then_some(fstat(&pidfd).ok()?.st_ino).filter(|number| number & OF_CONNECTION == 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Command, Stdio};

    use super::*;

    const SOCKET: &str = "TESSERA_TEST_SOCKET";

    #[test]
    fn a_process_keeps_its_number_and_others_have_others() {
        if let Some(path) = std::env::var_os(SOCKET) {
            // The other process, which ends when it is told to.
            let _connection = UnixStream::connect(path).unwrap();
            std::io::stdin().read_line(&mut String::new()).unwrap();
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let _own = [(); 2].map(|()| UnixStream::connect(&path).unwrap());
        let [first, second] = [(); 2].map(|()| listener.accept().unwrap().0);
        let mut other = Command::new(std::env::current_exe().unwrap());
        other.arg("a_process_keeps_its_number").env(SOCKET, &path).stdin(Stdio::piped());
        let mut other = other.stdout(Stdio::null()).spawn().unwrap();
        let third = listener.accept().unwrap().0;
        let of_other = of_process(&third);
        drop(other.stdin.take());
        assert!(other.wait().unwrap().success());
        let number = of_process(&first);
        assert_eq!(number, of_process(&second));
        assert!(number.is_none() || number != of_other, "{number:?} {of_other:?}");
        // Without a number of the process it is that of the connection.
        assert_eq!(of(&first, Source(7)), number.unwrap_or(OF_CONNECTION | 7));
        let no_socket = std::fs::File::open(dir.path()).unwrap();
        assert_eq!(of(&no_socket, Source(7)), OF_CONNECTION | 7);
    }
}
