//! Descriptors and memory that programs take up in their worker.

use cuda_socket::{FileId, MapRequest, Node};
use mdev_core::units::{MIB, PAGE_SIZE};
use nix::errno::Errno;
use programs::FrontEnd;
use programs::front_end::{Mapped, Opener};

use crate::program::{CONTROL, Context, GPU, GPU_FD, Program, memory_params, word, words};

const OK: u32 = 0;
const INSUFFICIENT_RESOURCES: u32 = 0x1a;
const INSUFFICIENT_PERMISSIONS: u32 = 0x1b;
const NO_MEMORY: u32 = 0x51;

const SYSTEM: u32 = 0x3e;
/// First handle of memory.
const MEMORY: u32 = 0x10_0000;

fn allocate(program: &mut Program, context: Context, handle: u32, len: u64) -> u32 {
    let params = memory_params(len, PAGE_SIZE);
    program.alloc(context.root, context.device, handle, SYSTEM, &params).0
}

fn free(program: &mut Program, context: Context, handle: u32) {
    let argument = words(&[context.root, context.root, handle, 0xffff]);
    let done = program.ioctl_with(CONTROL, 0xc010_4629, argument, None, &[]);
    assert_eq!((done.errno, word(&done.argument, 3)), (0, 0));
}

/// Makes a mapping of the GPU's file show memory, as another control file's client. Returns the
/// status.
fn show(program: &mut Program, control: FileId, root: u32, memory: u32, len: u64) -> u32 {
    let mut argument = words(&[root, 0, memory, 0, 0, 0]);
    argument.extend(len.to_le_bytes());
    argument.extend(words(&[0, 0, 0xffff, 0, GPU_FD, 0]));
    let done = program.ioctl_with(control, 0xc038_464e, argument, None, &[]);
    assert_eq!(done.errno, 0);
    word(&done.argument, 10)
}

/// Returns the inode of the file that a mapping of the GPU's file shows, and the offset.
fn shown(program: &mut Program, len: u64) -> (u64, u64) {
    let request = MapRequest { file: GPU, len, offset: 0, writable: true };
    match program.front_end.map(&request).unwrap() {
        Mapped::File(fd, offset) => (nix::sys::stat::fstat(&fd).unwrap().st_ino, offset),
        other => panic!("{other:?}"),
    }
}

fn files(program: &Program) -> usize {
    program.front_end.all().files.len()
}

/// Starts another process, with a client of the resource manager.
fn start_other(program: &mut Program, process: i32) -> (FileId, u32) {
    let file = FileId(1000 + u64::from(process.unsigned_abs()));
    program.front_end.open(file, Node::Control, Opener::new(process, None)).unwrap();
    let root = program.ioctl_with(file, 0xc030_462b, vec![0; 48], None, &[]);
    (file, word(&root.argument, 2))
}

#[test]
fn thousands_of_small_allocations_take_few_descriptors() {
    let mut program = Program::start();
    let context = program.context();
    for index in 0..10_000 {
        assert_eq!(allocate(&mut program, context, MEMORY + index, PAGE_SIZE), OK, "{index}");
    }
    assert!(files(&program) <= 12, "{} files", files(&program));
    // They are memory for CPU and GPU.
    for (at, index) in [0, 1, 4999, 9999].into_iter().enumerate() {
        let va = 0x1_0000_0000 + at as u64 * MIB;
        assert_eq!(program.map_for_gpu(context.root, MEMORY + index, va, PAGE_SIZE), OK);
        let mapping = program.map(context.root, MEMORY + index, PAGE_SIZE);
        assert_eq!(mapping.load_u32(0), Some(0), "another's memory");
        mapping.store_u32(0, index + 1).unwrap();
    }
    program.front_end.close(&mut program.client, CONTROL);
    assert_eq!((files(&program), program.front_end.counts()), (0, [0; 4]), "nothing is left");
}

