//! Programs in a VM: a guest's driver on the control queue of a vGPU on a software GPU.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "support/soft_vgpu.rs"]
mod soft_vgpu;

use std::fs::File;
use std::os::unix::fs::FileExt;

use mdev_core::abi::queue::{
    ALLOCATED, Call, Failure, MAX_PAGES, Memory, PAGE_BYTES, PINNED, ProcFile, Request, Submission,
    Welcome, Withdrawn, completion, index, mapped, node, op,
};
use mdev_core::gpu::{ClientSpec, Pending};
use mdev_core::ids::{GuestPa, VgpuId};
use mdev_core::mem::SharedGuestMemory;
use mdev_core::testing::queue_driver::{Bus, QueueDriver, SLOTS, encode, request};
use mdev_core::testing::shared_ram;
use mdev_core::units::MIB;
use programs::FrontEnd;
use programs::control_queue::ControlQueue;
use proptest::prelude::*;
use vendor_backends::mediator::MediatedClient;
use vendor_backends::nvidia::frontend::testing::program::Program;
use vendor_backends::nvidia::frontend::testing::{front_end, identity, memory_params, word, words};
use zerocopy::{FromBytes, IntoBytes};

/// Guest RAM, and where the queue is in it.
const RAM: u64 = 32 * MIB;
const BASE: u64 = 0x10_0000;
const VRAM: u64 = 64 * MIB;

const EBADF: u32 = 9;
const EFAULT: u32 = 14;
const EINVAL: u32 = 22;
const ENOSYS: u32 = 38;

/// A vGPU of a software GPU, and its guest's memory.
struct Device {
    ram: File,
    queue: Option<ControlQueue>,
    client: MediatedClient,
    failure: Option<Failure>,
    _held: soft_vgpu::Held,
}

impl Bus for Device {
    fn read(&mut self, address: u64, bytes: &mut [u8]) {
        self.ram.read_exact_at(bytes, address).unwrap();
    }

    fn write(&mut self, address: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, address).unwrap();
    }

    fn notify(&mut self) {
        let queue = self.queue.as_mut().unwrap();
        let mut served = || -> Result<(), Failure> {
            while queue.serve(&mut self.client)? {
                queue.flush()?;
            }
            queue.flush().map(drop)
        };
        self.failure = served().err();
    }

    fn wait(&mut self) {
        panic!("the device has not answered: {:?}", self.failure);
    }
}

fn new_front_end() -> Box<dyn FrontEnd> {
    Box::new(front_end(identity("550.163.01", VRAM), 64 * MIB))
}

type Driver = QueueDriver<Device>;

/// Returns a driver whose queue runs.
fn start() -> Driver {
    let spec = ClientSpec {
        vgpu: VgpuId::random(),
        vram_bytes: VRAM,
        framebuffer_bytes: 0,
        max_channels: 8,
        max_import_bytes: 64 * MIB,
    };
    let (client, held) = soft_vgpu::start(&spec);
    let memory = SharedGuestMemory::default();
    let ram = shared_ram(&mut memory.lock(), 0, RAM);
    let device = Device { ram, queue: None, client, failure: None, _held: held };
    let mut driver = QueueDriver::new(device, BASE, RAM);
    let queue = ControlQueue::start(new_front_end(), memory, GuestPa(BASE), SLOTS).unwrap();
    driver.bus.queue = Some(queue);
    driver
}

