//! Replies with descriptors that programs have not received.
//!
//! The kernel counts the descriptors that a user has sent and that are not received yet, up to the
//! limit of open files. Beyond, a worker could pass none to other programs, nor to its anchor. So a
//! program that goes on sending requests without receiving the replies is cut off, and its place is
//! free when it has closed its end of the connection, or received what is there.

use std::io;
use std::os::fd::AsFd;

use ipc::seqpacket::SeqPacket;

use super::{MAX_CONNECTIONS, Programs};

/// Limit of replies with descriptors that a connection may have unread. A program sends a request
/// after it has received the reply to the one before.
const MAX_UNREAD: u32 = 8;

/// Limit of connections of one process. A process has one.
const MAX_OF_PROCESS: usize = 16;

/// Number of replies with descriptors since all were received.
#[derive(Debug, Default)]
pub(super) struct Unread(u32);

impl Unread {
    /// Notes a reply with descriptors.
    pub(super) fn note(&mut self) {
        self.0 = self.0.saturating_add(1);
    }

    /// Checks that a program receives its replies.
    pub(super) fn check(&mut self, socket: &SeqPacket) -> io::Result<()> {
        if self.0 >= MAX_UNREAD {
            if socket.has_unread()? {
                return Err(io::Error::other("it does not receive replies"));
            }
            self.0 = 0;
        }
        Ok(())
    }
}

/// Connection of a process that was cut off, and that has not received all.
#[derive(Debug)]
pub(super) struct CutOff {
    socket: SeqPacket,
    process: i32,
}

impl CutOff {
    /// Ends a connection. Returns it if the process has not received all.
    pub(super) fn new(socket: &SeqPacket, process: i32) -> Option<Self> {
        socket.end();
        if !socket.has_unread().unwrap_or(false) {
            return None;
        }
        let socket = SeqPacket::from(socket.as_fd().try_clone_to_owned().ok()?);
        Some(Self { socket, process })
    }
}

impl Programs {
    /// Returns whether no more processes can use the vGPU, or this one cannot connect again.
    pub fn is_full(&mut self, process: i32) -> bool {
        self.cut_off.retain(|one| one.socket.has_unread().unwrap_or(false));
        let connected = self.connections.values().map(|one| one.process.pid);
        let all: Vec<_> = connected.chain(self.cut_off.iter().map(|one| one.process)).collect();
        let of_process = all.iter().filter(|pid| **pid == process).count();
        all.len() >= MAX_CONNECTIONS || of_process >= MAX_OF_PROCESS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_receives_no_replies_is_noticed() {
        let (ours, theirs) = SeqPacket::pair().unwrap();
        let mut unread = Unread::default();
        let reply = |unread: &mut Unread| {
            unread.check(&ours)?;
            ours.send(b"reply", &[ours.as_fd()])?;
            unread.note();
            io::Result::Ok(())
        };
        for _ in 0..3 * MAX_UNREAD {
            reply(&mut unread).unwrap();
            theirs.recv_with_fds(&mut [0; 8]).unwrap();
        }
        for _ in 0..MAX_UNREAD {
            reply(&mut unread).unwrap();
        }
        assert!(reply(&mut unread).is_err());
        let cut_off = CutOff::new(&ours, 7).unwrap();
        drop(ours);
        for _ in 0..MAX_UNREAD {
            assert!(cut_off.socket.has_unread().unwrap());
            assert!(theirs.recv_with_fds(&mut [0; 8]).unwrap().is_some());
        }
        assert!(theirs.recv(&mut [0; 8]).unwrap().is_none(), "the end");
        assert!(CutOff::new(&cut_off.socket, 7).is_none());
    }
}
