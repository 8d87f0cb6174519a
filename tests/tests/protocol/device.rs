//! A device that supports every feature, and a server for it in this process.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use foreign_fds::ForeignFd;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vfio_user_server::device::{Area, Device, IoEventFd, Mapping, Region, pci};
use vfio_user_server::dma::{DmaMap, DmaUnmap};
use vfio_user_server::errno::Errno;
use vfio_user_server::irq::{Irq, IrqAction, IrqCommand};
use vfio_user_server::migration::{DirtyPages, DmaLogging, DmaRange, Migration, MigrationState};
use vfio_user_server::proto::message::{Feature, FeatureAccess};
use vfio_user_server::session::{Closed, Session};
use vfio_user_server::transfer::{Transfer, TransferKind, Transfers};

pub const SCRATCH: u32 = pci::BAR0;
pub const SHARED: u32 = 2;
pub const SPARSE: u32 = 4;
pub const READ_ONLY: u32 = pci::ROM;
pub const MSI_COUNT: u32 = 32;
pub const SPARSE_OFFSET: u64 = 0x1_0000;
/// Index of the device's feature: four readable and writable bytes.
pub const FEATURE_INDEX: u16 = 77;
/// Offset in [`SCRATCH`]: a write of address, count and direction (8, 4 and 4 bytes; 1 writes)
/// makes the device transfer memory.
pub const TRANSFER: u64 = 0x800;
/// Offset in [`SCRATCH`]: number of transfers, errno of the last one or 0, then the data read from
/// 8 bytes on.
pub const TRANSFER_DONE: u64 = 0x900;

/// Creates a memfd of this length.
pub fn memory(len: u64) -> OwnedFd {
    let fd = memfd_create(c"protocol-test", MFdFlags::MFD_CLOEXEC).unwrap();
    File::from(fd.try_clone().unwrap()).set_len(len).unwrap();
    fd
}

/// Creates a nonblocking eventfd.
pub fn eventfd() -> OwnedFd {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    EventFd::from_value_and_flags(0, flags).unwrap().into()
}

/// A device with one of everything.
#[derive(Debug)]
pub struct Everything {
    scratch: Vec<u8>,
    config: [u8; 256],
    shared: OwnedFd,
    areas: [Area; 2],
    doorbells: [IoEventFd; 1],
    /// Interrupts by index.
    irqs: [Lines; 5],
    maps: Vec<DmaMap>,
    feature: [u8; 4],
    wanted: VecDeque<Transfer>,
    /// Pending and completed writes.
    writing: BTreeMap<u64, (u64, u64)>,
    written: Vec<(u64, u64)>,
    saved: Vec<u8>,
    log: Log,
}

/// Interrupts of one index.
#[derive(Debug, Default)]
struct Lines {
    eventfds: BTreeMap<u32, OwnedFd>,
    /// Eventfd that unmasks INTx.
    masked: bool,
    unmask: Option<OwnedFd>,
}

impl Lines {
    /// Reads the unmask eventfd. The device has no event loop, so every access checks it.
    fn look_at_unmask(&mut self) {
        if self.unmask.as_ref().is_some_and(|fd| nix::unistd::read(fd, &mut [0; 8]).is_ok()) {
            self.masked = false;
        }
    }
}

/// Log of the calls that reached the device.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }

    fn add(&self, line: String) {
        let mut lines = self.0.lock().unwrap();
        if lines.len() < 100_000 {
            lines.push(line);
        }
    }
}

impl Everything {
    pub fn new(log: Log) -> Self {
        let doorbell = IoEventFd { offset: 0x10, size: 4, flags: 1, datamatch: 7, fd: eventfd() };
        Self {
            scratch: vec![0; 4096],
            config: [0x5a; 256],
            shared: memory(0x4_0000),
            areas: [Area { offset: 0, size: 0x1000 }, Area { offset: 0x3000, size: 0x1000 }],
            doorbells: [doorbell],
            irqs: Default::default(),
            maps: Vec::new(),
            feature: [0; 4],
            wanted: VecDeque::new(),
            writing: BTreeMap::new(),
            written: Vec::new(),
            saved: Vec::new(),
            log,
        }
    }

    fn memory_of(&mut self, index: u32) -> &mut [u8] {
        if index == SCRATCH { &mut self.scratch } else { &mut self.config }
    }
}