#[test]
fn the_welcome_says_what_programs_see() {
    let mut driver = start();
    let reply = driver.request(request(op::HELLO, 0).as_bytes());
    let (welcome, _) = Welcome::read_from_prefix(&reply).unwrap();
    assert_eq!((welcome.reply.error, welcome.rm_major, welcome.minors), (0, 195, 1));
    let calls = &reply[welcome.calls_offset as usize..];
    let calls: Vec<_> = (0..welcome.calls as usize)
        .map(|at| Call::read_from_prefix(&calls[at * size_of::<Call>()..]).unwrap().0)
        .collect();
    let control = calls.iter().find(|call| call.nodes == 1 && call.number == 0x2a).unwrap();
    assert_eq!((control.pointer, control.length, control.flags), (16, 24, 2));
    let files = &reply[welcome.proc_files_offset as usize..];
    let mut version = None;
    for at in 0..welcome.proc_files as usize {
        let (file, _) = ProcFile::read_from_prefix(&files[at * size_of::<ProcFile>()..]).unwrap();
        let text = |offset: u32, len: u32| {
            String::from_utf8(reply[offset as usize..(offset + len) as usize].to_vec()).unwrap()
        };
        if text(file.path_offset, file.path_bytes) == "version" {
            version = Some(text(file.content_offset, file.content_bytes));
        }
    }
    assert!(version.unwrap().contains("550.163.01"));
}

#[test]
fn programs_of_different_users_share_memory_as_policies_say() {
    const INSUFFICIENT_PERMISSIONS: u32 = 0x1b;
    /// `RS_SHARE_TYPE_OS_SECURITY_TOKEN`.
    const USER: u32 = 2;
    const ROOT_USER: u32 = 1;
    let mut driver = start();
    let mut taken = |users: [u32; 2]| {
        let [mut owner, mut other] = [7, 8]
            .map(|process| Program::start_as(&mut driver, process, users[process as usize - 7]));
        let memory = memory_params(MIB, 0);
        owner.alloc(&mut driver, owner.root, 0x10, 0x80, &[0; 56]).unwrap();
        owner.alloc(&mut driver, 0x10, 0x20, 0x40, &memory).unwrap();
        let share = words(&[owner.root, 0x20, 0, 1, USER, 0xffff]);
        let done = driver.ioctl(&mut owner.process, owner.control, 0xc018_4635, &share);
        assert_eq!((done.errno, word(&done.argument, 5)), (0, 0));
        let take = words(&[other.root, other.root, 0x30, owner.root, 0x20, 0, 0xffff]);
        let done = driver.ioctl(&mut other.process, other.control, 0xc01c_4634, &take);
        assert_eq!(done.errno, 0);
        word(&done.argument, 6)
    };
    assert_eq!(taken([1001, 1001]), 0);
    assert_eq!(taken([ROOT_USER, ROOT_USER]), 0);
    assert_eq!(taken([1001, 1002]), INSUFFICIENT_PERMISSIONS);
    assert_eq!(taken([1001, 0]), INSUFFICIENT_PERMISSIONS);
    assert_eq!(taken([0, 0]), INSUFFICIENT_PERMISSIONS, "an old driver does not tell");
}

#[test]
fn system_memory_is_the_guests_until_it_is_freed() {
    let mut driver = start();
    let mut program = Program::start(&mut driver);
    program.space(&mut driver);
    let len = 64 * PAGE_BYTES as u64;
    let memory = program.alloc(&mut driver, 0x10, 0x20, 0x3e, &memory_params(len, 0)).unwrap();
    assert_eq!(driver.memories.len(), 1, "the guest has allocated it");
    program.make_mapping(&mut driver, memory, len);
    let id = *driver.memories.keys().next().unwrap();
    assert_eq!(driver.map(program.gpu, len, 0), Ok((mapped::MEMORY, id)));
    assert_eq!(driver.map(program.gpu, len + 1, 0), Err(EINVAL));
    // Scattered pages are mapped for the GPU, and stay in use as long as a mapping does.
    let va = 0x100_0000_0000;
    assert_eq!(program.map_for_gpu(&mut driver, memory, va, len), 0);
    program.free(&mut driver, memory);
    assert_eq!(driver.memories.len(), 1);
    let mut unmap = [va, len].map(u64::to_le_bytes).concat();
    unmap.resize(40, 0);
    let done = driver.ioctl(&mut program.process, program.uvm, 66, &unmap);
    assert_eq!((done.errno, word(&done.argument, 8)), (0, 0));
    assert_eq!(driver.memories.len(), 0, "the device has told that it is free");
}

