//! Whatever a guest writes to its control queue: no request panics or reaches the GPU with what the
//! front end did not make, each submission is completed or stops the queue, and nothing is left
//! when the queue is stopped.
#![no_main]

use std::fs::File;
use std::os::unix::fs::FileExt;

use fuzz::books::{Books, front_end};
use fuzz::input::Input;
use fuzz::requests::{Requests, pick};
use libfuzzer_sys::fuzz_target;
use mdev_core::abi::queue::{
    ALLOCATED, File as QueueFile, MAX_MEMORIES, Memory, PAGE_BYTES, PINNED, op,
};
use mdev_core::gpu::Pending;
use mdev_core::ids::GuestPa;
use mdev_core::mem::SharedGuestMemory;
use mdev_core::testing::queue_driver::{Bus, QueueDriver, SLOTS, encode, request};
use mdev_core::testing::shared_ram;
use programs::control_queue::ControlQueue;
use zerocopy::IntoBytes;

const RAM: u64 = 8 << 20;
const BASE: u64 = 0x1_0000;

/// Guest memory; the device is driven by the target itself.
struct Ram(File);

impl Bus for Ram {
    fn read(&mut self, address: u64, bytes: &mut [u8]) {
        self.0.read_exact_at(bytes, address).expect("inside");
    }
    fn write(&mut self, address: u64, bytes: &[u8]) {
        self.0.write_all_at(bytes, address).expect("inside");
    }
    fn notify(&mut self) {}
    fn wait(&mut self) {
        unreachable!("the target does not wait");
    }
}

fn message(input: &mut Input<'_>, driver: &mut QueueDriver<Ram>, requests: &Requests) -> Vec<u8> {
    let (opcode, file) = (u32::from(input.byte() % 8), u64::from(input.byte() % 6));
    if opcode != op::IOCTL {
        let len = usize::from(input.byte());
        let mut rest = vec![0; len % 48];
        for bytes in rest.chunks_mut(4) {
            let word = input.number() as u32;
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
        return [request(opcode, file).as_bytes(), &rest].concat();
    }
    let from = if input.byte() & 1 == 0 { &requests.escapes } else { &requests.uvm };
    let (number, len) = pick(input, from);
    let mut argument = vec![0; len];
    for bytes in argument.chunks_mut(4).take(16) {
        bytes.copy_from_slice(&(input.number() as u32).to_le_bytes()[..bytes.len()]);
    }
    if number & 0xffff == 0x462b && len >= 32 {
        let (class, _) = pick(input, &requests.classes);
        argument[12..16].copy_from_slice(&class.to_le_bytes());
        argument[16..24].copy_from_slice(&0x7000_0000_u64.to_le_bytes());
    }
    let blocks: Vec<_> =
        (input.byte() & 1 == 0).then(|| (0x7000_0000, vec![0; 400])).into_iter().collect();
    let files = [QueueFile { fd: 0, reserved: 0, file: u64::from(input.byte() % 6) }];
    let mut memories = Vec::new();
    for _ in 0..usize::from(input.byte() % 4).min(MAX_MEMORIES) {
        let pages = u64::from(input.byte() % 5);
        let first = u64::from(input.byte()) * PAGE_BYTES as u64;
        let list = RAM - PAGE_BYTES as u64 * u64::from(1 + input.byte() % 8);
        let (kind, address) = if input.byte() & 1 == 0 { (ALLOCATED, 0) } else { (PINNED, 0x1000) };
        let length = pages * PAGE_BYTES as u64;
        let mut page = [0; 48];
        page[8..12].copy_from_slice(&1_u32.to_le_bytes());
        page[16..24].copy_from_slice(&first.to_le_bytes());
        page[24..32].copy_from_slice(&length.to_le_bytes());
        if input.byte() & 0xf == 0 {
            page[0..8].copy_from_slice(&list.to_le_bytes());
        }
        driver.bus.write(list, &page);
        memories.push(Memory {
            id: u64::from(input.byte() % 16),
            address,
            length,
            list,
            kind,
            reserved: 0,
        });
    }
    let mut bytes = encode(file, number, &argument, &blocks, &files, &memories, &[]);
    if input.byte() & 7 == 0 {
        let at = usize::from(input.byte()) * 8 % bytes.len();
        bytes[at] ^= input.byte();
    }
    bytes
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let flags = input.byte();
    let mut gpu = Books::new(if flags & 1 == 0 { 0 } else { 7 }, flags & 2 == 0);
    let memory = SharedGuestMemory::default();
    let ram = shared_ram(&mut memory.lock(), 0, RAM);
    let mut driver = QueueDriver::new(Ram(ram), BASE, RAM);
    let mut queue = ControlQueue::start(
        Box::new(front_end("550.163.01")),
        memory.clone(),
        GuestPa(BASE),
        SLOTS,
    )
    .expect("a queue");
    let requests = Requests::default();
    for _ in 0..48 {
        if input.is_empty() {
            break;
        }
        match input.byte() {
            0..0x10 => {
                // Memory that is not the driver's to change.
                let at = BASE + u64::from(input.byte()) * 16 % 0x3000;
                let word = input.number() as u32;
                driver.bus.write(at, &word.to_le_bytes());
            }
            0x10..0x18 => {
                let _ = queue.on_gpu_event(&mut gpu, Pending::NONSTALL | Pending::CHANNEL_ERROR);
            }
            0x18..0x1c => queue.withdraw_doorbell(),
            0x1c..0x20 => queue.on_woken(),
            _ => {
                let bytes = message(&mut input, &mut driver, &requests);
                driver.fill(&bytes);
                let mut submission = driver.submission(bytes.len() as u32);
                if input.byte() == 0xff {
                    (submission.list, submission.pages) = (input.number(), input.u32());
                }
                driver.submit(&submission);
            }
        }
        let mut serve = || {
            while !queue.is_blocked() && queue.serve(&mut gpu)? {
                queue.flush()?;
            }
            queue.flush()
        };
        if serve().is_err() {
            break;
        }
        // The content can be anything, also the number of completions: the guest writes to the
        // ring, too.
        for _ in 0..SLOTS {
            if driver.completion().is_none() {
                break;
            }
        }
    }
    queue.stop(&mut gpu);
    memory.lock().clear(&mut gpu);
    assert!(gpu.is_empty(), "{gpu:?}");
});
