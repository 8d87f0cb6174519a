//! Who is compared: each serves one register file on a socket.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use vfio_user::{DmaMapFlags, DmaUnmapFlags, ServerBackend, ServerRegion};
use vfio_user_server::device::{Device, Region};
use vfio_user_server::errno::Errno;
use vfio_user_server::patience::Patience;
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

/// This server: one thread, one client after the other, as the other server's.
fn serve(path: &Path, patience: fn() -> Patience) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        loop {
            let (socket, _) = listener.accept().unwrap();
            let session = Session::new(socket.into()).unwrap();
            session.serve_with(&mut Register([0x5a; 4096]), patience());
        }
    });
}

/// As it is: it looks for the next message for a while.
pub fn ours(path: &Path) {
    serve(path, Patience::default);
}

/// It looks, though it is held on one CPU and could not know that there is another.
pub fn ours_patient(path: &Path) {
    serve(path, || Patience::new(true));
}

/// It never looks.
pub fn ours_asleep(path: &Path) {
    serve(path, || Patience::new(false));
}

/// The `vfio_user` crate's, which takes one client.
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

/// As many bytes both ways, and nothing between.
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

/// The same, never asleep: the floor for a client that sleeps.
pub fn echo_awake(path: &Path) {
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
