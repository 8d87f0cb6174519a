//! NVIDIA's device files as a program without NVIDIA's libraries uses them: its requests, and
//! memory that it maps.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;
use nix::unistd::pipe;

/// Lengths of memory: pinned, allocated for a program, managed, and of the doorbell page.
const PINNED: usize = 64 << 10;
const ALLOCATED: usize = 256 << 10;
const MANAGED: usize = 2 << 20;
const DOORBELL: usize = 0x1_0000;

/// Classes of objects.
const DEVICE: u32 = 0x80;
const SUBDEVICE: u32 = 0x2080;
const ADDRESS_SPACE: u32 = 0x90f1;
const SYSTEM_MEMORY: u32 = 0x3e;
const PINNED_MEMORY: u32 = 0x71;
const USERMODE: u32 = 0xc661;

/// Returns numbers as bytes.
fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns an error unless a status in an argument is that of success.
fn check(argument: &[u8], word: usize) -> io::Result<()> {
    let bytes = argument.get(4 * word..4 * word + 4).and_then(|bytes| bytes.try_into().ok());
    match bytes.map(u32::from_le_bytes) {
        Some(0) => Ok(()),
        status => Err(io::Error::other(format!("status {status:x?}"))),
    }
}

/// Opens a device file.
pub fn open(name: &str) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/dev/{name}"))
}

/// Sends a request with its argument.
fn ioctl(file: &File, request: u32, argument: &mut [u8]) -> io::Result<()> {
    let argument = argument.as_mut_ptr();
    // SAFETY: the argument has the length that the request encodes, or that nvidia-uvm reads.
    Errno::result(unsafe { libc::ioctl(file.as_raw_fd(), request.into(), argument) })?;
    Ok(())
}

/// Memory of this process, by its address.
#[derive(Debug)]
pub struct Mapping {
    /// Address.
    pub address: usize,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes: of a file from an offset, or zeros. At an address, it takes the place of
    /// what is there.
    pub fn new(file: Option<(&File, usize)>, at: Option<usize>, len: usize) -> io::Result<Self> {
        let kind = if file.is_some() { libc::MAP_SHARED } else { MEMORY };
        let flags = kind | at.map_or(0, |_| libc::MAP_FIXED);
        let at = at.unwrap_or_default() as *mut libc::c_void;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let (fd, offset) = file.map_or((-1, 0), |(file, offset)| (file.as_raw_fd(), offset));
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: the address is chosen by the kernel, or that of a mapping that the caller owns
        // and has no reference into.
        let address = unsafe { libc::mmap(at, len, access, flags, fd, offset) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { address: address as usize, len })
    }

    /// Reads, and writes if asked, a byte of each of the first pages. The kernel accesses the
    /// memory, so that a page that is gone is an error and not a signal.
    fn touch(&self, writes: bool) -> io::Result<()> {
        let (from, to): (OwnedFd, OwnedFd) = pipe()?;
        for page in (0..self.len.min(MOST_TOUCHED)).step_by(4096) {
            let address = (self.address + page) as *mut libc::c_void;
            // SAFETY: the kernel reads a byte of this process, or reports that there is none.
            Errno::result(unsafe { libc::write(to.as_raw_fd(), address, 1) })?;
            let mut byte = [0_u8];
            let target = if writes { address } else { byte.as_mut_ptr().cast() };
            // SAFETY: as above, and a byte of the mapping, which nothing else uses, or of `byte`.
            Errno::result(unsafe { libc::read(from.as_raw_fd(), target, 1) })?;
        }
        Ok(())
    }
}

/// Kind of a mapping without a file.
const MEMORY: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Length of a mapping's part that is accessed.
const MOST_TOUCHED: usize = 16 << 12;

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nothing refers to it.
        unsafe { libc::munmap(self.address as *mut libc::c_void, self.len) };
    }
}

/// The open files of a program, with the objects that it makes first.
#[derive(Debug)]
pub struct Program {
    control: File,
    gpu: File,
    uvm: File,
    root: u32,
    next: AtomicU32,
    device: u32,
    subdevice: u32,
}

impl Program {
    /// Opens the files and makes a client, device, subdevice and address space.
    pub fn start() -> io::Result<Self> {
        let (control, gpu, uvm) = (open("nvidiactl")?, open("nvidia0")?, open("nvidia-uvm")?);
        let next = AtomicU32::new(0x1000);
        let mut program = Self { control, gpu, uvm, root: 0, next, device: 0, subdevice: 0 };
        let control = program.control.as_raw_fd().cast_unsigned();
        ioctl(&program.gpu, 0xc004_46c9, &mut words(&[control]))?;
        let mut client = words(&[0, 0, 0, 0x41, 0, 0, 0, 0]);
        ioctl(&program.control, 0xc020_462b, &mut client)?;
        check(&client, 7)?;
        program.root = u32::from_le_bytes([client[8], client[9], client[10], client[11]]);
        program.device = program.make(program.root, DEVICE, &mut [0; 56])?;
        program.subdevice = program.make(program.device, SUBDEVICE, &mut [0; 4])?;
        let space = program.make(program.device, ADDRESS_SPACE, &mut [0; 48])?;
        program.uvm(25, &words(&[0, 0, 0, 0, control, program.root, space, 0xffff]), 7)?;
        Ok(program)
    }

