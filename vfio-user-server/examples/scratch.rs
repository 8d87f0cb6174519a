//! A PCI device with 4 KiB of scratch memory in BAR 0, served on a socket, to one client after the other:
//!
//! ```text
//! cargo run --example scratch -- /tmp/scratch.sock
//! qemu-system-x86_64 ... -device '{"driver": "vfio-user-pci", "socket": {"type": "unix", "path": "/tmp/scratch.sock"}}'
//! ```

use std::error::Error;
use std::os::unix::net::UnixListener;

use vfio_user_server::device::{Device, pci};
use vfio_user_server::errno::Errno;
use vfio_user_server::layout::{Layout, LayoutError};
use vfio_user_server::session::Session;

const BAR_SIZE: usize = 4096;
const COMMAND: usize = 0x04;
const BAR0: usize = 0x10;

struct Scratch {
    layout: Layout,
    config: [u8; 256],
    memory: [u8; BAR_SIZE],
}

impl Scratch {
    fn new() -> Result<Self, LayoutError> {
        let layout = Layout::builder()
            .trapped(pci::CONFIG, 256)
            .trapped(pci::BAR0, BAR_SIZE as u64)
            .build()?;
        Ok(Self { layout, config: Self::fresh_config(), memory: [0; BAR_SIZE] })
    }

    fn fresh_config() -> [u8; 256] {
        let mut config = [0; 256];
        config[0x00..0x04].copy_from_slice(&[0x36, 0x1b, 0x10, 0x00]); // 1b36:0010, of QEMU's range
        config[0x0b] = 0xff; // class: none that is defined
        config
    }

    fn write_config(&mut self, at: usize, value: u8) {
        match at {
            COMMAND => self.config[at] = value & 0b110, // memory space, bus master
            // The low bits of the address read as zero, which tells the size of the BAR.
            BAR0 => {}
            at if at == BAR0 + 1 => self.config[at] = value & 0xf0,
            at if at == BAR0 + 2 || at == BAR0 + 3 => self.config[at] = value,
            _ => {}
        }
    }
}

impl Device for Scratch {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        let from = if index == pci::CONFIG { &self.config[..] } else { &self.memory[..] };
        data.copy_from_slice(&from[offset as usize..][..data.len()]);
        Ok(())
    }

    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let offset = offset as usize;
        if index == pci::CONFIG {
            (offset..).zip(data).for_each(|(at, &value)| self.write_config(at, value));
        } else {
            self.memory[offset..][..data.len()].copy_from_slice(data);
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        (self.config, self.memory) = (Self::fresh_config(), [0; BAR_SIZE]);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("Say where the socket is to be, as the argument")?;
    let listener = UnixListener::bind(&path).map_err(|error| format!("{path}: {error}"))?;
    let mut device = Scratch::new()?;
    loop {
        let (socket, _) = listener.accept()?;
        let session = Session::new(socket.into())?;
        eprintln!("{}", session.serve(&mut device));
    }
}