#[test]
fn memory_is_refused_when_all_of_it_is_allocated() {
    let mut program = Program::start();
    let context = program.context();
    let mut count = 0;
    let refused = loop {
        match allocate(&mut program, context, MEMORY + count, MIB) {
            OK => count += 1,
            status => break status,
        }
    };
    assert_eq!((refused, count), (NO_MEMORY, 256), "all that the vGPU may have");
    free(&mut program, context, MEMORY + 7);
    assert_eq!(allocate(&mut program, context, MEMORY + count, MIB), OK);
    assert_eq!(allocate(&mut program, context, MEMORY + count + 1, PAGE_SIZE), NO_MEMORY);
}

#[test]
fn freed_memory_reads_zero_when_it_is_allocated_again() {
    let mut program = Program::start();
    let context = program.context();
    assert_eq!(allocate(&mut program, context, MEMORY, PAGE_SIZE), OK);
    for is_imported in [false, true] {
        if is_imported {
            assert_eq!(program.map_for_gpu(context.root, MEMORY, 0x1_0000_0000, PAGE_SIZE), OK);
        }
        let second = MEMORY + 1;
        assert_eq!(allocate(&mut program, context, second, 3 * PAGE_SIZE), OK);
        let before = program.map(context.root, second, 3 * PAGE_SIZE);
        let place = shown(&mut program, 3 * PAGE_SIZE);
        before.write(0, &[0xa5; 3 * PAGE_SIZE as usize]).unwrap();
        free(&mut program, context, second);
        assert_eq!(allocate(&mut program, context, second, 2 * PAGE_SIZE), OK);
        let after = program.map(context.root, second, 2 * PAGE_SIZE);
        assert_eq!(shown(&mut program, 2 * PAGE_SIZE), place, "the same memory");
        let mut bytes = [1; 2 * PAGE_SIZE as usize];
        after.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "imported: {is_imported}");
        free(&mut program, context, second);
    }
}

#[test]
fn a_program_gets_no_file_with_other_memory_of_another() {
    const LARGE: u32 = MEMORY + 1;
    const REGISTERED: u32 = MEMORY + 2;
    const AGAIN: u32 = 0x30;
    let mut program = Program::start();
    program.attach_gpu_file();
    let context = program.context();
    assert_eq!(allocate(&mut program, context, MEMORY, PAGE_SIZE), OK);
    assert_eq!(allocate(&mut program, context, LARGE, 8 * MIB), OK);
    assert_eq!(program.register(context, REGISTERED, 0x5000_0000, PAGE_SIZE), OK);
    let (other, root) = start_other(&mut program, 2);
    for (memory, len, expected) in [
        (MEMORY, PAGE_SIZE, INSUFFICIENT_PERMISSIONS),
        (REGISTERED, PAGE_SIZE, INSUFFICIENT_PERMISSIONS),
        (LARGE, MIB, OK),
    ] {
        let share = words(&[context.root, memory, 0, 1, 1, 0xffff]);
        let shared = program.ioctl_with(CONTROL, 0xc018_4635, share, None, &[]);
        assert_eq!((shared.errno, word(&shared.argument, 5)), (0, OK));
        let dup = words(&[root, root, AGAIN, context.root, memory, 0, 0xffff]);
        let dup = program.ioctl_with(other, 0xc01c_4634, dup, None, &[]);
        assert_eq!((dup.errno, word(&dup.argument, 6)), (0, OK), "{memory:#x}");
        assert_eq!(show(&mut program, other, root, AGAIN, len), expected, "{memory:#x}");
        // Its owner maps it all the same.
        assert_eq!(show(&mut program, CONTROL, context.root, memory, len), OK, "{memory:#x}");
        let free = words(&[root, root, AGAIN, 0xffff]);
        program.ioctl_with(other, 0xc010_4629, free, None, &[]);
    }
    // Memory of the other program's own is in another file.
    show(&mut program, CONTROL, context.root, MEMORY, PAGE_SIZE);
    let (file, _) = shown(&mut program, PAGE_SIZE);
    let device = program.ioctl_with(
        other,
        0xc020_462b,
        words(&[root, root, 0x10, 0x80, 0, 0, 0, 0]),
        None,
        &[],
    );
    assert_eq!((device.errno, word(&device.argument, 7)), (0, OK));
    let argument = words(&[root, 0x10, 0x20, SYSTEM, 0, 0, 0, 0, 0, 0, 0xffff, 0]);
    let params = memory_params(PAGE_SIZE, 0);
    let done = program.ioctl_with(other, 0xc030_462b, argument, Some(16), &params);
    assert_eq!((done.errno, word(&done.argument, 10)), (0, OK));
    assert_eq!(show(&mut program, other, root, 0x20, PAGE_SIZE), OK);
    assert_ne!(shown(&mut program, PAGE_SIZE).0, file);
}

