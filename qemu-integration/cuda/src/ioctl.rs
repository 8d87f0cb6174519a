//! `ioctl()` on files of the driver.
//!
//! The library knows no command. The worker's [`CallShape`](cuda_socket::CallShape)s and [`Fetch`]
//! say which memory and which descriptors a command needs, [`Done`] what to write.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use cuda_socket::calls::{NodeKind, encoded_len};
use cuda_socket::{
    Block, Done, Fetch, FileId, IoctlRequest, MAX_BLOCKS, MAX_FETCHES, MAX_PACKET, Range, Refused,
    Reply, Request, SharedRange,
};
use nix::errno::Errno;
use nix::libc::{PROT_READ, PROT_WRITE};

use crate::file_memory;
use crate::open_files::OpenFile;
use crate::session::{self, Session};
use crate::sys::memory;

/// Maximum number of bytes of memory in a request. The rest of a packet is the message itself.
const MAX_MEMORY: u64 = MAX_PACKET as u64 - (8 << 10);

/// Maximum number of descriptors that a request names.
const MAX_FILES: usize = 256;

/// Maximum number of parts of shared memory that a request names.
const MAX_PARTS: usize = 256;

/// Pause before an ioctl is repeated, and number of times.
const AGAIN: Duration = Duration::from_millis(10);
const MAX_AGAIN: usize = 2000;

/// Carries out an ioctl with an argument at `argument`. Repeats one that the vGPU carries out
/// later, such as a new channel soon after faults.
pub fn ioctl(file: OpenFile, request: u32, argument: u64) -> Result<(), Errno> {
    for _ in 0..MAX_AGAIN {
        match ioctl_once(file, request, argument) {
            Err(Errno::EAGAIN) => std::thread::sleep(AGAIN),
            done => return done,
        }
    }
    Err(Errno::EBUSY)
}

fn ioctl_once(file: OpenFile, request: u32, argument: u64) -> Result<(), Errno> {
    session::with(|session| {
        let mut call = Call::new(session, file, request, argument)?;
        for _ in 0..=MAX_FETCHES {
            match call.send(session)? {
                (Reply::Done(done), fds) => return call.finish(&done, &fds),
                (Reply::Fetch(fetch), _) => call.fetch(session, &fetch)?,
                _ => return Err(Errno::EIO),
            }
        }
        Err(Errno::EIO)
    })
}

/// An ioctl under way.
#[derive(Debug)]
struct Call {
    /// Address of the argument.
    argument: u64,
    file: FileId,
    request: u32,
    bytes: Vec<u8>,
    blocks: Vec<Block>,
    files: Vec<(RawFd, FileId)>,
    shared: Vec<SharedRange>,
    /// File of the shared memory, if it is not the library's own.
    shared_file: Option<OwnedFd>,
    refused: Refused,
    /// Number of bytes of memory in the request.
    memory: u64,
}

impl Call {
    fn new(
        session: &mut Session,
        file: OpenFile,
        request: u32,
        argument: u64,
    ) -> Result<Self, Errno> {
        let kind = file.node.kind();
        let welcome = session.welcome()?;
        let shape = welcome.calls.iter().find(|shape| shape.is_of(kind, request));
        let len = match (shape, kind) {
            (Some(shape), _) => shape.argument_len(request),
            (None, NodeKind::Rm) => encoded_len(request),
            (None, NodeKind::Uvm) => 0,
        };
        let mut call = Self {
            argument,
            file: file.id,
            request,
            bytes: Vec::new(),
            blocks: Vec::new(),
            files: Vec::new(),
            shared: Vec::new(),
            shared_file: None,
            refused: Refused::default(),
            memory: 0,
        };
        call.bytes = call.read(Range { address: argument, len: len.into() })?;
        if let Some(shape) = shape {
            // What is too long for a packet is left out: the worker refuses the request.
            if let Some(range) = shape.range_in(&call.bytes)
                && range.len <= MAX_MEMORY - call.memory
            {
                call.add_block(range)?;
            }
            if let Some(fd) = shape.fd_in(&call.bytes) {
                call.add_file(session, fd);
            }
        }
        Ok(call)
    }

    /// Reads memory of the program for the request.
    fn read(&mut self, range: Range) -> Result<Vec<u8>, Errno> {
        self.memory = self.memory.saturating_add(range.len);
        if self.memory > MAX_MEMORY {
            return Err(Errno::EINVAL);
        }
        memory::read(range)
    }

    fn add_block(&mut self, range: Range) -> Result<(), Errno> {
        let known =
            |block: &Block| block.address == range.address && block.bytes.len() as u64 == range.len;
        if self.blocks.iter().any(known) {
            return Ok(());
        }
        if self.blocks.len() == MAX_BLOCKS {
            return Err(Errno::EINVAL);
        }
        let bytes = self.read(range)?;
        self.blocks.push(Block { address: range.address, bytes });
        Ok(())
    }

    fn add_file(&mut self, session: &mut Session, fd: RawFd) {
        let known = self.files.iter().any(|(known, _)| *known == fd);
        if !known
            && self.files.len() < MAX_FILES
            && let Some(file) = session.file_of(fd)
        {
            self.files.push((fd, file));
        }
    }

    /// Sends the request.
    fn send(&self, session: &mut Session) -> Result<(Reply, Vec<OwnedFd>), Errno> {
        let request = Request::Ioctl(IoctlRequest {
            file: self.file,
            request: self.request,
            argument: self.bytes.clone(),
            blocks: self.blocks.clone(),
            files: self.files.clone(),
            shared: self.shared.clone(),
            refused: self.refused.clone(),
        });
        let own = !self.shared.is_empty() && self.shared_file.is_none();
        let memfd = own.then(|| session.shared.duplicate()).transpose()?;
        let files = self.shared_file.iter().chain(&memfd);
        let fds: Vec<BorrowedFd<'_>> = files.map(AsFd::as_fd).collect();
        session.call(&request, &fds)
    }

    /// Adds what the worker asked for.
    fn fetch(&mut self, session: &mut Session, fetch: &Fetch) -> Result<(), Errno> {
        for range in &fetch.blocks {
            self.add_block(*range)?;
        }
        for fd in &fetch.files {
            self.add_file(session, *fd);
            if !self.files.iter().any(|(known, _)| known == fd) {
                self.refused.files.push(*fd);
            }
        }
        for range in &fetch.share {
            if let Some((file, part)) =
                file_memory::find(*range)?.filter(|_| self.shared.is_empty())
            {
                self.shared.push(part);
                self.shared_file = Some(file);
                continue;
            }
            match session.shared.share(*range) {
                // One file comes with a request.
                _ if self.shared_file.is_some() => self.refused.share.push(*range),
                Ok(Some(parts)) if self.shared.len() + parts.len() <= MAX_PARTS => {
                    self.shared.extend(parts);
                }
                _ => self.refused.share.push(*range),
            }
        }
        Ok(())
    }

    /// Writes the results into the program's memory.
    fn finish(&self, done: &Done, fds: &[OwnedFd]) -> Result<(), Errno> {
        if done.argument.len() != self.bytes.len() || done.places.len() != fds.len() {
            return Err(Errno::EIO);
        }
        for (place, fd) in done.places.iter().zip(fds) {
            memory::replace(place.range, fd.as_fd(), place.offset, PROT_READ | PROT_WRITE)?;
        }
        for block in &done.writes {
            memory::write(block.address, &block.bytes)?;
        }
        memory::write(self.argument, &done.argument)?;
        match done.errno {
            0 => Ok(()),
            errno => Err(crate::connection::errno_of(errno)),
        }
    }
}
