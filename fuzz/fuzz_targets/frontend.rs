//! Whatever programs ask of the driver's device files, in any order: no request panics or reaches
//! the GPU with what the front end did not make, counts stay within their limits, and nothing is
//! left when all files are closed.
#![no_main]

use cuda_socket::{Block, FileId, IoctlRequest, MapRequest, Node, Range, Refused, SharedRange};
use fuzz::books::{Books, VRAM, front_end};
use fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use mdev_core::gpu::Pending;
use mdev_core::units::PAGE_SIZE;
use ipc::mem::SharedMemory;
use vendor_backends::nvidia::frontend::{FrontEnd, Outcome};
use vendor_backends::nvidia::version::Layout;

/// Address of parameters in the program.
const PARAMS: u64 = 0x7000_0000;

/// Requests with the lengths of their arguments, or of nvidia-uvm.
const REQUESTS: [u32; 16] = [
    0xc01c_4634, 0xc018_4635,
    0xc030_462b, 0xc020_462b, 0xc020_462a, 0xc010_4629, 0xc038_4627, 0xc038_464e, 0xc020_464f, 0xc028_465e,
    0xc900_46c8, 0xc004_46c9, 0xc010_46ce, 0xc048_46d2, 0xc230_46d7, 0xc008_46da,
];
const UVM: [u32; 28] = [
    42, 45, 46, 51,
    0x3000_0001, 0x3000_0002, 23, 24, 25, 26, 27, 28, 30, 31, 33, 34, 37, 38, 39, 65, 66, 68, 70, 72, 73, 75, 33, 68,
];
const CLASSES: [u32; 20] = [
    0, 0x41, 0x80, 0x2080, 0x2081, 0x90f1, 0x3e, 0x40, 0xde, 0xa06c, 0x9067, 0x79, 0xc661, 0xc86f, 0xcbc0, 0xc8b5,
    0x50a0, 0x503c, 0x83de, 0x73,
];
const CONTROLS: [u32; 26] = [
    0x101, 0x201, 0x202, 0x205, 0x214, 0x21b, 0x279, 0x288, 0xd01, 0x2080_0110, 0x2080_0111, 0x2080_014a, 0x2080_018d,
    0x2080_018e, 0x2080_0406, 0x2080_1201, 0x2080_1218, 0x2080_1303, 0x2080_1802, 0x2080_3801, 0x906f_0101,
    0x906f_0102, 0xc36f_0108, 0x00de_0001, 0x83de_030c, 0x2080_3001,
];

struct Program<'a> {
    input: Input<'a>,
    front_end: FrontEnd,
    gpu: Books,
    root: u32,
}

impl Program<'_> {
    fn pick(&mut self, from: &[u32]) -> u32 {
        match self.input.byte() {
            0xff => self.input.u32(),
            byte => from[usize::from(byte) % from.len()],
        }
    }

    /// A handle: mostly one of a few.
    fn handle(&mut self) -> u32 {
        match self.input.byte() {
            0xff => self.input.u32(),
            0xe0.. => self.root,
            byte => u32::from(byte & 0xf),
        }
    }

    fn words(&mut self, target: &mut [u8]) {
        let len = usize::from(self.input.byte());
        for bytes in target.chunks_mut(4).take(len) {
            let word = match self.input.byte() & 3 {
                0 => self.handle(),
                1 => 0,
                _ => self.input.number() as u32,
            };
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
    }

    fn argument(&mut self, request: u32, len: usize) -> Vec<u8> {
        let mut argument = vec![0; len];
        self.words(&mut argument);
        let mut put = |at: usize, value: u32| {
            if let Some(target) = argument.get_mut(at..at + 4) {
                target.copy_from_slice(&value.to_le_bytes());
            }
        };
        match request & 0xffff {
            0x462b | 0x462a => {
                put(16, PARAMS as u32);
                put(20, 0);
                put(0, self.root);
                let (object, other) = (self.handle(), self.handle());
                put(4, object);
                if request & 0xff == 0x2b {
                    put(8, other);
                    let class = self.pick(&CLASSES);
                    put(12, class);
                } else {
                    let command = self.pick(&CONTROLS);
                    put(8, command);
                    let len = self.input.number() as u32 & 0x3fff;
                    put(24, len);
                }
            }
            0x4627 | 0x464e => {
                put(0, self.root);
                let object = self.handle();
                put(8, object);
                put(48, u32::from(self.input.byte() & 3));
                if request & 0xff == 0x27 {
                    put(12, 0x71);
                }
            }
            0x4634 | 0x4635 => {
                put(0, self.root);
                put(12, self.root);
            }
            _ if request == 33 => {
                // The range, and the memory behind the array.
                let (memory, fd) = (self.handle(), u32::from(self.input.byte() & 3));
                put(9248, fd);
                put(9252, self.root);
                put(9256, memory);
            }
            _ if request == 25 => {
                let space = self.handle();
                put(16, 0);
                put(20, self.root);
                put(24, space);
            }
            _ => {}
        }
        argument
    }

    fn ioctl(&mut self, file: FileId, request: u32, len: usize) {
        let argument = self.argument(request, len);
        let mut params = vec![0; 400];
        self.words(&mut params);
        let mut request = IoctlRequest {
            file,
            request,
            argument,
            blocks: Vec::new(),
            files: Vec::new(),
            shared: Vec::new(),
            refused: Refused::default(),
        };
        let mut memory = None;
        for _ in 0..8 {
            let shared = memory.as_ref().map(|memory: &SharedMemory| memory.fd.try_clone().expect("a file"));
            match self.front_end.ioctl(&mut self.gpu, &request, shared) {
                Outcome::Fetch(fetch) => {
                    for Range { address, len } in fetch.blocks {
                        assert!(len <= 64 << 10);
                        let at = address.wrapping_sub(PARAMS) as usize;
                        let mut bytes = params.get(at..).unwrap_or_default().to_vec();
                        bytes.resize(len as usize, 0);
                        request.blocks.push(Block { address, bytes });
                    }
                    for fd in fetch.files {
                        if (0..3).contains(&fd) {
                            request.files.push((fd, FileId(fd as u64)));
                        } else {
                            request.refused.files.push(fd);
                        }
                    }
                    for range in fetch.share {
                        if range.len > VRAM {
                            request.refused.share.push(range);
                        } else {
                            memory = SharedMemory::new(c"program", range.len).ok();
                            request.shared.extend(parts_of(range));
                        }
                    }
                }
                Outcome::Done(done, files) => {
                    assert_eq!(done.argument.len(), request.argument.len());
                    assert_eq!(done.places.len(), files.len());
                    if request.request & 0xffff == 0x462b && self.root == 0 && done.errno == 0 {
                        self.root = done.argument.get(8..12).map_or(0, |word| u32::from_le_bytes(word.try_into().expect("4")));
                    }
                    return;
                }
            }
        }
        panic!("the request does not end");
    }
}

