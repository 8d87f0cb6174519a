//! A VM without a CPU: a guest's driver on the control queue of a vGPU.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use mdev_core::abi::control::reg;
use mdev_core::abi::queue::{self, CONTROL_ENABLE, Failure, State};
use mdev_core::testing::queue_driver::{Bus, QueueDriver, SLOTS};
use mdev_core::units::MIB;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use system_tests::Vgpud;
use vfio_user::Client;

/// Guest RAM, and where the queue is in it.
pub const RAM: u64 = 64 * MIB;
const BASE: u64 = 0x10_0000;

/// Regions, and registers of configuration space.
const CONTROL: u32 = 3;
pub const CONFIG: u32 = 7;
pub const COMMAND: u64 = 4;

/// `VFIO_PCI_MSI_IRQ_INDEX`, `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`.
const MSI: u32 = 1;
const TRIGGER_BY_EVENTFD: u32 = 0x24;
/// Bit of the queue in `INTR_STATUS`.
const QUEUE: u32 = 1 << 3;

/// A VM without a CPU.
pub struct Vm {
    pub client: Client,
    pub ram: File,
    interrupt: EventFd,
    /// Times of accesses while the driver waits for a request. Without, it waits for an interrupt.
    pub accesses: Option<Vec<Duration>>,
}

impl Bus for Vm {
    fn read(&mut self, address: u64, bytes: &mut [u8]) {
        self.ram.read_exact_at(bytes, address).unwrap();
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, address).unwrap();
    }

    fn notify(&mut self) {
        self.store(reg::QUEUE_NOTIFY, 1);
    }

    fn wait(&mut self) {
        if self.accesses.is_some() {
            return self.measure();
        }
        assert!(self.interrupted(), "no interrupt, in state {:#x}", self.load(reg::QUEUE_STATUS));
    }
}

impl Vm {
    pub fn attach(vgpud: &Vgpud, uuid: &str) -> Result<Self> {
        let mut client = Client::new(&vgpud.vfio_socket(uuid))?;
        let ram = File::from(memfd_create(c"guest-ram", MFdFlags::MFD_CLOEXEC)?);
        ram.set_len(RAM)?;
        client.dma_map(0, 0, RAM, ram.as_raw_fd())?;
        client.region_write(CONFIG, COMMAND, &[6, 0])?;
        let interrupt = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?;
        client.set_irqs(MSI, TRIGGER_BY_EVENTFD, 0, 1, &[interrupt.as_raw_fd()])?;
        // One vector, enabled.
        client.region_write(CONFIG, 0x4a, &[1, 0])?;
        Ok(Self { client, ram, interrupt, accesses: None })
    }

    /// Measures a trapped access.
    pub fn measure(&mut self) {
        let begun = Instant::now();
        self.load(reg::INTR_STATUS);
        self.accesses.get_or_insert_default().push(begun.elapsed());
    }

    pub fn load(&mut self, register: u64) -> u32 {
        let mut bytes = [0; 4];
        self.client.region_read(CONTROL, register, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    pub fn store(&mut self, register: u64, value: u32) {
        self.client.region_write(CONTROL, register, &value.to_le_bytes()).unwrap();
    }

    /// Waits for an interrupt.
    pub fn interrupted(&mut self) -> bool {
        use nix::poll::{PollFd, PollFlags, poll};
        use std::os::fd::AsFd;
        let mut fds = [PollFd::new(self.interrupt.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, 20_000_u16), Ok(1)) && self.interrupt.read().is_ok()
    }

    /// Waits for the queue's state.
    pub fn reach(&mut self, state: State, failure: Option<Failure>) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let status = self.load(reg::QUEUE_STATUS);
            if status == queue::status(state, failure) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "{status:#x} instead of {state:?}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Starts the queue of a new driver.
    pub fn start(mut self) -> Result<QueueDriver<Self>> {
        self.store(reg::INTR_ENABLE, QUEUE);
        let mut driver = QueueDriver::new(self, BASE, RAM);
        let vm = &mut driver.bus;
        vm.store(reg::QUEUE_BASE_LO, BASE as u32);
        vm.store(reg::QUEUE_SLOTS, SLOTS);
        vm.store(reg::QUEUE_CONTROL, CONTROL_ENABLE);
        vm.reach(State::Running, None)?;
        ensure!(vm.interrupted(), "A change of the state does not interrupt");
        Ok(driver)
    }
}
