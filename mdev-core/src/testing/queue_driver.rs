//! A guest's driver of the control queue.

use std::collections::{BTreeMap, VecDeque};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::abi::queue::{
    ALLOCATED, Block, COMPLETIONS_PER_SLOT, Completion, Done, FETCH, Fetch, File, Ioctl,
    LIST_RANGES, List, MAX_FETCHES, MAX_PAGES, Map, Mapped, Memory, Open, Opened, PAGE_BYTES,
    PINNED, Range, Reply, Request, SUBMISSIONS, Submission, completion, index, op,
};

/// Device and memory of a guest.
pub trait Bus {
    /// Reads guest memory.
    fn read(&mut self, address: u64, bytes: &mut [u8]);
    /// Writes guest memory.
    fn write(&mut self, address: u64, bytes: &[u8]);
    /// Tells the device of submissions, and returns when it may have answered.
    fn notify(&mut self);
    /// Waits for a further completion.
    fn wait(&mut self);
}

/// Result of an ioctl.
#[derive(Debug, PartialEq, Eq)]
pub struct IoctlResult {
    pub errno: u32,
    pub argument: Vec<u8>,
    /// Memory that the program is to see at an address: address, length, memory, offset.
    pub places: Vec<[u64; 4]>,
}

/// Memory of a program at made-up addresses, and its descriptors.
#[derive(Clone, Debug, Default)]
pub struct Process {
    /// Memory by address.
    pub memory: BTreeMap<u64, Vec<u8>>,
    /// Files by descriptor.
    pub files: BTreeMap<i32, u64>,
}

/// Driver of a queue of 8 slots in `base..end` of guest memory, which it hands out from below.
#[derive(Debug)]
pub struct QueueDriver<B> {
    pub bus: B,
    pub base: u64,
    free: u64,
    /// End of the pages that the driver keeps.
    kept: u64,
    end: u64,
    tail: u32,
    head: u32,
    cookie: u64,
    last_memory: u64,
    /// Guest-physical ranges of memories in use: start and length.
    pub memories: BTreeMap<u64, Vec<(u64, u64)>>,
    /// Completions that are no request's.
    pub events: VecDeque<Completion>,
    /// Buffer: its list of pages, and its pages.
    buffer: (u64, Vec<u64>),
    /// Page of memory lists, one after the other.
    list: u64,
}

/// Slots of the driver's queue.
pub const SLOTS: u32 = 8;

impl<B: Bus> QueueDriver<B> {
    /// Prepares a queue. The caller then starts the device.
    pub fn new(bus: B, base: u64, end: u64) -> Self {
        let mut driver = Self {
            bus,
            base,
            free: base,
            kept: base,
            end,
            tail: 0,
            head: 0,
            cookie: 100,
            last_memory: 0,
            memories: BTreeMap::new(),
            events: VecDeque::new(),
            buffer: (0, Vec::new()),
            list: 0,
        };
        driver.allocate(4);
        let list = driver.allocate(1);
        // Every second page, so that the buffer is scattered.
        let pages: Vec<_> = (0..MAX_PAGES).map(|_| driver.allocate(2)).collect();
        let bytes: Vec<_> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        driver.bus.write(list, &bytes);
        driver.buffer = (list, pages);
        driver.list = driver.allocate(1);
        driver.kept = driver.free;
        driver
    }

    /// Hands all pages out again, when the device uses none.
    pub fn reuse_pages(&mut self) {
        assert!(self.memories.is_empty(), "the device uses memory");
        self.free = self.kept;
    }

    /// Returns zeroed pages.
    pub fn allocate(&mut self, pages: u64) -> u64 {
        let address = self.free;
        self.free += pages * PAGE_BYTES as u64;
        assert!(self.free <= self.end, "the guest has no more memory");
        let zeros = vec![0; PAGE_BYTES];
        for page in 0..pages {
            self.bus.write(address + page * PAGE_BYTES as u64, &zeros);
        }
        address
    }

