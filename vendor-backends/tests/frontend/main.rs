//! The driver's device files for CUDA programs, on a software GPU.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod channels;
mod copies;
mod descriptors;
mod faults;
mod program;
mod recording;
mod replay;
mod sharing;
#[path = "../support/soft_vgpu.rs"]
mod soft_vgpu;
#[path = "../support/warnings.rs"]
mod warnings;

use std::os::fd::AsFd;
use std::time::Instant;

use cuda_socket::{FileId, MapRequest, Node};
use ipc::mem::Mapping;
use mdev_core::gpu::{Client, Pending};
use mdev_core::units::{MIB, PAGE_SIZE};
use program::{
    CONTROL, CONTROL_FD, Context, GPU, GPU_FD, Program, UVM, VRAM, memory_params, word, words,
};
use programs::FrontEnd;
use programs::front_end::{Mapped, Opener};
use proptest::prelude::*;

const NO_MEMORY: u32 = 0x51;
const INVALID_ADDRESS: u32 = 0x1e;
const INVALID_CLASS: u32 = 0x22;
const INVALID_CLIENT: u32 = 0x23;
const NOT_SUPPORTED: u32 = 0x56;

const FREE_RANGE: u32 = 34;
const CREATE_EXTERNAL_RANGE: u32 = 73;

const PROGRAM_VA: u64 = 0x2_0000_0000;

#[test]
fn memory_ends_with_the_partition() {
    let mut program = Program::start();
    let context = program.context();
    let (root, device) = (context.root, context.device);
    let info = |program: &mut Program| {
        let mut list = words(&[2, 9, 0, 0x16, 0]);
        list.resize(444, 0);
        let (status, list) = program.control(root, context.subdevice, 0x2080_1303, &list);
        assert_eq!(status, 0);
        [word(&list, 2), word(&list, 4)].map(|kib| u64::from(kib) << 10)
    };
    assert_eq!(info(&mut program), [VRAM, VRAM]);
    let most = memory_params(VRAM - 2 * MIB, 2 * MIB);
    let memory = program.new_object(root, device, 0x20, 0x40, &most);
    assert_eq!(info(&mut program), [VRAM, 2 * MIB]);
    let (status, ..) = program.alloc(root, device, 0x21, 0x40, &memory_params(4 * MIB, 2 * MIB));
    assert_eq!(status, NO_MEMORY);
    let free = words(&[root, device, memory, 0xffff]);
    let done = program.ioctl_with(CONTROL, 0xc010_4629, free, None, &[]);
    assert_eq!((done.errno, word(&done.argument, 3)), (0, 0));
    assert_eq!(info(&mut program), [VRAM, VRAM]);
    // A mapping keeps memory whose object was freed.
    let memory = program.new_object(root, device, 0x22, 0x40, &most);
    assert_eq!(program.map_for_gpu(root, memory, PROGRAM_VA, VRAM - 2 * MIB), 0);
    let free = words(&[root, device, memory, 0xffff]);
    program.ioctl_with(CONTROL, 0xc010_4629, free, None, &[]);
    assert_eq!(info(&mut program), [VRAM, 2 * MIB]);
    let va = [PROGRAM_VA as u32, (PROGRAM_VA >> 32) as u32, 0, 0, 0xffff, 0];
    assert_eq!(word(&program.uvm(34, &va, 24), 4), 0);
    assert_eq!(info(&mut program), [VRAM, VRAM]);
}

#[test]
fn a_program_finds_nothing_of_an_earlier_one() {
    const LEN: u64 = 4 * MIB;
    let mut program = Program::start();
    let context = program.context();
    let vram = program.client.apertures().vram.as_ref().unwrap();
    let left = Mapping::new(vram.fd.as_fd(), vram.offset, VRAM, true).unwrap();
    let zeros = || -> usize {
        let mut bytes = vec![0; VRAM as usize];
        left.read(0, &mut bytes).unwrap();
        bytes.chunks(PAGE_SIZE as usize).filter(|page| page.iter().all(|byte| *byte == 0)).count()
    };
    for _ in 0..2 {
        left.write(0, &vec![0xa5; VRAM as usize]).unwrap();
        let params = memory_params(LEN, 2 * MIB);
        let data = program.new_object(context.root, context.device, 0x21, 0x40, &params);
        assert_eq!(program.map_for_gpu(context.root, data, PROGRAM_VA, LEN), 0);
        assert_eq!(zeros() as u64, LEN / PAGE_SIZE, "its own memory, and no other");
        let free = words(&[context.root, context.device, data, 0xffff]);
        program.ioctl_with(CONTROL, 0xc010_4629, free, None, &[]);
        let va = [PROGRAM_VA as u32, (PROGRAM_VA >> 32) as u32, 0, 0, 0xffff, 0];
        assert_eq!(word(&program.uvm(34, &va, 24), 4), 0);
    }
}

