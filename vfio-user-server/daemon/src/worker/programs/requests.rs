//! Requests of programs.
//!
//! A request stays in its socket until its reply is sent. The state with the reply is recorded
//! before. An adopting worker finds the request, and carries it out if it is not in the
//! record, or else sends the recorded reply. The program drops a reply that it has.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use cuda_socket::{FileId, Node, Reply, Request, VERSION, decode, decode_numbered, encode};
use cuda_socket::{MAX_PACKET, encode_numbered};
use foreign_fds::ForeignFd;
use ipc::seqpacket::SeqPacket;
use nix::errno::Errno;
use nix::sys::stat::fstat;
use programs::front_end::{Mapped, Opener, Outcome};
use vgpud_api::AttachedClient;

use super::{Changes, Programs, Source};
use crate::worker::doorbell;
use crate::worker::function::Function;
use crate::worker::journal::descriptors::Key;
use crate::worker::journal::{Answer, OpenFile};

/// A request, with its number and descriptors.
#[derive(Debug)]
pub(super) struct Incoming {
    /// 0 for a hello.
    number: u64,
    request: Request,
    fds: Vec<ForeignFd>,
}

/// Returns the number of a request in a packet: 0 for a hello, which has none.
pub(super) fn number_of(packet: &[u8]) -> u64 {
    packet.first_chunk().map_or(0, |number| u64::from_le_bytes(*number))
}

/// Returns the request in a packet with its number.
fn parse(packet: &[u8], greeted: bool) -> io::Result<(u64, Request)> {
    let (number, request) = if greeted {
        decode_numbered(packet).map_err(io::Error::other)?
    } else {
        (0, decode(packet).map_err(io::Error::other)?)
    };
    if matches!(request, Request::Hello { .. }) == greeted {
        return Err(io::Error::other("its first message is no hello, or there is another"));
    }
    Ok((number, request))
}

impl Programs {
    /// Returns the next request of a connection, which stays in the socket. `None` if there is
    /// none.
    pub(super) fn next_request(&self, source: Source) -> io::Result<Option<Incoming>> {
        let Some(connection) = self.connections.get(&source) else { return Ok(None) };
        let mut buffer = vec![0; MAX_PACKET];
        let packet = match connection.socket.try_peek_with_fds(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            packet => packet?.ok_or(io::ErrorKind::UnexpectedEof)?,
        };
        let fds = packet.fds;
        if !fds.is_empty() && foreign_fds::is_exhausted() {
            return Err(io::Error::other("files of programs cannot be closed"));
        }
        let (number, request) = parse(&buffer[..packet.len], connection.greeted)?;
        Ok(Some(Incoming { number, request, fds }))
    }

    /// Serves a request, if there is one.
    pub(super) fn on_request(
        &mut self,
        function: &mut Function,
        source: Source,
        changes: &mut Changes,
    ) -> io::Result<()> {
        let Some(incoming) = self.next_request(source)? else { return Ok(()) };
        if let Some(connection) = self.connections.get_mut_unnoted(&source) {
            connection.unread.check(&connection.socket)?;
        }
        // A request makes the same calls of the GPU when it is repeated: all others are recorded.
        self.on_closed_files(function, changes);
        self.front_end.update_utilization(&mut **function.inner_mut().client());
        self.record(function);
        Self::begin(function, source);
        self.serve(function, source, incoming, changes)
    }

    /// Carries out a request and sends the reply.
    pub(super) fn serve(
        &mut self,
        function: &mut Function,
        source: Source,
        incoming: Incoming,
        changes: &mut Changes,
    ) -> io::Result<()> {
        let Incoming { number, request, fds } = incoming;
        let Some(connection) = self.connections.get(&source) else { return Ok(()) };
        let AttachedClient { pid, uid } = connection.process;
        let user = Some(uid).filter(|uid| *uid != u32::MAX);
        let opener = Opener::new(pid, user).with_instance(connection.instance);
        let opens = matches!(request, Request::Open(_));
        let (reply, fds) = self.answer_request(function, request, fds, opener, changes);
        let packet = match (&reply, self.connections.get(&source)) {
            // A process of another version.
            (Reply::Failed { .. }, Some(connection)) if !connection.greeted => encode(&reply),
            _ => encode_numbered(number, &reply),
        };
        let packet = packet.map_err(io::Error::other)?;
        if matches!(reply, Reply::Welcome(_))
            && let Some(connection) = self.connections.get_mut(&source)
        {
            connection.greeted = true;
        }
        if let Some(recorder) = function.programs_recorder() {
            recorder.keep_reply(&fds);
        }
        let descriptors = fds.len();
        self.answer = Some(Answer { connection: source, number, packet, descriptors });
        self.record(function);
        self.send_answer(function, fds, opens)
    }

