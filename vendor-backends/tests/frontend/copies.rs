//! Copies through a channel of a program.

use std::sync::Arc;

use ipc::mem::Mapping;
use mdev_core::abi::host::{self, GpEntry};
use mdev_core::abi::{doorbell, notifier, userd};
use mdev_core::gpu::{Client, Pending};
use mdev_core::ids::Token;
use mdev_core::units::{MIB, PAGE_SIZE};
use programs::FrontEnd;
use vendor_backends::conformance::Pushbuffer;

use crate::program::{CONTROL, Context, Program, memory_params, wait, word, words};
use crate::{PROGRAM_VA, faults};

/// Offsets in the program's memory of rings.
const USERD: u64 = 2 * PAGE_SIZE;
const SOURCE: u64 = MIB;
const TARGET: u64 = MIB + PAGE_SIZE;
const SEMAPHORE: u64 = MIB + 2 * PAGE_SIZE;
const METHODS: u64 = MIB + 3 * PAGE_SIZE;

/// Address of video memory for the GPU.
const DATA: u64 = 0x100_0000_0000;

/// A channel for copies. Rings and USERD are video memory that is mapped for the CPU first.
pub struct Copies {
    pub context: Context,
    memory: Arc<Mapping>,
    notifier: Arc<Mapping>,
    pub channel: u32,
    token: u32,
    submitted: u32,
}

impl Copies {
    fn start(program: &mut Program) -> Self {
        Self::start_on(program, true)
    }