#[test]
fn a_program_cannot_use_the_objects_of_another() {
    let mut program = Program::start();
    let context = program.context();
    let other = FileId(77);
    program.front_end.open(other, Node::Control, Opener::new(2, None)).unwrap();
    let argument = words(&[context.root, context.device, 0x80_0280, 0, 0, 0, 4, 0]);
    let done = program.ioctl_with(other, 0xc020_462a, argument, Some(16), &[0; 4]);
    assert_eq!((done.errno, word(&done.argument, 7)), (0, INVALID_CLIENT));
    // The other program ends; the first continues.
    program.front_end.close(&mut program.client, other);
    let (status, _) = program.control(context.root, context.device, 0x80_0280, &[0; 4]);
    assert_eq!(status, 0);
}

#[test]
fn what_a_vgpu_does_not_have_is_refused_with_the_drivers_status() {
    let mut program = Program::start();
    let context = program.context();
    let (status, ..) = program.alloc(context.root, context.device, 0x50, 0x1234, &[0; 64]);
    assert_eq!(status, INVALID_CLASS);
    let (status, _) = program.control(context.root, context.subdevice, 0x2080_ffff, &[0; 8]);
    assert_eq!(status, NOT_SUPPORTED);
    let done = program.ioctl_with(CONTROL, 0xc010_46ff, vec![0; 16], None, &[]);
    assert_eq!(done.errno, libc::EINVAL);
    let done = program.ioctl_with(UVM, 52, vec![0; 64], None, &[]);
    assert_eq!(done.errno, libc::EINVAL);
    assert_eq!(program.front_end.refused(), 4);
}

#[test]
fn a_programs_own_pages_become_memory_of_the_gpu() {
    let mut program = Program::start();
    let context = program.context();
    let address = 0x7fff_0000_0000;
    // The file of the GPU has no clients before it is attached to a control file.
    assert_eq!(program.register(context, 0x60, address, 2 * MIB), INVALID_CLIENT);
    program.attach_gpu_file();
    assert_eq!(program.register(context, 0x60, address, 2 * MIB), 0);
    assert_eq!(program.map_for_gpu(context.root, 0x60, address, 2 * MIB), 0);
}

#[test]
fn a_list_behind_a_pointer_is_answered() {
    let mut program = Program::start();
    let context = program.context();
    // Indices and data begin behind the parameters.
    let mut params = words(&[3, 0, program::PARAMS as u32 + 32, 0, 0, 0, 0, 0]);
    params.extend(words(&[0xc, 7, 0x2c, 7, 0, 7]));
    let argument = words(&[context.root, context.subdevice, 0x2080_1201, 0, 0, 0, 32, 0xffff]);
    let done = program.ioctl_with(CONTROL, 0xc020_462a, argument, Some(16), &params);
    assert_eq!((done.errno, word(&done.argument, 7)), (0, 0));
    // Compute capability 9.0 and 64 subcontexts.
    assert_eq!(done.params[32..], words(&[0xc, 0x900, 0x2c, 64, 0, 0]));
}

#[test]
fn a_large_tree_of_objects_is_freed_as_fast_as_it_was_made() {
    // The best of three: another process may run in between.
    let ratios = (0..3).map(|_| {
        let mut program = Program::start();
        let context = program.context();
        let (root, device) = (context.root, context.device);
        let start = Instant::now();
        for handle in 0..20_000 {
            program.new_object(root, device, 0x1_0000 + handle, 0x2080, &[0; 4]);
        }
        let made = start.elapsed();
        let start = Instant::now();
        let free = words(&[root, root, device, 0xffff]);
        let done = program.ioctl_with(CONTROL, 0xc010_4629, free, None, &[]);
        assert_eq!((done.errno, word(&done.argument, 3)), (0, 0));
        assert_eq!(program.front_end.counts()[1], 0);
        start.elapsed().as_secs_f64() / made.as_secs_f64()
    });
    // It was some 200 with a search of all objects for each object.
    let best = ratios.fold(f64::INFINITY, f64::min);
    assert!(best < 10.0, "{best}");
}

#[test]
fn the_number_of_status_pages_is_limited() {
    const STATUS_PAGE: u32 = 0xde;
    const INSUFFICIENT_RESOURCES: u32 = 0x1a;
    let mut program = Program::start();
    let context = program.context();
    let allocate = |program: &mut Program, handle| {
        program.alloc(context.root, context.subdevice, handle, STATUS_PAGE, &[0; 8]).0
    };
    assert!((0..256).all(|at| allocate(&mut program, 0x100 + at) == 0));
    assert_eq!(allocate(&mut program, 0x200), INSUFFICIENT_RESOURCES);
}