#[test]
fn a_pool_is_placed_in_the_program() {
    let mut driver = start();
    let mut program = Program::start(&mut driver);
    program.space(&mut driver);
    let (va, len) = (0x7f00_0000_0000_u64, 4 * PAGE_BYTES as u64);
    assert_eq!(driver.map(program.uvm, len, va), Ok((mapped::EMPTY, 0)));
    let mut argument = vec![0; 9248];
    argument[..8].copy_from_slice(&va.to_le_bytes());
    argument[8..16].copy_from_slice(&len.to_le_bytes());
    let done = driver.ioctl(&mut program.process, program.uvm, 68, &argument);
    let id = *driver.memories.keys().next().unwrap();
    assert_eq!((done.errno, done.places), (0, vec![[va, len, id, 0]]));
    assert_eq!(driver.map(program.uvm, len, va), Ok((mapped::MEMORY, id)));
    for file in [program.uvm, program.gpu, program.control] {
        driver.close(file).unwrap();
    }
    driver.collect();
    assert!(driver.memories.is_empty(), "a closed file keeps no memory");
    assert_eq!(driver.bus.queue.as_ref().unwrap().counts(), (0, 0));
}

#[test]
fn pages_of_a_program_are_pinned_as_long_as_they_are_used() {
    let mut driver = start();
    let mut program = Program::start(&mut driver);
    program.space(&mut driver);
    let (address, len) = (0x5000_0000_u64, 300 * PAGE_BYTES as u64);
    let mut argument = words(&[program.root, 0x10, 0x30, 0x71, 0, 0]);
    argument.extend(address.to_le_bytes());
    argument.extend((len - 1).to_le_bytes());
    argument.resize(56, 0);
    let done = driver.ioctl(&mut program.process, program.control, 0xc038_4627, &argument);
    assert_eq!((done.errno, word(&done.argument, 10)), (0, 0));
    assert_eq!(driver.memories.len(), 1);
    assert_eq!(program.map_for_gpu(&mut driver, 0x30, 0x1000_0000, len), 0);
    driver.close(program.control).unwrap();
    driver.collect();
    assert!(driver.memories.is_empty());
}

