//! A client of a device, over a socket pair.

use std::io::{IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use vfio_user_server::device::{Device, pci};
use vfio_user_server::irq::IrqAction;
use vfio_user_server::proto::header::Header;
use vfio_user_server::proto::message::{Access, IrqData, Request, SetIrqs};
use vfio_user_server::session::Session;
use zerocopy::{FromBytes, IntoBytes};

/// A client and the session that serves it.
pub struct Connection<D> {
    pub client: UnixStream,
    pub session: Session,
    pub device: D,
}

impl<D: Device> Connection<D> {
    /// Returns a connection after VERSION.
    pub fn new(device: D) -> Self {
        let (client, server) = UnixStream::pair().unwrap();
        let session = Session::new(server.into()).unwrap();
        let mut connection = Self { client, session, device };
        connection.request(&Request::Version { major: 0, minor: 0, data: b"{}\0" }, &[]);
        connection
    }

    /// Sends a request with descriptors and returns the payload of the reply.
    pub fn request(&mut self, request: &Request<'_>, fds: &[RawFd]) -> Vec<u8> {
        let mut payload = Vec::new();
        request.encode(&mut payload);
        let header = Header::request(7, request.command(), payload.len());
        let bytes = [header.as_bytes(), &payload].concat();
        let rights = [ControlMessage::ScmRights(fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let iov = [IoSlice::new(&bytes)];
        let socket = self.client.as_raw_fd();
        let sent = sendmsg::<()>(socket, &iov, control, MsgFlags::empty(), None);
        assert_eq!(sent, Ok(bytes.len()));
        self.session.on_ready(&mut self.device).unwrap();

        let mut reply = [0; Header::SIZE];
        self.client.read_exact(&mut reply).unwrap();
        let reply = Header::read_from_bytes(&reply).unwrap();
        assert_eq!((reply.id, reply.command, reply.failure()), (header.id, header.command, None));
        let mut payload = vec![0; reply.size as usize - Header::SIZE];
        self.client.read_exact(&mut payload).unwrap();
        payload
    }

    pub fn read(&mut self, region: u32, offset: u64) -> u32 {
        let reply = self.request(&Request::RegionRead(Access { region, offset, count: 4 }), &[]);
        u32::from_le_bytes(reply[16..].try_into().unwrap())
    }

    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let access = Access { region, offset, count: data.len() as u32 };
        self.request(&Request::RegionWrite(access, data), &[]);
    }

    /// Assigns an eventfd to MSI vector 0, or disables MSI.
    pub fn set_msi(&mut self, event: Option<&EventFd>) {
        let data = if event.is_some() { IrqData::EventFd } else { IrqData::None };
        let count = u32::from(event.is_some());
        let set = SetIrqs { index: pci::MSI, start: 0, count, action: IrqAction::Trigger, data };
        let fds: Vec<RawFd> = event.iter().map(|event| event.as_fd().as_raw_fd()).collect();
        self.request(&Request::SetIrqs(set), &fds);
    }
}

/// Returns an eventfd that does not block.
pub fn event() -> EventFd {
    EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap()
}