    /// Starts the channel in a group, or without one, as libcuda does for a checkpoint.
    fn start_on(program: &mut Program, in_group: bool) -> Self {
        let context = program.context();
        let (root, device) = (context.root, context.device);
        let ring = program.new_object(root, device, 0x20, 0x40, &memory_params(2 * MIB, 2 * MIB));
        let (status, kind) = program.control(root, root, 0xd01, &words(&[ring, 0, 0]));
        assert_eq!((status, word(&kind, 2)), (0, 1));
        let memory = program.map(root, ring, 2 * MIB);
        assert_eq!(program.map_for_gpu(root, ring, PROGRAM_VA, 2 * MIB), 0);
        let data = program.new_object(root, device, 0x21, 0x40, &memory_params(4 * MIB, 2 * MIB));
        assert_eq!(program.map_for_gpu(root, data, DATA, 4 * MIB), 0);

        let group = words(&[0, 0, context.space, 9, 0]);
        let group =
            if in_group { program.new_object(root, device, 0x30, 0xa06c, &group) } else { device };
        let notifier = program.new_object(root, device, 0x31, 0x3e, &memory_params(PAGE_SIZE, 0));
        let notifier_memory = program.map(root, notifier, PAGE_SIZE);
        let mut params = vec![0; 368];
        for (at, value) in [(0, notifier), (16, 1024), (32, ring), (64, USERD as u32)] {
            params[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        if !in_group {
            for (at, value) in [(28, context.space), (128, 9)] {
                params[at..at + 4].copy_from_slice(&value.to_le_bytes());
            }
            // The ring has the entries of a channel before.
            memory.store_u32(USERD + userd::GP_PUT, 7);
        }
        params[8..16].copy_from_slice(&PROGRAM_VA.to_le_bytes());
        let channel = program.new_object(root, group, 0x32, 0xc86f, &params);
        let copies = program.new_object(root, channel, 0x33, 0xc8b5, &[0; 8]);
        let (_, engine) = program.control(root, channel, 0xc36f_0101, &words(&[copies, 0, 0, 0]));
        assert_eq!((word(&engine, 2), word(&engine, 3)), (0xc8b5, 9));
        let (_, token) = program.control(root, channel, 0xc36f_0108, &[0; 4]);
        let (object, command) =
            if in_group { (group, 0xa06c_0101) } else { (channel, 0xa06f_0103) };
        let (status, _) = program.control(root, object, command, &[1, 0]);
        assert_eq!(status, 0);
        let token = word(&token, 0);
        Self { context, memory, notifier: notifier_memory, channel, token, submitted: 0 }
    }

    /// Submits methods without a look whether the engine sleeps.
    fn submit(&mut self, program: &mut Program, methods: &Pushbuffer) {
        self.memory.write(METHODS, &words(methods.words())).unwrap();
        let dwords = methods.words().len() as u32;
        let entry = GpEntry::Segment { va: PROGRAM_VA + METHODS, dwords }.encode();
        self.memory.write(u64::from(self.submitted) * 8, &entry.to_le_bytes()).unwrap();
        self.submitted += 1;
        self.memory.store_u32(USERD + userd::GP_PUT, self.submitted);
        program.client.wake(Token(self.token)).unwrap();
    }

    /// Submits copies to [`TARGET`], and returns the text that is there afterwards.
    fn copy(&mut self, program: &mut Program, methods: Pushbuffer, len: usize) -> String {
        let flags = host::sem::RELEASE | host::sem::RELEASE_WFI;
        let done = self.submitted + 1;
        let methods = methods.semaphore(PROGRAM_VA + SEMAPHORE, done.into(), flags);
        self.submit(program, &methods);
        wait("the semaphore", || self.memory.load_u32(SEMAPHORE) == Some(done));
        let mut copied = vec![0; len];
        self.memory.read(TARGET, &mut copied).unwrap();
        String::from_utf8(copied).unwrap()
    }
}

fn begin() -> Pushbuffer {
    Pushbuffer::default().copy_method(host::SET_OBJECT, &[0xc8b5])
}

#[test]
fn a_program_copies_through_a_channel_of_its_own() {
    let mut program = Program::start();
    let mut copies = Copies::start(&mut program);
    let usermode =
        program.new_object(copies.context.root, copies.context.subdevice, 0x40, 0xc661, &[]);
    let page = program.map(copies.context.root, usermode, 0x1_0000);
    page.store_u32(doorbell::TOKEN, copies.token);
    copies.memory.write(SOURCE, b"from here").unwrap();
    let there_and_back =
        begin().copy(PROGRAM_VA + SOURCE, DATA, 9).copy(DATA, PROGRAM_VA + TARGET, 9);
    assert_eq!(copies.copy(&mut program, there_and_back, 9), "from here");

    // A fault is told by the notifier, and by the event of the group that has it.
    faults::with_events(&mut program, &copies);
    copies.submit(&mut program, &Pushbuffer::default().copy(0x7000_0000_0000, DATA, 9));
    let mut due = Vec::new();
    wait("the notifier", || {
        due.extend(program.front_end.on_gpu_event(&mut program.client, Pending::CHANNEL_ERROR));
        copies.notifier.load_u32(12) == Some(0xffff_0000)
    });
    assert_eq!(copies.notifier.load_u32(8), Some(notifier::MMU_FAULT));
    assert_eq!(due, [CONTROL], "the other group had no fault");
    faults::the_cause_is_told(&mut program, copies.context, copies.channel);

    program.front_end.close(&mut program.client, CONTROL);
    assert_eq!(program.front_end.counts(), [0; 4]);
    assert_eq!(program.front_end.used_video_bytes(), 0);
}

#[test]
fn the_gpu_reads_pages_that_were_shared_in_parts() {
    const PAGES: u64 = 0x7fff_0000_0000;
    const PART: u64 = MIB / 4;
    let mut program = Program::start();
    let mut copies = Copies::start(&mut program);
    program.attach_gpu_file();
    program.parts = 4;
    assert_eq!(program.register(copies.context, 0x60, PAGES, 4 * PART), 0);
    assert_eq!(program.map_for_gpu(copies.context.root, 0x60, PAGES, 4 * PART), 0);
    // The end of the first part and the start of the second one, in the order of the file.
    let file = &program.shared[&PAGES].mapping;
    file.write(4 * PART - 3, b"the").unwrap();
    file.write(2 * PART, b" parts").unwrap();
    let crossing = begin().copy(PAGES + PART - 3, PROGRAM_VA + TARGET, 9);
    assert_eq!(copies.copy(&mut program, crossing, 9), "the parts");
    program.front_end.close(&mut program.client, CONTROL);
    assert_eq!(program.front_end.counts(), [0; 4]);
}

#[test]
fn a_channel_without_a_group_copies_from_the_start_of_its_ring() {
    let mut program = Program::start();
    let mut copies = Copies::start_on(&mut program, false);
    copies.memory.write(SOURCE, b"from here").unwrap();
    let there_and_back =
        begin().copy(PROGRAM_VA + SOURCE, DATA, 9).copy(DATA, PROGRAM_VA + TARGET, 9);
    assert_eq!(copies.copy(&mut program, there_and_back, 9), "from here");
    program.front_end.close(&mut program.client, CONTROL);
    assert_eq!(program.front_end.counts(), [0; 4]);
}
