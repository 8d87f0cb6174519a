//! A program in a VM, for tests: what a CUDA program asks of the driver's files.
#![allow(clippy::unwrap_used, missing_docs, reason = "test helpers panic on violations")]

use mdev_core::abi::host::{self, GpEntry};
use mdev_core::abi::queue::{File, mapped, node};
use mdev_core::abi::userd;
use mdev_core::testing::queue_driver::{Bus, Process, QueueDriver, encode};
use mdev_core::units::{MIB, PAGE_SIZE};

use super::{memory_params, word, words};
use crate::conformance::Pushbuffer;

/// Parameters of ioctls in the program.
const PARAMS: u64 = 0x7000_0000;
/// Descriptors by which the program knows its files.
const CONTROL_FD: i32 = 11;
const GPU_FD: i32 = 12;

/// Address of the rings for the GPU, and offsets there.
const RINGS: u64 = 0x2_0000_0000;
const USERD: u64 = 2 * PAGE_SIZE;
const SOURCE: u64 = MIB;
const TARGET: u64 = MIB + PAGE_SIZE;
const SEMAPHORE: u64 = MIB + 2 * PAGE_SIZE;
const METHODS: u64 = MIB + 3 * PAGE_SIZE;
const RINGS_BYTES: u64 = 2 * MIB;

/// A process with the driver's files open, and a client of the resource manager.
#[derive(Debug)]
pub struct Program {
    pub process: Process,
    pub control: u64,
    pub gpu: u64,
    pub uvm: u64,
    pub root: u32,
}

/// A channel for copies, and the memory of its rings.
#[derive(Clone, Copy, Debug)]
pub struct Channel {
    pub token: u32,
    pub rings: u64,
    submitted: u32,
}

impl Program {
    pub fn start<B: Bus>(driver: &mut QueueDriver<B>) -> Self {
        Self::start_as(driver, 7, 0)
    }

    /// Starts a process of a user. `user` is the number plus 1, or 0 if it is not told.
    pub fn start_as<B: Bus>(driver: &mut QueueDriver<B>, process: u32, user: u32) -> Self {
        let [control, gpu, uvm] = [node::CONTROL, node::GPU, node::UVM]
            .map(|node| driver.open_as(node, process, user).unwrap());
        let mut process = Process::default();
        process.files.insert(CONTROL_FD, control);
        process.files.insert(GPU_FD, gpu);
        let mut program = Self { process, control, gpu, uvm, root: 0 };
        program.root = program.alloc(driver, 0, 0, 0, &[]).unwrap();
        program
    }

    /// Allocates an object. Returns its handle, or the status.
    pub fn alloc<B: Bus>(
        &mut self,
        driver: &mut QueueDriver<B>,
        parent: u32,
        handle: u32,
        class: u32,
        params: &[u8],
    ) -> Result<u32, u32> {
        self.process.memory.insert(PARAMS, params.to_vec());
        let mut argument = words(&[self.root, parent, handle, class]);
        argument.extend(if params.is_empty() { 0 } else { PARAMS }.to_le_bytes());
        argument.resize(48, 0);
        let done = driver.ioctl(&mut self.process, self.control, 0xc030_462b, &argument);
        assert_eq!(done.errno, 0);
        match word(&done.argument, 10) {
            0 => Ok(word(&done.argument, 2)),
            status => Err(status),
        }
    }

    pub fn free<B: Bus>(&mut self, driver: &mut QueueDriver<B>, handle: u32) {
        let argument = words(&[self.root, self.root, handle, 0xffff]);
        let done = driver.ioctl(&mut self.process, self.control, 0xc010_4629, &argument);
        assert_eq!((done.errno, word(&done.argument, 3)), (0, 0));
    }

    /// Calls a control. Returns the parameters.
    pub fn call<B: Bus>(
        &mut self,
        driver: &mut QueueDriver<B>,
        object: u32,
        command: u32,
        params: &[u8],
    ) -> Vec<u8> {
        self.process.memory.insert(PARAMS, params.to_vec());
        let mut argument = words(&[self.root, object, command, 0]);
        argument.extend(PARAMS.to_le_bytes());
        argument.extend(words(&[params.len() as u32, 0xffff]));
        let done = driver.ioctl(&mut self.process, self.control, 0xc020_462a, &argument);
        assert_eq!((done.errno, word(&done.argument, 7)), (0, 0), "{command:#x}");
        self.process.memory[&PARAMS].clone()
    }

    /// Creates a device with an address space that nvidia-uvm knows.
    pub fn space<B: Bus>(&mut self, driver: &mut QueueDriver<B>) {
        let device = self.alloc(driver, self.root, 0x10, 0x80, &[0; 56]).unwrap();
        let space = self.alloc(driver, device, 0x12, 0x90f1, &[0; 48]).unwrap();
        let fd = CONTROL_FD.cast_unsigned();
        let argument = words(&[0, 0, 0, 0, fd, self.root, space, 0xffff]);
        let done = driver.ioctl(&mut self.process, self.uvm, 25, &argument);
        assert_eq!((done.errno, word(&done.argument, 7)), (0, 0));
    }

