//! PCI device with three registers in BAR 0, served on a socket to one client at a time:
//!
//! ```text
//! cargo run -p vfio-user-server --example scratch -- /tmp/scratch.sock
//! qemu-system-x86_64 ... -device '{"driver": "vfio-user-pci", "socket": {"type": "unix", "path": "/tmp/scratch.sock"}}'
//! ```

use std::error::Error;
use std::os::unix::net::UnixListener;

use vfio_user_server::device::{Device, pci};
use vfio_user_server::errno::Errno;
use vfio_user_server::irq::IrqCommand;
use vfio_user_server::layout::{Layout, LayoutError};
use vfio_user_server::pci_function::PciFunction;
use vfio_user_server::pci_registers::{Bank, Bar, Identity, Row, Width::W32};
use vfio_user_server::session::Session;

const BAR_BYTES: u64 = 4096;
/// Device id in QEMU's vendor range, class "unassigned".
const IDENTITY: Identity = Identity::new(0x1b36, 0x0010, 0xff_00_00);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Reg {
    Version,
    Scratch,
    Doorbell,
}

pub(crate) struct Scratch {
    function: PciFunction,
    registers: Bank<Reg>,
}

impl Scratch {
    pub(crate) fn new() -> Result<Self, LayoutError> {
        let function = PciFunction::builder(IDENTITY)
            .bar(Bar::registers(0, "Registers", BAR_BYTES))
            .msi(1)
            .build()?;
        let rows = vec![
            Row::ro(Reg::Version, "VERSION", 0, W32, 1, "Version of this interface"),
            Row::rw(Reg::Scratch, "SCRATCH", 4, W32, 0, u32::MAX, "Stores writes"),
            Row::wo(Reg::Doorbell, "DOORBELL", 8, W32, "A write raises MSI vector 0"),
        ];
        Ok(Self { function, registers: Bank::new(BAR_BYTES, rows) })
    }
}

impl Device for Scratch {
    fn layout(&self) -> &Layout {
        self.function.layout()
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        match index {
            pci::CONFIG => self.function.config_read(offset, data),
            _ => self.registers.read(offset, data, |_, value| value),
        }
        Ok(())
    }

    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        match index {
            pci::CONFIG if self.function.config_write(offset, data).reset => self.reset()?,
            pci::CONFIG => {}
            _ => self.registers.write(offset, data, |_, register, _| {
                if register == Reg::Doorbell {
                    self.function.signal_msi(0);
                }
            }),
        }
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, command: IrqCommand<'_>) -> Result<(), Errno> {
        self.function.set_irqs(index, command)
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.function.reset();
        self.registers.reset();
        Ok(())
    }

    fn detach(&mut self) {
        self.function.detach();
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("No socket path: pass it as the argument")?;
    let listener = UnixListener::bind(&path).map_err(|e| format!("Cannot bind {path}: {e}"))?;
    let mut device = Scratch::new()?;
    loop {
        let (socket, _) = listener.accept()?;
        eprintln!("{}", Session::new(socket.into())?.serve(&mut device));
    }
}