#[test]
fn an_address_space_may_begin_anywhere() {
    let mut program = Program::start();
    let context = program.context();
    let mut params = vec![0; 48];
    params[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
    params[40..48].copy_from_slice(&u64::MAX.to_le_bytes());
    program.alloc(context.root, context.device, 0x50, 0x90f1, &params);
}

#[test]
fn managed_memory_is_shared_memory_at_the_programs_address() {
    const DISABLE_READ_DUPLICATION: u32 = 45;
    let mut program = Program::start();
    program.context();
    let (va, len) = (0x7f00_0000_0000_u64, 2 * MIB);
    let range = [va as u32, (va >> 32) as u32, len as u32, 0, 0xffff, 0];
    // Nothing is done to addresses that the program did not map from nvidia-uvm.
    let refused = program.uvm(DISABLE_READ_DUPLICATION, &range, 24);
    assert_eq!(word(&refused, 4), INVALID_ADDRESS);
    let request = MapRequest { file: UVM, len, offset: va, writable: true };
    assert!(program.front_end.map(&request).is_err());
    assert_eq!(word(&program.uvm(DISABLE_READ_DUPLICATION, &range, 24), 4), 0);
    assert!(matches!(program.front_end.map(&request), Ok(Mapped::File(..))));
    // It never moves: a migration ends at once.
    let mut migrate = range.to_vec();
    migrate.resize(20, 0);
    assert_eq!(word(&program.uvm(51, &migrate, 80), 18), 0);
    assert_eq!(word(&program.uvm(FREE_RANGE, &range, 24), 4), 0);
    assert!(program.front_end.map(&request).is_err());
    // A program unmaps a range without a request, and a later one overlaps it.
    assert_eq!(word(&program.uvm(DISABLE_READ_DUPLICATION, &range, 24), 4), 0);
    for (offset, len) in [(va - MIB, 4 * MIB), (va + MIB, 8 * MIB)] {
        let request = MapRequest { file: UVM, len, offset, writable: true };
        assert!(program.front_end.map(&request).is_err());
        let range = [offset as u32, (offset >> 32) as u32, len as u32, 0, 0xffff, 0];
        assert_eq!(word(&program.uvm(DISABLE_READ_DUPLICATION, &range, 24), 4), 0);
        assert_eq!(program.front_end.counts()[3], 1, "one range is mapped");
    }
    // So does ordinary memory.
    let range = [0, (va >> 32) as u32, 4 * MIB as u32, 0, 0xffff, 0];
    assert_eq!(word(&program.uvm(CREATE_EXTERNAL_RANGE, &range, 24), 4), 0);
    assert_eq!(program.front_end.counts()[3], 0);
}

#[test]
fn an_external_range_ends_with_its_mappings() {
    let mut program = Program::start();
    let Context { root, device, .. } = program.context();
    let memory = program.new_object(root, device, 0x20, 0x40, &memory_params(MIB, MIB));
    let va = 0x7f00_0000_0000;
    let range = [0, (va >> 32) as u32, 8 * MIB as u32, 0, 0xffff, 0];
    for _ in 0..2 {
        assert_eq!(word(&program.uvm(CREATE_EXTERNAL_RANGE, &range, 24), 4), 0);
        for at in [0, 2 * MIB, 7 * MIB] {
            assert_eq!(program.map_for_gpu(root, memory, va + at, MIB), 0);
        }
        assert_eq!(program.front_end.counts()[3], 3);
        assert_eq!(word(&program.uvm(FREE_RANGE, &range, 24), 4), 0);
        assert_eq!(program.front_end.counts()[3], 0);
    }
}

#[test]
fn a_gpu_has_no_way_to_itself_nor_to_others() {
    const P2P_CAPS: u32 = 0x12b;
    const PROBED_IDS: u32 = 0x214;
    let mut program = Program::start();
    let root = program.context().root;
    let (_, ids) = program.control(root, root, PROBED_IDS, &[0; 384]);
    let mut asked = vec![0; 8348];
    asked[..4].copy_from_slice(&ids[..4]);
    asked[4..8].copy_from_slice(&ids[..4]);
    asked[128..132].copy_from_slice(&words(&[2]));
    let (status, caps) = program.control(root, root, P2P_CAPS, &asked);
    assert_eq!((status, &caps[..132]), (0, &asked[..132]));
    assert_eq!(caps[132..144], [0; 12], "no capabilities and copy engines");
    assert_eq!(caps[144..156], [5, 5, 5, 5, 5, 5, 5, 5, 5, 0, 0, 0], "none is supported");
    assert!(caps[156..].iter().all(|byte| *byte == 0xff), "no peers");
    asked[4] ^= 1;
    assert_ne!(program.control(root, root, P2P_CAPS, &asked).0, 0, "another GPU");
    assert_ne!(program.control(root, root, P2P_CAPS, &asked[..150]).0, 0);
}

#[test]
fn a_request_for_interrupts_is_answered() {
    const SERVICE_INTERRUPTS: u32 = 0x2080_1702;
    let mut program = Program::start();
    let context = program.context();
    let (status, _) =
        program.control(context.root, context.subdevice, SERVICE_INTERRUPTS, &[0xff; 4]);
    assert_eq!(status, 0);
}

#[test]
fn an_interrupt_is_no_error_of_a_channel() {
    let mut program = Program::start();
    let context = program.context();
    let (root, device) = (context.root, context.device);
    let ring = program.new_object(root, device, 0x20, 0x40, &memory_params(2 * MIB, 2 * MIB));
    program.map(root, ring, 2 * MIB);
    assert_eq!(program.map_for_gpu(root, ring, PROGRAM_VA, 2 * MIB), 0);
    let group = words(&[0, 0, context.space, 9, 0]);
    let group = program.new_object(root, device, 0x30, 0xa06c, &group);
    let mut params = vec![0; 368];
    for (at, value) in [(16, 1024), (32, ring), (64, 2 * PAGE_SIZE as u32)] {
        params[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    params[8..16].copy_from_slice(&PROGRAM_VA.to_le_bytes());
    let channel = program.new_object(root, group, 0x32, 0xc86f, &params);
    let engine = program.new_object(root, channel, 0x33, 0xc8b5, &[0; 8]);
    // As libcuda does: one for interrupts of an engine, one for what befalls a channel.
    for (parent, handle, fd) in [(context.subdevice, 0x40, GPU_FD), (engine, 0x41, CONTROL_FD)] {
        let event = words(&[root, 0, 0x79, 0x3800_0019, fd, 0]);
        program.new_object(root, parent, handle, 0x79, &event);
    }
    for (pending, due) in [
        (Pending::NONSTALL, vec![GPU]),
        (Pending::CHANNEL_ERROR, vec![GPU]),
        (Pending::DEVICE_LOST, vec![CONTROL, GPU]),
    ] {
        assert_eq!(program.front_end.on_gpu_event(&mut program.client, pending), due);
    }
}

fn request() -> impl Strategy<Value = u32> {
    prop_oneof![
        prop::sample::select(vec![
            0xc030_462b,
            0xc020_462a,
            0xc010_4629,
            0xc038_4627,
            0xc038_464e,
            0xc01c_4634,
            0xc018_4635,
            0xc900_46c8,
            0xc004_46c9,
            0xc010_46ce,
            0xc048_46d2,
            0xc008_46d6,
            0xc230_46d7,
        ]),
        prop::sample::select(vec![23, 25, 27, 33, 34, 37, 45, 51, 65, 66, 68, 72, 0x3000_0001]),
        any::<u32>(),
    ]
}

/// Words that mean something in one place or another.
fn meaningful() -> impl Strategy<Value = u32> {
    let known = vec![
        0,
        1,
        2,
        4,
        9,
        16,
        64,
        0x10,
        0x11,
        0x12,
        0x20,
        0x3e,
        0x40,
        0x71,
        0x79,
        0x80,
        0xde,
        0x2080,
        0x90f1,
        0xa06c,
        0x9067,
        0xc86f,
        0xc8b5,
        0xcbc0,
        0xc661,
        0xd01,
        0x101,
        0x201,
        0x2080_1303,
        0x2080_014a,
        0xc36f_0108,
        0x906f_0101,
        0x20_0000,
        0x7000_0000,
        0xc1d0_0001,
        CONTROL_FD,
        GPU_FD,
        u32::MAX,
    ];
    prop_oneof![8 => prop::sample::select(known), 1 => any::<u32>()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_requests_leave_nothing_behind(
        requests in prop::collection::vec(
            (0_u64..4, request(), prop::collection::vec(meaningful(), 0..14),
             prop::collection::vec(meaningful(), 0..96), any::<bool>()),
            1..120,
        ),
        ready in any::<bool>(),
    ) {
        let mut program = Program::start();
        if ready {
            let context = program.context();
            program.new_object(context.root, context.device, 0x20, 0x40, &memory_params(MIB, 0));
        }
        for (file, request, argument, params, has_params) in requests {
            let argument = words(&argument);
            let pointer = (has_params && argument.len() >= 24).then_some(16);
            program.ioctl_with(FileId(file), request, argument, pointer, &words(&params));
            program.front_end.on_gpu_event(&mut program.client, Pending::CHANNEL_ERROR);
        }
        for file in [UVM, GPU, CONTROL] {
            program.front_end.close(&mut program.client, file);
        }
        prop_assert_eq!(program.front_end.counts(), [0; 4]);
        prop_assert_eq!(program.front_end.used_video_bytes(), 0);
    }
}