    /// Returns the argument of an ioctl that maps a memory object for the GPU.
    fn external_mapping(&self, memory: u32, va: u64, len: u64) -> Vec<u8> {
        let mut argument = vec![0; 9264];
        argument[..8].copy_from_slice(&va.to_le_bytes());
        argument[8..16].copy_from_slice(&len.to_le_bytes());
        for (at, value) in [(9248, CONTROL_FD.cast_unsigned()), (9252, self.root), (9256, memory)] {
            argument[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        argument
    }

    /// Returns a request that maps a memory object for the GPU, at once.
    pub fn mapping_request(&self, memory: u32, va: u64, len: u64) -> Vec<u8> {
        let file = File { fd: CONTROL_FD, reserved: 0, file: self.control };
        let argument = self.external_mapping(memory, va, len);
        encode(self.uvm, 33, &argument, &[], &[file], &[], &[])
    }

    /// Maps a memory object for the GPU. Returns the status.
    pub fn map_for_gpu<B: Bus>(
        &mut self,
        driver: &mut QueueDriver<B>,
        memory: u32,
        va: u64,
        len: u64,
    ) -> u32 {
        let argument = self.external_mapping(memory, va, len);
        let done = driver.ioctl(&mut self.process, self.uvm, 33, &argument);
        assert_eq!(done.errno, 0);
        word(&done.argument, 9260 / 4)
    }

    /// Makes a mapping of the GPU's file show a memory object.
    pub fn make_mapping<B: Bus>(&mut self, driver: &mut QueueDriver<B>, memory: u32, len: u64) {
        let mut argument = words(&[self.root, 0, memory, 0, 0, 0]);
        argument.extend(len.to_le_bytes());
        argument.extend(words(&[0, 0, 0xffff, 0, GPU_FD.cast_unsigned(), 0]));
        let done = driver.ioctl(&mut self.process, self.control, 0xc038_464e, &argument);
        assert_eq!((done.errno, word(&done.argument, 10)), (0, 0));
    }

    /// Creates a channel for copies, as libcuda does: its rings are video memory that it maps.
    pub fn channel<B: Bus>(&mut self, driver: &mut QueueDriver<B>) -> Channel {
        self.space(driver);
        let device = 0x10;
        let rings = self.alloc(driver, device, 0x20, 0x40, &memory_params(RINGS_BYTES, 0)).unwrap();
        self.call(driver, self.root, 0xd01, &words(&[rings, 0, 0]));
        self.make_mapping(driver, rings, RINGS_BYTES);
        let (kind, memory) = driver.map(self.gpu, RINGS_BYTES, 0).unwrap();
        assert_eq!(kind, mapped::MEMORY);
        assert_eq!(self.map_for_gpu(driver, rings, RINGS, RINGS_BYTES), 0);
        let group = words(&[0, 0, 0x12, 9, 0]);
        let group = self.alloc(driver, device, 0x30, 0xa06c, &group).unwrap();
        let mut params = vec![0; 368];
        for (at, value) in [(16, 1024), (32, rings), (64, USERD as u32)] {
            params[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        params[8..16].copy_from_slice(&RINGS.to_le_bytes());
        let channel = self.alloc(driver, group, 0x32, 0xc86f, &params).unwrap();
        self.alloc(driver, channel, 0x33, 0xc8b5, &[0; 8]).unwrap();
        let token = word(&self.call(driver, channel, 0xc36f_0108, &[0; 4]), 0);
        self.call(driver, group, 0xa06c_0101, &[1, 0]);
        Channel { token, rings: memory, submitted: 0 }
    }
}

impl Channel {
    /// Queues a copy of text. The caller rings the doorbell.
    pub fn copy<B: Bus>(&mut self, driver: &mut QueueDriver<B>, text: &[u8]) {
        self.submitted += 1;
        driver.store_memory(self.rings, SOURCE, text);
        let methods = Pushbuffer::default()
            .copy_method(host::SET_OBJECT, &[0xc8b5])
            .copy(RINGS + SOURCE, RINGS + TARGET, text.len() as u32)
            .semaphore(
                RINGS + SEMAPHORE,
                self.submitted.into(),
                host::sem::RELEASE | host::sem::RELEASE_WFI,
            );
        driver.store_memory(self.rings, METHODS, &words(methods.words()));
        let dwords = methods.words().len() as u32;
        let entry = GpEntry::Segment { va: RINGS + METHODS, dwords }.encode();
        let slot = u64::from(self.submitted - 1) * 8;
        driver.store_memory(self.rings, slot, &entry.to_le_bytes());
        let put = self.submitted.to_le_bytes();
        driver.store_memory(self.rings, USERD + userd::GP_PUT, &put);
    }

    /// Returns whether all copies are done.
    pub fn is_done<B: Bus>(&self, driver: &mut QueueDriver<B>) -> bool {
        let mut semaphore = [0; 4];
        driver.load_memory(self.rings, SEMAPHORE, &mut semaphore);
        u32::from_le_bytes(semaphore) == self.submitted
    }

    /// Returns what was copied last.
    pub fn copied<B: Bus>(&self, driver: &mut QueueDriver<B>, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        driver.load_memory(self.rings, TARGET, &mut bytes);
        bytes
    }
}