#[test]
fn others_are_served_while_one_program_holds_all_descriptors_that_it_gets() {
    let mut program = Program::start();
    program.attach_gpu_file();
    let context = program.context();
    // Half of the limit for registered memory, each in a file of its own.
    let mut address = 0x5000_0000;
    for index in 0..250 {
        assert_eq!(program.register(context, MEMORY + index, address, PAGE_SIZE), OK);
        address += PAGE_SIZE;
    }
    let mut opened = 0;
    let refused = loop {
        match program.front_end.open(FileId(10_000 + opened), Node::Control, Opener::new(1, None)) {
            Ok(()) => opened += 1,
            Err(errno) => break errno,
        }
    };
    assert_eq!(refused, Errno::EMFILE);
    assert!((250..4032 / 4).contains(&opened), "{opened}");
    // More memory that takes a descriptor is refused, and memory in an arena is not.
    let more = program.register(context, MEMORY + 300, address, PAGE_SIZE);
    assert_eq!(more, INSUFFICIENT_RESOURCES);
    assert_eq!(
        allocate(&mut program, context, MEMORY + 301, PAGE_SIZE),
        INSUFFICIENT_RESOURCES,
        "there is no arena yet"
    );
    // Each other process has what a context needs.
    for process in 2..=64_i32 {
        for file in 0..47 {
            let id = FileId(100_000 + 100 * u64::from(process.unsigned_abs()) + file);
            let opener = Opener::new(process, None);
            assert_eq!(program.front_end.open(id, Node::Control, opener), Ok(()), "{process}");
        }
    }
    // What the program gives back, it can have again.
    program.front_end.close(&mut program.client, FileId(10_000));
    assert_eq!(allocate(&mut program, context, MEMORY + 301, PAGE_SIZE), OK);
}

/// What [`FrontEnd::memory_file`] names is what programs map.
#[test]
fn each_file_is_named_to_the_anchor() {
    let mut program = Program::start();
    let context = program.context();
    program.front_end.take_changes();
    assert_eq!(allocate(&mut program, context, MEMORY, PAGE_SIZE), OK);
    let changes = program.front_end.take_changes().unwrap();
    let [id] = changes.files[..] else { panic!("{:?}", changes.files) };
    let inode = nix::sys::stat::fstat(program.front_end.memory_file(id).unwrap()).unwrap().st_ino;
    show(&mut program, CONTROL, context.root, MEMORY, PAGE_SIZE);
    assert_eq!(shown(&mut program, PAGE_SIZE).0, inode);
    assert_eq!(allocate(&mut program, context, MEMORY + 1, PAGE_SIZE), OK);
    assert_eq!(program.front_end.take_changes().unwrap().files, [], "in the same arena");
    free(&mut program, context, MEMORY);
    free(&mut program, context, MEMORY + 1);
    assert_eq!(program.front_end.take_changes().unwrap().files, [id]);
    assert!(program.front_end.memory_file(id).is_none());
}