/// Returns the parts of a shared range: for some addresses two, in reverse order.
fn parts_of(range: Range) -> Vec<SharedRange> {
    let Range { address, len } = range;
    let first = len / 2 / PAGE_SIZE * PAGE_SIZE;
    if first == 0 || address & PAGE_SIZE == 0 {
        return vec![SharedRange { range, offset: 0 }];
    }
    let later = address.wrapping_add(first);
    vec![
        SharedRange { range: Range { address: later, len: len - first }, offset: 0 },
        SharedRange { range: Range { address, len: first }, offset: len - first },
    ]
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let flags = input.byte();
    let driver = if flags & 1 == 0 { "580.159.04" } else { "550.163.01" };
    let layout = Layout::of_programs(driver).expect("a layout");
    let mut program = Program {
        input,
        front_end: front_end(driver),
        gpu: Books::new(if flags & 2 == 0 { 0 } else { 7 }, flags & 4 == 0),
        root: 0,
    };
    for (file, node) in [Node::Control, Node::Gpu(0), Node::Uvm].into_iter().enumerate() {
        program.front_end.open(FileId(file as u64), node, 1).expect("a file");
    }
    for _ in 0..96 {
        if program.input.is_empty() {
            break;
        }
        let file = FileId(u64::from(program.input.byte() & 3));
        match program.input.byte() {
            0..0x50 => {
                let number = program.pick(&UVM);
                let shapes = vendor_backends::nvidia::frontend::shapes(&layout);
                let shape = shapes.iter().find(|shape| shape.number == number);
                let len = shape.and_then(|shape| shape.argument_bytes).unwrap_or(64);
                let short = usize::from(program.input.byte() == 0xff);
                program.ioctl(FileId(2), number, (len as usize).saturating_sub(short));
            }
            0x50..0xe0 => {
                let request = program.pick(&REQUESTS);
                program.ioctl(file, request, (request >> 16 & 0x3fff) as usize);
            }
            0xe0..0xf0 => {
                let (len, offset) = (program.input.number(), program.input.number());
                let _ = program.front_end.map(&MapRequest { file, len, offset, writable: true });
            }
            0xf0..0xf8 => {
                let pending = Pending::from_bits_truncate(program.input.byte().into());
                let _ = program.front_end.on_gpu_event(&mut program.gpu, pending);
            }
            _ => {
                program.front_end.close(&mut program.gpu, file);
                let node = [Node::Control, Node::Gpu(0), Node::Uvm][(file.0 % 3) as usize];
                let _ = program.front_end.open(file, node, 2);
            }
        }
        assert!(program.front_end.used_video_bytes() <= VRAM);
    }
    for file in 0..4 {
        program.front_end.close(&mut program.gpu, FileId(file));
    }
    assert_eq!(program.front_end.counts(), [0; 4]);
    assert_eq!(program.front_end.used_video_bytes(), 0);
    assert!(program.gpu.is_empty(), "{:?}", program.gpu);
});