#[test]
fn requests_with_errors_are_answered() {
    let mut driver = start();
    let error = |driver: &mut Driver, request: &[u8]| word(&driver.request(request), 1);
    assert_eq!(error(&mut driver, &[]), EINVAL);
    assert_eq!(error(&mut driver, request(99, 0).as_bytes()), ENOSYS);
    assert_eq!(error(&mut driver, request(op::CLOSE, 77).as_bytes()), EBADF);
    assert_eq!(error(&mut driver, request(op::OPEN, 0).as_bytes()), EINVAL);
    assert_eq!(driver.open(node::UVM + 1, 1), Err(EINVAL));
    assert_eq!(driver.open(node::GPU, u32::MAX), Err(EINVAL));
    let mut outside = encode(1, 0xc030_462b, &[0; 48], &[], &[], &[], &[]);
    outside[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(error(&mut driver, &outside), EINVAL);
    assert_eq!(driver.map(5, 4096, 0), Err(EBADF));
}

#[test]
fn bad_lists_of_pages_come_back() {
    let mut driver = start();
    let program = Program::start(&mut driver);
    let page = |address| (address, PAGE_BYTES as u64);
    let send = |driver: &mut Driver, memory: Memory| {
        let request = encode(program.control, 0xc004_46c9, &[0; 4], &[], &[], &[memory], &[0]);
        let error = word(&driver.request(&request), 1);
        driver.collect();
        (error, driver.memories.len())
    };
    let good = driver.memory_of(PINNED, 0x1000, vec![page(BASE)]);
    assert_eq!(send(&mut driver, good), (EBADF, 0), "what no request needs comes back");
    let cases = [
        |memory: &mut Memory| memory.list = 1,
        |memory: &mut Memory| memory.list = 0,
        |memory: &mut Memory| memory.length += PAGE_BYTES as u64,
        |memory: &mut Memory| memory.kind = 9,
        |memory: &mut Memory| (memory.kind, memory.address) = (ALLOCATED, 4096),
    ];
    for change in cases {
        let mut memory = driver.memory_of(PINNED, 0x1000, vec![page(BASE)]);
        change(&mut memory);
        assert_eq!(send(&mut driver, memory), (EINVAL, 0));
    }
    let mut memory = driver.memory_of(PINNED, 0x1000, vec![page(BASE)]);
    memory.list = RAM;
    assert_eq!(send(&mut driver, memory), (EFAULT, 0));
    for range in [(BASE + 1, PAGE_BYTES as u64), (BASE, 0), (u64::MAX - 4095, 8192)] {
        let memory = driver.memory_of(PINNED, 0x1000, vec![range]);
        assert_eq!(send(&mut driver, memory), (EINVAL, 0), "{range:x?}");
    }
    // A list without an end.
    let memory = driver.memory_of(PINNED, 0x1000, vec![page(BASE)]);
    driver.bus.write(memory.list, &memory.list.to_le_bytes());
    assert_eq!(send(&mut driver, memory), (EINVAL, 0));
    // The same id twice: there is one memory.
    let memory = driver.memory_of(PINNED, 0x1000, vec![page(BASE)]);
    let twice = [memory, memory];
    let request = encode(program.control, 0xc004_46c9, &[0; 4], &[], &[], &twice, &[]);
    assert_eq!(word(&driver.request(&request), 1), EINVAL);
    assert!(driver.memories.is_empty());
}

#[test]
fn rings_and_buffers_that_cannot_be_stop_the_queue() {
    let expect = |prepare: &dyn Fn(&mut Driver), failure| {
        let mut driver = start();
        prepare(&mut driver);
        driver.bus.notify();
        assert_eq!(driver.bus.failure, Some(failure));
    };
    let tail = |driver: &mut Driver, tail: u32| {
        driver.bus.write(BASE + index::SUBMIT_TAIL, &tail.to_le_bytes());
    };
    expect(&|driver| tail(driver, SLOTS + 1), Failure::Ring);
    expect(&|driver| tail(driver, u32::MAX), Failure::Ring);
    let submit = |change: fn(&mut Submission)| {
        move |driver: &mut Driver| {
            driver.fill(request(op::HELLO, 0).as_bytes());
            let mut submission = driver.submission(16);
            change(&mut submission);
            driver.submit(&submission);
        }
    };
    expect(&submit(|it| it.pages = 0), Failure::Submission);
    expect(&submit(|it| it.pages = MAX_PAGES as u32 + 1), Failure::Submission);
    expect(&submit(|it| (it.pages, it.bytes) = (1, 4097)), Failure::Submission);
    expect(&submit(|it| it.bytes = u32::MAX), Failure::Submission);
    expect(&submit(|it| it.list += 4), Failure::Submission);
    expect(&submit(|it| it.list = u64::MAX - 7), Failure::Access);
    expect(&submit(|it| it.list = RAM), Failure::Access);
    expect(
        &|driver| {
            driver.bus.write(BASE + index::COMPLETE_HEAD, &1_u32.to_le_bytes());
            submit(|_| {})(driver);
        },
        Failure::Ring,
    );
    let bad = |base, slots| {
        let memory = SharedGuestMemory::default();
        shared_ram(&mut memory.lock(), 0, RAM);
        ControlQueue::start(new_front_end(), memory, GuestPa(base), slots).map(drop).unwrap_err()
    };
    for (base, slots) in [(BASE + 1, 8), (BASE, 0), (BASE, 12), (BASE, 512), (BASE, 4), (RAM, 8)] {
        assert_eq!(bad(base, slots), Failure::Config, "{base:#x} {slots}");
    }
    assert_eq!(bad(u64::MAX - 4095, 8), Failure::Config);
}

#[test]
fn completions_wait_for_room() {
    let mut driver = start();
    driver.fill(request(99, 0).as_bytes());
    let mut done = 0;
    for round in 0..5 {
        for _ in 0..SLOTS {
            let submission = driver.submission(16);
            driver.submit(&submission);
        }
        driver.bus.notify();
        let queue = driver.bus.queue.as_mut().unwrap();
        assert_eq!(queue.is_blocked(), round == 4, "{round}");
    }
    while let Some(completion) = driver.completion() {
        assert_eq!(completion.kind, completion::DONE);
        done += 1;
        driver.bus.notify();
    }
    assert_eq!(done, 5 * SLOTS);
}

#[test]
fn the_doorbell_page_is_withdrawn_by_agreement() {
    let mut driver = start();
    let _program = Program::start(&mut driver);
    let ask = |driver: &mut Driver| {
        driver.bus.queue.as_mut().unwrap().withdraw_doorbell();
        driver.bus.notify();
        driver.collect();
        let asked = driver.events.pop_front();
        asked.filter(|it| it.kind == completion::WITHDRAW).map(|it| it.value)
    };
    let acknowledge = |driver: &mut Driver, generation| {
        let request = Withdrawn { request: request(op::WITHDRAWN, 0), generation };
        assert_eq!(word(&driver.request(request.as_bytes()), 1), 0);
        !driver.bus.queue.as_ref().unwrap().is_doorbell_given()
    };
    let first = ask(&mut driver).unwrap();
    assert_eq!(ask(&mut driver), None, "it was asked already");
    // A program takes the page again before the guest has answered.
    driver.bus.queue.as_mut().unwrap().on_woken();
    assert!(!acknowledge(&mut driver, first));
    let second = ask(&mut driver).unwrap();
    assert!(!acknowledge(&mut driver, first));
    assert!(acknowledge(&mut driver, second));
    driver.bus.queue.as_mut().unwrap().on_woken();
    assert!(driver.bus.queue.as_ref().unwrap().is_doorbell_given());
}

#[test]
fn a_lost_gpu_stops_the_queue() {
    let mut driver = start();
    let Device { queue, client, .. } = &mut driver.bus;
    let result = queue.as_mut().unwrap().on_gpu_event(client, Pending::DEVICE_LOST);
    assert_eq!(result, Err(Failure::Lost));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever a guest sends, it gets an answer, and all of its memory back.
    #[test]
    fn any_request_is_answered(
        requests in proptest::collection::vec(
            (1_u32..7, 0_u64..5, proptest::collection::vec(any::<u8>(), 0..200), 0_u32..4),
            1..24,
        ),
    ) {
        let mut driver = start();
        let program = Program::start(&mut driver);
        for (opcode, file, bytes, memories) in requests {
            let mut message = match opcode {
                op::IOCTL => {
                    let memories: Vec<_> =
                        (0..memories).map(|_| driver.new_memory(ALLOCATED, 0, 8192)).collect();
                    encode(file, 0xc030_462b, &bytes, &[], &[], &memories, &[])
                }
                _ => [request(opcode, file).as_bytes(), &bytes].concat(),
            };
            if opcode == op::IOCTL && bytes.first().is_some_and(|byte| byte & 1 == 1) {
                let at = 16 + usize::from(bytes[0]) * 4 % 32;
                message[at] ^= bytes.get(1).copied().unwrap_or(1);
            }
            prop_assert!(driver.request(&message).len() >= size_of::<Request>() / 2);
        }
        for file in 1..40 {
            let _ = driver.close(file);
        }
        let _ = program;
        driver.collect();
        let used = driver.bus.queue.as_ref().unwrap().counts();
        prop_assert_eq!(used, (0, 0));
    }
}