    /// Sends the reply to the last request, which is recorded, and removes the request. `opens`
    /// tells whether the program's end of a file's socket is attached.
    pub(super) fn send_answer(
        &mut self,
        function: &mut Function,
        fds: Vec<OwnedFd>,
        opens: bool,
    ) -> io::Result<()> {
        let Some(Answer { connection, packet, .. }) = self.answer.take() else { return Ok(()) };
        let Some(connection) = self.connections.get_mut_unnoted(&connection) else {
            return Ok(());
        };
        if !fds.is_empty() {
            connection.unread.note();
        }
        let attached: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let sent = connection.socket.try_send(&packet, &attached);
        let removed = connection.socket.discard();
        if let Some(recorder) = function.programs_recorder()
            && !fds.is_empty()
        {
            drop(fds);
            recorder.drop_reply(opens);
        }
        sent.and(removed)
    }

    fn answer_request(
        &mut self,
        function: &mut Function,
        request: Request,
        fds: Vec<ForeignFd>,
        opener: Opener,
        changes: &mut Changes,
    ) -> (Reply, Vec<OwnedFd>) {
        let failed = |errno: Errno| (Reply::Failed { errno: errno as i32 }, Vec::new());
        match request {
            Request::Hello { version: VERSION } => {
                (Reply::Welcome(self.front_end.welcome()), Vec::new())
            }
            Request::Hello { .. } => failed(Errno::EPROTO),
            Request::Open(node) => match self.open(function, opener, node, changes) {
                Ok((file, fd)) => (Reply::Opened(file), vec![fd]),
                Err(error) => failed(error),
            },
            Request::Identify => match self.identify(fds.into_iter().next()) {
                Some((file, node)) => (Reply::Identified { file, node }, Vec::new()),
                None => failed(Errno::ENOTTY),
            },
            Request::Ioctl(request) => {
                let mut client = function.inner_mut().client();
                let shared = fds.into_iter().next().and_then(ForeignFd::into_memory);
                match self.front_end.ioctl(&mut **client, &request, shared) {
                    Outcome::Fetch(fetch) => (Reply::Fetch(fetch), Vec::new()),
                    Outcome::Done(done, fds) => (Reply::Done(done), fds),
                }
            }
            Request::Map(request) => match self.front_end.map(&request) {
                Ok(Mapped::File(fd, offset)) => (Reply::Mapped { offset }, vec![fd]),
                Ok(Mapped::Doorbell) => {
                    match doorbell::page(&mut **function.inner_mut().client()) {
                        Ok((fd, offset)) => (Reply::Mapped { offset }, vec![fd]),
                        Err(_) => failed(Errno::EIO),
                    }
                }
                // Pages of a VM are for a VM's programs.
                Ok(Mapped::Guest(_)) => failed(Errno::EIO),
                Err(error) => failed(error),
            },
        }
    }

    /// Returns the file whose program's end is `fd`.
    fn identify(&self, fd: Option<ForeignFd>) -> Option<(FileId, Node)> {
        let fd = fd?;
        let stat = fstat(fd.as_unix_socket()?).ok()?;
        let asked = (stat.st_dev, stat.st_ino);
        let (file, _) = self.files.values().find(|(file, _)| file.inode == asked)?;
        Some((file.id, self.front_end.node(file.id)?))
    }

    fn open(
        &mut self,
        function: &mut Function,
        opener: Opener,
        node: Node,
        changes: &mut Changes,
    ) -> Result<(FileId, OwnedFd), Errno> {
        let (ours, theirs) = SeqPacket::pair_without_fds().map_err(|_| Errno::EMFILE)?;
        let mut id = [0; 8];
        getrandom::fill(&mut id).map_err(|_| Errno::EIO)?;
        let id = FileId(u64::from_ne_bytes(id));
        let stat = fstat(theirs.as_fd()).map_err(|_| Errno::EIO)?;
        self.front_end.open(id, node, opener)?;
        let source = self.next_source();
        if let Some(recorder) = function.programs_recorder() {
            recorder.keep(Key::file(source.0), ours.as_fd());
        }
        let file = OpenFile { id, inode: (stat.st_dev, stat.st_ino) };
        self.files.insert(source, (file, ours));
        changes.watch.push(source);
        Ok((id, theirs.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_comes_first_and_once() {
        let hello = encode(&Request::Hello { version: VERSION }).unwrap();
        let numbered = encode_numbered(7, &Request::Identify).unwrap();
        assert_eq!(parse(&hello, false).unwrap().0, 0);
        assert_eq!(parse(&numbered, true).unwrap(), (7, Request::Identify));
        let second = encode_numbered(8, &Request::Hello { version: VERSION }).unwrap();
        for (packet, greeted) in [(&hello, true), (&numbered, false), (&second, true)] {
            assert!(parse(packet, greeted).is_err(), "{packet:?}");
        }
        assert_eq!((number_of(&hello), number_of(&numbered)), (0, 7));
    }
}
