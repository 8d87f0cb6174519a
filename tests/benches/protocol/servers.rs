//! Contenders: each serves one register file on a socket.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use vfio_user::{DmaMapFlags, DmaUnmapFlags, ServerBackend, ServerRegion};
use vfio_user_server::busy_poll::BusyPoll;
use vfio_user_server::device::{Device, Region};
use vfio_user_server::errno::Errno;
use vfio_user_server::session::Session;

use crate::client::REPLY;

pub struct Register(pub [u8; 4096]);

impl Device for Register {
    fn region(&self, index: u32) -> Option<Region<'_>> {
        (index == 0).then_some(Region::trapped(4096))
    }

    fn region_read(&mut self, _: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        data.copy_from_slice(&self.0[offset as usize..][..data.len()]);
        Ok(())
    }

    fn region_write(&mut self, _: u32, _: u64, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        Ok(())
    }
}

impl ServerBackend for Register {
    fn region_read(&mut self, _: u32, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        data.copy_from_slice(&self.0[offset as usize..][..data.len()]);
        Ok(())
    }

    fn region_write(&mut self, _: u32, _: u64, _: &[u8]) -> Result<(), Error> {
        Ok(())
    }

    fn dma_map(
        &mut self,
        _: DmaMapFlags,
        _: u64,
        _: u64,
        _: u64,
        _: Option<File>,
    ) -> Result<(), Error> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaUnmapFlags, _: u64, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn set_irqs(&mut self, _: u32, _: u32, _: u32, _: u32, _: Vec<File>) -> Result<(), Error> {
        Ok(())
    }
}

/// Serves with this server: one thread, one client after another, like the other server.
fn serve(path: &Path, busy_poll: fn() -> BusyPoll) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        loop {
            let (socket, _) = listener.accept().unwrap();
            let session = Session::new(socket.into()).unwrap();
            session.serve_with(&mut Register([0x5a; 4096]), busy_poll());
        }
    });
}

/// This server by default: it polls for a while before sleeping.
pub fn ours(path: &Path) {
    serve(path, BusyPoll::default);
}

/// This server with polling, even though it is pinned to one CPU and could not know of another.
pub fn ours_polling(path: &Path) {
    serve(path, || BusyPoll::new(true));
}

/// This server without polling.
pub fn ours_sleeping(path: &Path) {
    serve(path, || BusyPoll::new(false));
}

/// The `vfio_user` crate's server, which serves one client.
pub fn theirs(path: &Path) {
    let region = ServerRegion {
        region_info: vfio_bindings::bindings::vfio::vfio_region_info {
            argsz: 32,
            flags: 3,
            index: 0,
            size: 4096,
            ..Default::default()
        },
        sparse_areas: Vec::new(),
        mmap_fd: None,
    };
    let server = vfio_user::Server::new(path, true, Vec::new(), vec![region]).unwrap();
    thread::spawn(move || server.run(&mut Register([0x5a; 4096])));
}

/// Plain socket: as many bytes both ways.
pub fn echo(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut buffer = [0; 4096];
        while socket.read(&mut buffer).is_ok_and(|n| n > 0) {
            if socket.write_all(&buffer[..REPLY]).is_err() {
                return;
            }
        }
    });
}

/// Plain socket with polling: the minimum for a client that sleeps.
pub fn echo_polling(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut buffer = [0; 4096];
        loop {
            match socket.read(&mut buffer) {
                Ok(0) => return,
                Ok(_) if socket.write_all(&buffer[..REPLY]).is_err() => return,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::yield_now(),
                Err(_) => return,
            }
        }
    });
}