impl Device for Everything {
    fn region(&self, index: u32) -> Option<Region<'_>> {
        match index {
            SCRATCH => Some(Region::trapped(4096)),
            SHARED => Some(Region::mapped(0x1_0000, self.shared.as_fd())),
            SPARSE => {
                let fd = self.shared.as_fd();
                let mapping = Mapping { fd, offset: SPARSE_OFFSET, areas: &self.areas };
                Some(Region { mapping: Some(mapping), ..Region::trapped(0x4000) })
            }
            READ_ONLY => Some(Region { writable: false, ..Region::trapped(256) }),
            pci::CONFIG => Some(Region::trapped(256)),
            _ => None,
        }
    }

    fn irq(&self, index: u32) -> Irq {
        match index {
            pci::INTX => Irq::INTX,
            pci::MSI => Irq::message_signaled(MSI_COUNT),
            pci::MSIX => Irq::message_signaled(8),
            pci::ERR | pci::REQ => Irq::notification(),
            _ => Irq::NONE,
        }
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        if index == SPARSE && offset == 0x3ffc {
            data.fill(0xee);
            return Err(Errno::EIO); // A device error with half an answer.
        }
        let memory = self.memory_of(index);
        for (at, byte) in (offset as usize..).zip(data) {
            *byte = memory[at % memory.len()];
        }
        Ok(())
    }

    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.log.add(format!("write {index} {offset:#x} {}", data.len()));
        let memory = self.memory_of(index);
        for (at, byte) in (offset as usize..).zip(data) {
            let len = memory.len();
            memory[at % len] = *byte;
        }
        if (index, offset, data.len()) == (SCRATCH, TRANSFER, 16) {
            self.want(data);
        }
        Ok(())
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        let fd = if map.fd.is_some() { "fd" } else { "no fd" };
        self.log.add(format!("map {:#x}+{:#x} {fd}", map.address, map.size));
        self.maps.push(map);
        Ok(())
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        self.log.add(format!("{unmap:x?}"));
        match unmap {
            DmaUnmap::Range { address, .. } => self.maps.retain(|map| map.address != address),
            DmaUnmap::All => self.maps.clear(),
        }
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, command: IrqCommand<'_>) -> Result<(), Errno> {
        let lines = &mut self.irqs[index as usize];
        lines.look_at_unmask();
        match command {
            IrqCommand::Disable => *lines = Lines::default(),
            IrqCommand::Assign { action: IrqAction::Trigger, start, eventfds } => {
                let eventfds = eventfds.into_iter().map(ForeignFd::into_trusted);
                lines.eventfds.extend((start..).zip(eventfds));
            }
            IrqCommand::Unassign { action: IrqAction::Trigger, start, count } => {
                lines.eventfds.retain(|line, _| !(start..start + count).contains(line));
            }
            IrqCommand::Perform { action: IrqAction::Trigger, lines: which } => {
                for line in which.iter().filter(|_| !lines.masked) {
                    if let Some(fd) = lines.eventfds.get(&line) {
                        nix::unistd::write(fd, &1_u64.to_ne_bytes())?;
                    }
                }
            }
            IrqCommand::Perform { action, lines: which } => {
                if which.iter().next().is_some() {
                    lines.masked = action == IrqAction::Mask;
                }
            }
            IrqCommand::Assign { action: IrqAction::Unmask, eventfds, .. } => {
                lines.unmask = eventfds.into_iter().next().map(ForeignFd::into_trusted);
            }
            IrqCommand::Unassign { action: IrqAction::Unmask, .. } => lines.unmask = None,
            _ => return Err(Errno::ENOTTY),
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.log.add("reset".to_owned());
        self.scratch.fill(0);
        Ok(())
    }

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        Some(self)
    }

    fn dma_logging(&mut self) -> Option<&mut dyn DmaLogging> {
        Some(self)
    }

    fn transfers(&mut self) -> Option<&mut dyn Transfers> {
        Some(self)
    }

    fn io_event_fds(&self, index: u32) -> &[IoEventFd] {
        if index == SCRATCH { &self.doorbells } else { &[] }
    }

    fn feature(&mut self, feature: Feature<'_>, reply: &mut Vec<u8>) -> Result<(), Errno> {
        if feature.index != FEATURE_INDEX {
            return Err(Errno::ENOTTY);
        }
        match feature.access {
            FeatureAccess::Probe { .. } => {}
            FeatureAccess::Get => reply.extend_from_slice(&self.feature),
            FeatureAccess::Set => {
                self.feature = feature.data.try_into().map_err(|_| Errno::EINVAL)?;
            }
        }
        Ok(())
    }

    fn detach(&mut self) {
        self.log.add("detach".to_owned());
        self.irqs = Default::default();
        self.maps.clear();
        self.wanted.clear();
        self.writing.clear();
    }
}