    /// Makes an object below another one. Returns its handle.
    fn make(&self, parent: u32, class: u32, params: &mut [u8]) -> io::Result<u32> {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let mut argument = words(&[self.root, parent, handle, class]);
        argument.extend((params.as_mut_ptr() as u64).to_le_bytes());
        argument.extend(words(&[params.len() as u32, 0xffff]));
        ioctl(&self.control, 0xc020_462b, &mut argument)?;
        check(&argument, 7).map(|()| handle)
    }

    fn free(&self, object: u32) -> io::Result<()> {
        let mut argument = words(&[self.root, self.device, object, 0xffff]);
        ioctl(&self.control, 0xc010_4629, &mut argument)?;
        check(&argument, 3)
    }

    fn uvm(&self, request: u32, argument: &[u8], status: usize) -> io::Result<()> {
        let mut argument = argument.to_vec();
        ioctl(&self.uvm, request, &mut argument)?;
        check(&argument, status)
    }

    /// Maps an object's memory, by a file of its own.
    fn map(&self, object: u32, len: usize) -> io::Result<Mapping> {
        let file = open("nvidia0")?;
        let control = self.control.as_raw_fd().cast_unsigned();
        ioctl(&file, 0xc004_46c9, &mut words(&[control]))?;
        let mut argument = words(&[self.root, self.device, object, 0, 0, 0]);
        argument.extend((len as u64).to_le_bytes());
        argument.extend(words(&[0, 0, 0xffff, 0, file.as_raw_fd().cast_unsigned(), 0]));
        ioctl(&self.control, 0xc038_464e, &mut argument)?;
        check(&argument, 10)?;
        Mapping::new(Some((&file, 0)), None, len)
    }

    /// Registers pages of this process, which the module pins, with an argument that the caller
    /// places.
    pub fn pin_with(&self, argument: &mut [u8], pages: usize, len: usize) -> io::Result<u32> {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let mut bytes = words(&[self.root, self.device, handle, PINNED_MEMORY, PIN_FLAGS, 0]);
        bytes.extend((pages as u64).to_le_bytes());
        bytes.extend((len as u64 - 1).to_le_bytes());
        bytes.extend(words(&[0xffff, 0, u32::MAX, 0]));
        argument[..bytes.len()].copy_from_slice(&bytes);
        self.request_with(argument)?;
        check(argument, 10).map(|()| handle)
    }

    /// Sends a request whose argument the module reads first.
    pub fn request_with(&self, argument: &mut [u8]) -> io::Result<()> {
        ioctl(&self.gpu, 0xc038_4627, argument)
    }

    /// Pins pages of this process and frees them.
    pub fn pin(&self) -> io::Result<()> {
        let pages = Mapping::new(None, None, PINNED)?;
        let object = self.pin_with(&mut [0; PIN_BYTES], pages.address, PINNED)?;
        self.free(object)
    }

    /// Allocates memory that the module maps, and accesses it.
    pub fn map_memory(&self) -> io::Result<()> {
        let mut params = vec![0; 128];
        params[64..72].copy_from_slice(&(ALLOCATED as u64).to_le_bytes());
        let object = self.make(self.device, SYSTEM_MEMORY, &mut params)?;
        self.map(object, ALLOCATED)?.touch(true)?;
        self.free(object)
    }

    /// Maps the doorbell page and reads it.
    pub fn map_doorbell(&self) -> io::Result<()> {
        let object = self.make(self.subdevice, USERMODE, &mut [])?;
        self.map(object, DOORBELL)?.touch(false)?;
        self.free(object)
    }

    /// Maps a range of nvidia-uvm, which gets its memory by a request, and accesses it.
    pub fn manage_memory(&self) -> io::Result<()> {
        let place = Mapping::new(None, None, MANAGED)?;
        let file = Some((&self.uvm, place.address));
        let range = std::mem::ManuallyDrop::new(Mapping::new(file, Some(place.address), MANAGED)?);
        let mut argument = (range.address as u64).to_le_bytes().to_vec();
        argument.extend((MANAGED as u64).to_le_bytes());
        argument.extend(words(&[0xffff, 0]));
        // Read duplication.
        self.uvm(44, &argument, 4)?;
        range.touch(true)?;
        self.uvm(34, &argument, 4)
    }

    /// Polls a file.
    pub fn poll(&self) -> io::Result<()> {
        let mut entry = libc::pollfd { fd: self.gpu.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry.
        Errno::result(unsafe { libc::poll(&raw mut entry, 1, 1) })?;
        match entry.revents & libc::POLLERR {
            0 => Ok(()),
            _ => Err(ErrorKind::BrokenPipe.into()),
        }
    }
}

/// Flags of pinned memory: pages that are not one after another, cached, without a mapping.
const PIN_FLAGS: u32 = 0x4000_1010;

/// Length of the argument of [`Program::pin_with`].
pub const PIN_BYTES: usize = 56;
