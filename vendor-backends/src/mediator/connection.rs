//! Requesting end of a connection to a GPU process: one reply for each request, with a timeout.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use foreign_fds::ForeignFd;
use ipc::seqpacket::{self, MAX_PACKET, SeqPacket};
use mdev_core::gpu::GpuError;
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::wire::Numbered;

/// Time limit of a reply. A worker must answer QEMU within 5 s.
const REPLY_TIMEOUT: Duration = Duration::from_secs(4);

/// A connection to a GPU process. After the loss of a reply it stays unusable, because a late reply
/// would answer the wrong request.
#[derive(Debug)]
pub struct Connection {
    socket: SeqPacket,
    buffer: Vec<u8>,
    lost: Option<String>,
    undecodable: bool,
    /// Numbers of requests, on a connection that another process can continue.
    numbers: Option<Numbers>,
}

/// Numbers of the requests of a connection.
#[derive(Clone, Copy, Debug)]
struct Numbers {
    /// Number of the last request.
    last: u64,
    /// Number of the last request whose effect is recorded: its reply is not needed again.
    recorded: u64,
}

impl Connection {
    pub fn new(socket: SeqPacket) -> io::Result<Self> {
        let timeout = TimeVal::seconds(REPLY_TIMEOUT.as_secs().cast_signed());
        setsockopt(&socket, sockopt::ReceiveTimeout, &timeout)?;
        setsockopt(&socket, sockopt::SendTimeout, &timeout)?;
        Ok(Self {
            socket,
            buffer: vec![0; MAX_PACKET],
            lost: None,
            undecodable: false,
            numbers: None,
        })
    }

    /// As [`Self::new`], with numbers. `last` is the number of the last request that counts: of
    /// later ones, the GPU process repeats its replies.
    pub fn numbered_from(socket: SeqPacket, last: u64) -> io::Result<Self> {
        Ok(Self { numbers: Some(Numbers { last, recorded: last }), ..Self::new(socket)? })
    }

    /// Returns the number of the last request, if requests are numbered.
    pub fn last_number(&self) -> Option<u64> {
        self.numbers.map(|numbers| numbers.last)
    }

    /// Notes that the effects of all requests are recorded.
    pub fn record(&mut self) {
        if let Some(numbers) = &mut self.numbers {
            numbers.recorded = numbers.last;
        }
    }

    /// Sends a request without a number of its own, on a connection with numbers.
    pub fn request_anew<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        request: &Q,
    ) -> Result<(A, Vec<ForeignFd>), GpuError> {
        let recorded = self.numbers.map_or(0, |numbers| numbers.recorded);
        self.send(&Numbered { number: Numbered::NONE, recorded, body: request }, &[])?;
        self.receive_numbered(Numbered::NONE)
    }

    fn receive_numbered<A: DeserializeOwned>(
        &mut self,
        number: u64,
    ) -> Result<(A, Vec<ForeignFd>), GpuError> {
        loop {
            let (reply, fds) = self.receive::<Numbered<A>>()?;
            // The process before this one may have left replies unread.
            if reply.number == number {
                return Ok((reply.body, fds));
            }
        }
    }

    /// Sends a request. Returns the reply and its file descriptors.
    ///
    /// # Errors
    ///
    /// [`GpuError::Lost`] only if the GPU process is gone, does not answer, or sends nonsense. A
    /// lack of resources of this process is [`GpuError::Io`]: the request was not sent, or its
    /// reply came without its descriptors ([`is_out_of_descriptors`]). The connection then stays
    /// usable.
    pub fn request<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        request: &Q,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(A, Vec<ForeignFd>), GpuError> {
        let Some(Numbers { last, recorded }) = self.numbers else {
            self.send(request, fds)?;
            return self.receive();
        };
        let number = last + 1;
        // A request that was not sent has no number.
        self.send(&Numbered { number, recorded, body: request }, fds)?;
        self.numbers = Some(Numbers { last: number, recorded });
        self.receive_numbered(number)
    }

    fn send<Q: Serialize>(&mut self, request: &Q, fds: &[BorrowedFd<'_>]) -> Result<(), GpuError> {
        if let Some(reason) = &self.lost {
            return Err(GpuError::Lost(reason.clone()));
        }
        let bytes = seqpacket::encode(request)?;
        match self.socket.send(&bytes, fds) {
            Err(error) if is_closed(&error) => Err(self.lose(&error)),
            sent => Ok(sent?),
        }
    }

    fn receive<A: DeserializeOwned>(&mut self) -> Result<(A, Vec<ForeignFd>), GpuError> {
        let received = self.socket.recv_with_fds(&mut self.buffer).and_then(|packet| {
            let packet = packet.ok_or(io::ErrorKind::BrokenPipe)?;
            Ok((seqpacket::decode(&self.buffer[..packet.len])?, packet.fds, packet.fds_lost))
        });
        match received {
            Ok((_, _, true)) => Err(io::Error::from(Errno::EMFILE).into()),
            Ok((reply, fds, false)) => Ok((reply, fds)),
            Err(error) => Err(self.lose(&error)),
        }
    }

    /// Marks the connection as unusable, and returns the error.
    fn lose(&mut self, error: &io::Error) -> GpuError {
        self.undecodable = error.kind() == io::ErrorKind::InvalidData;
        let reason = match error.kind() {
            io::ErrorKind::WouldBlock => "the GPU process does not answer".into(),
            _ if is_closed(error) => "the GPU process has ended".into(),
            _ => error.to_string(),
        };
        self.lost = Some(reason.clone());
        GpuError::Lost(reason)
    }

    /// Returns whether the connection failed because a reply could not be decoded. For a hello this
    /// means a protocol version with another encoding.
    pub fn is_undecodable(&self) -> bool {
        self.undecodable
    }

    /// Marks the connection as unusable after an unexpected reply, and returns the error.
    pub fn unexpected_reply(&mut self) -> GpuError {
        let reason = String::from("the GPU process sent an unexpected reply");
        self.lost = Some(reason.clone());
        GpuError::Lost(reason)
    }
}

/// Returns whether a send failed because the peer has closed the connection.
pub fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}

/// Returns whether a reply lost its descriptors for want of room in this process.
pub fn is_out_of_descriptors(error: &GpuError) -> bool {
    matches!(error, GpuError::Io(error) if error.raw_os_error() == Some(libc::EMFILE))
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_that_cannot_be_sent_does_not_lose_the_connection() {
        let (ours, theirs) = SeqPacket::pair().unwrap();
        let mut connection = Connection::new(ours).unwrap();
        let copy = theirs.as_fd().try_clone_to_owned().unwrap();
        let too_many = vec![copy.as_fd(); seqpacket::MAX_FDS + 1];
        let error = connection.request::<u32, u32>(&1, &too_many).unwrap_err();
        assert!(matches!(error, GpuError::Io(_)), "{error}");
        let server = std::thread::spawn(move || {
            let packet = theirs.recv(&mut [0; 64]).unwrap().unwrap();
            theirs.send(&seqpacket::encode(&7_u32).unwrap(), &[]).unwrap();
            packet.len
        });
        assert_eq!(connection.request::<u32, u32>(&1, &[]).unwrap().0, 7);
        assert_eq!(server.join().unwrap(), 1);
        drop(copy);
        let error = connection.request::<u32, u32>(&1, &[]).unwrap_err();
        assert!(error.to_string().ends_with("the GPU process has ended"), "{error}");
    }
}