/// The scratch memory is the migration state.
impl Migration for Everything {
    fn pre_copy(&self) -> bool {
        true
    }

    fn step(&mut self, from: MigrationState, to: MigrationState) -> Result<(), Errno> {
        self.log.add(format!("{from:?} to {to:?}"));
        match (from, to) {
            (MigrationState::Resuming, _) => {
                self.scratch = std::mem::take(&mut self.saved);
                if self.scratch.len() != 4096 {
                    self.scratch.resize(4096, 0);
                    return Err(Errno::EINVAL);
                }
            }
            (_, MigrationState::Resuming) => self.saved.clear(),
            (_, to) if to.is_saving() && !from.is_saving() => self.saved = self.scratch.clone(),
            _ => {}
        }
        Ok(())
    }

    fn read(&mut self, data: &mut [u8]) -> Result<usize, Errno> {
        let count = data.len().min(self.saved.len());
        data[..count].copy_from_slice(&self.saved[..count]);
        self.saved.drain(..count);
        Ok(count)
    }

    fn write(&mut self, data: &[u8]) -> Result<(), Errno> {
        if self.saved.len() + data.len() > 4096 {
            return Err(Errno::ENOSPC);
        }
        self.saved.extend_from_slice(data);
        Ok(())
    }
}

impl DmaLogging for Everything {
    fn start(&mut self, _: u64, ranges: &[DmaRange]) -> Result<u64, Errno> {
        self.log.add(format!("log {ranges:x?}"));
        self.written.clear();
        Ok(4096)
    }

    fn stop(&mut self) {
        self.log.add("stop logging".to_owned());
    }

    fn report(&mut self, range: DmaRange, pages: &mut DirtyPages<'_>) -> Result<(), Errno> {
        for (address, size) in &self.written {
            pages.mark(*address, *size);
        }
        self.written.retain(|(address, _)| {
            *address < range.address || *address - range.address >= range.size
        });
        Ok(())
    }
}

impl Everything {
    fn want(&mut self, data: &[u8]) {
        let address = u64::from_ne_bytes(data[..8].try_into().unwrap());
        let count = u32::from_ne_bytes(data[8..12].try_into().unwrap());
        let kind = match data[12] {
            0 => TransferKind::Read(count),
            _ => TransferKind::Write(vec![0xd0; count as usize % 4096]),
        };
        let tag = self.log.0.lock().unwrap().len() as u64;
        if matches!(kind, TransferKind::Write(_)) {
            self.writing.insert(tag, (address, count.into()));
        }
        self.wanted.push_back(Transfer { tag, address, kind });
    }
}

impl Transfers for Everything {
    fn next(&mut self) -> Option<Transfer> {
        self.wanted.pop_front()
    }

    fn done(&mut self, tag: u64, result: Result<&[u8], Errno>) {
        let errno = result.err().map_or(0, Errno::raw);
        let done = &mut self.scratch[TRANSFER_DONE as usize..];
        let count = u32::from_ne_bytes(done[..4].try_into().unwrap()) + 1;
        done[..4].copy_from_slice(&count.to_ne_bytes());
        done[4..8].copy_from_slice(&errno.to_ne_bytes());
        let data = result.unwrap_or_default();
        let shown = data.len().min(64);
        done[8..8 + shown].copy_from_slice(&data[..shown]);
        if let Some(write) = self.writing.remove(&tag).filter(|_| errno == 0) {
            self.written.push(write);
        }
    }
}

/// A server in this process that serves one client after another.
#[derive(Debug)]
pub struct Server {
    pub path: PathBuf,
    pub log: Log,
    /// Number of clients that have disconnected.
    served: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Server {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vfio.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (log, stop) = (Log::default(), Arc::new(AtomicBool::new(false)));
        let served = Arc::new(AtomicUsize::new(0));
        let thread = std::thread::spawn({
            let (log, stop, served) = (log.clone(), stop.clone(), served.clone());
            move || {
                let mut device = Everything::new(log);
                loop {
                    let (socket, _) = listener.accept().unwrap();
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let closed = Session::new(socket.into()).unwrap().serve(&mut device);
                    assert!(!matches!(closed, Closed::Io(_)), "{closed}");
                    served.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        Self { path, log, served, stop, thread: Some(thread), _folder: folder }
    }

    /// Returns how many clients have disconnected.
    pub fn served(&self) -> usize {
        self.served.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.path);
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.expect("the server must not panic");
        }
    }
}

/// Returns the number of open descriptors of a process.
pub fn open_fds(process: &str) -> usize {
    std::fs::read_dir(Path::new("/proc").join(process).join("fd")).unwrap().count()
}