    fn load(&mut self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.bus.read(self.base + offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Writes a submission without telling the device.
    pub fn submit(&mut self, submission: &Submission) {
        let slot = u64::from(self.tail % SLOTS) * size_of::<Submission>() as u64;
        self.bus.write(self.base + SUBMISSIONS + slot, submission.as_bytes());
        self.tail = self.tail.wrapping_add(1);
        self.bus.write(self.base + index::SUBMIT_TAIL, &self.tail.to_le_bytes());
    }

    /// Returns a submission of the driver's buffer.
    pub fn submission(&self, bytes: u32) -> Submission {
        let (list, pages) = (self.buffer.0, self.buffer.1.len() as u32);
        Submission { list, pages, bytes, cookie: self.cookie, reserved: 0 }
    }

    /// Returns the next completion.
    pub fn completion(&mut self) -> Option<Completion> {
        if self.load(index::COMPLETE_TAIL) == self.head {
            return None;
        }
        let first = SUBMISSIONS + u64::from(SLOTS) * size_of::<Submission>() as u64;
        let slot = u64::from(self.head % (SLOTS * COMPLETIONS_PER_SLOT));
        let mut completion = Completion::new_zeroed();
        let at = self.base + first + slot * size_of::<Completion>() as u64;
        self.bus.read(at, completion.as_mut_bytes());
        self.head = self.head.wrapping_add(1);
        self.bus.write(self.base + index::COMPLETE_HEAD, &self.head.to_le_bytes());
        Some(completion)
    }

    /// Takes the completions that are there for [`Self::events`].
    pub fn collect(&mut self) {
        while let Some(completion) = self.completion() {
            self.note(completion);
        }
    }

    fn note(&mut self, completion: Completion) {
        if completion.kind == completion::MEMORY {
            let known = self.memories.remove(&completion.value);
            assert!(known.is_some(), "memory {} is not in use", completion.value);
        } else {
            self.events.push_back(completion);
        }
    }

    /// Writes a request into the buffer.
    pub fn fill(&mut self, request: &[u8]) {
        for (page, bytes) in self.buffer.1.clone().into_iter().zip(request.chunks(PAGE_BYTES)) {
            self.bus.write(page, bytes);
        }
    }

    /// Sends a request and returns the reply.
    pub fn request(&mut self, request: &[u8]) -> Vec<u8> {
        self.fill(request);
        self.cookie += 1;
        let submission = self.submission(request.len() as u32);
        self.submit(&submission);
        self.bus.notify();
        loop {
            match self.completion() {
                Some(done) if done.kind == completion::DONE => {
                    assert_eq!(done.value, self.cookie);
                    let mut reply = vec![0; done.bytes as usize];
                    for (page, bytes) in self.buffer.1.iter().zip(reply.chunks_mut(PAGE_BYTES)) {
                        self.bus.read(*page, bytes);
                    }
                    return reply;
                }
                Some(other) => self.note(other),
                None => self.bus.wait(),
            }
        }
    }

    fn send<T: FromBytes>(&mut self, request: &(impl IntoBytes + Immutable)) -> Result<T, u32> {
        let reply = self.request(request.as_bytes());
        match Reply::read_from_prefix(&reply).unwrap().0.error {
            0 => Ok(T::read_from_bytes(&reply).unwrap()),
            errno => Err(errno),
        }
    }

    /// Opens a device node, as a program whose user is not told.
    pub fn open(&mut self, node: u32, process: u32) -> Result<u64, u32> {
        self.open_as(node, process, 0)
    }

    /// Opens a device node, with the user id plus 1.
    pub fn open_as(&mut self, node: u32, process: u32, user: u32) -> Result<u64, u32> {
        let request = request(op::OPEN, 0);
        let opened: Opened = self.send(&Open { request, node, minor: 0, process, user })?;
        Ok(opened.file)
    }

    /// Closes a file.
    pub fn close(&mut self, file: u64) -> Result<(), u32> {
        self.send::<Reply>(&request(op::CLOSE, file)).map(drop)
    }

    /// Asks what a mapping of a file shows: the kind and the memory.
    pub fn map(&mut self, file: u64, length: u64, offset: u64) -> Result<(u32, u64), u32> {
        let request = request(op::MAP, file);
        let mapped: Mapped = self.send(&Map { request, length, offset, flags: 1, reserved: 0 })?;
        Ok((mapped.kind, mapped.memory))
    }

    /// Allocates pages for the device, not two of them neighbours, and returns the memory.
    pub fn new_memory(&mut self, kind: u32, address: u64, length: u64) -> Memory {
        let pages = length / PAGE_BYTES as u64;
        let ranges = (0..pages).map(|_| (self.allocate(2), PAGE_BYTES as u64)).collect();
        self.memory_of(kind, address, ranges)
    }

    /// Returns a memory of these ranges.
    pub fn memory_of(&mut self, kind: u32, address: u64, ranges: Vec<(u64, u64)>) -> Memory {
        self.last_memory += 1;
        let (id, length) = (self.last_memory, ranges.iter().map(|(_, len)| len).sum());
        let mut list = 0;
        for part in ranges.chunks(LIST_RANGES).rev() {
            let mut page: List = List::new_zeroed();
            (page.next, page.count) = (list, part.len() as u32);
            for (target, (address, length)) in page.ranges.iter_mut().zip(part) {
                *target = Range { address: *address, length: *length };
            }
            list = self.allocate(1);
            self.bus.write(list, page.as_bytes());
        }
        self.memories.insert(id, ranges);
        Memory { id, address, length, list, kind, reserved: 0 }
    }

    /// Carries out an ioctl of a process with this memory, as often as the device asks for more.
    pub fn ioctl(
        &mut self,
        process: &mut Process,
        file: u64,
        number: u32,
        argument: &[u8],
    ) -> IoctlResult {
        let (mut blocks, mut files) = (Vec::<(u64, Vec<u8>)>::new(), Vec::new());
        let (mut memories, mut refused) = (Vec::<Memory>::new(), Vec::new());
        for _ in 0..=MAX_FETCHES {
            let bytes = encode(file, number, argument, &blocks, &files, &memories, &refused);
            let reply = self.request(&bytes);
            let start = Reply::read_from_prefix(&reply).unwrap().0;
            if start.result != FETCH {
                return finish(process, &reply);
            }
            let fetch = Fetch::read_from_bytes(&reply).unwrap();
            for range in &fetch.block[..fetch.blocks as usize] {
                blocks.push((range.address, process.block(range.address, range.length as usize)));
            }
            for fd in &fetch.file[..fetch.files as usize] {
                match process.files.get(fd) {
                    Some(file) => files.push(File { fd: *fd, reserved: 0, file: *file }),
                    None => refused.push(*fd),
                }
            }
            for pin in &fetch.pin[..fetch.pins as usize] {
                memories.push(self.new_memory(PINNED, pin.address, pin.length));
            }
            for length in &fetch.allocate[..fetch.allocations as usize] {
                memories.push(self.new_memory(ALLOCATED, 0, *length));
            }
        }
        panic!("the device asks for more for ever");
    }

    /// Returns a word of a memory.
    pub fn load_memory(&mut self, id: u64, offset: u64, bytes: &mut [u8]) {
        let address = self.address(id, offset);
        self.bus.read(address, bytes);
    }

    /// Writes to a memory, within a page.
    pub fn store_memory(&mut self, id: u64, offset: u64, bytes: &[u8]) {
        let address = self.address(id, offset);
        self.bus.write(address, bytes);
    }

    fn address(&self, id: u64, mut offset: u64) -> u64 {
        for (address, len) in &self.memories[&id] {
            if offset < *len {
                return address + offset;
            }
            offset -= len;
        }
        panic!("beyond memory {id}");
    }
}

impl Process {
    /// Returns `len` bytes at an address; what is not there is zero.
    fn block(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        if let Some((start, memory)) = self.memory.range(..=address).next_back() {
            let found = memory.get((address - start) as usize..).unwrap_or_default();
            let len = len.min(found.len());
            bytes[..len].copy_from_slice(&found[..len]);
        }
        bytes
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        if let Some((start, memory)) = self.memory.range_mut(..=address).next_back() {
            let at = (address - start) as usize;
            if let Some(target) = memory.get_mut(at..at + bytes.len()) {
                target.copy_from_slice(bytes);
            }
        }
    }
}

/// Returns the start of a request.
pub fn request(opcode: u32, file: u64) -> Request {
    Request { opcode, reserved: 0, file }
}

/// Encodes an ioctl.
pub fn encode(
    file: u64,
    number: u32,
    argument: &[u8],
    blocks: &[(u64, Vec<u8>)],
    files: &[File],
    memories: &[Memory],
    refused: &[i32],
) -> Vec<u8> {
    let mut ioctl = Ioctl::new_zeroed();
    ioctl.request = request(op::IOCTL, file);
    ioctl.number = number;
    let mut bytes = vec![0; size_of::<Ioctl>()];
    ioctl.argument_bytes = argument.len() as u32;
    ioctl.argument_offset = bytes.len() as u32;
    bytes.extend(argument);
    ioctl.blocks = blocks.len() as u32;
    for (target, (address, content)) in ioctl.block.iter_mut().zip(blocks) {
        let offset = bytes.len() as u32;
        *target = Block { address: *address, length: content.len() as u32, offset };
        bytes.extend(content);
    }
    ioctl.files = files.len() as u32;
    ioctl.file[..files.len()].copy_from_slice(files);
    ioctl.memories = memories.len() as u32;
    ioctl.memory[..memories.len()].copy_from_slice(memories);
    ioctl.refused_files = refused.len() as u32;
    ioctl.refused_file[..refused.len()].copy_from_slice(refused);
    bytes[..size_of::<Ioctl>()].copy_from_slice(ioctl.as_bytes());
    bytes
}

fn finish(process: &mut Process, reply: &[u8]) -> IoctlResult {
    let Ok((done, _)) = Done::read_from_prefix(reply) else {
        // The start of a reply: the request itself was refused.
        let errno = Reply::read_from_prefix(reply).unwrap().0.error;
        return IoctlResult { errno, argument: Vec::new(), places: Vec::new() };
    };
    let bytes = |offset: u32, len: u32| &reply[offset as usize..(offset + len) as usize];
    for block in &done.write[..done.writes as usize] {
        process.write(block.address, bytes(block.offset, block.length));
    }
    let places = done.place[..done.places as usize].iter();
    IoctlResult {
        errno: done.reply.error,
        argument: bytes(done.argument_offset, done.argument_bytes).to_vec(),
        places: places.map(|one| [one.address, one.length, one.memory, one.offset]).collect(),
    }
}
