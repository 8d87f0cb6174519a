//! Whatever programs ask of the driver's device files, in any order: no request panics or reaches
//! the GPU with what the front end did not make, counts stay within their limits, and nothing is
//! left when all files are closed.
#![no_main]

use std::mem::offset_of;

use cuda_socket::{Block, FileId, IoctlRequest, MapRequest, Node, Range, Refused, SharedRange};
use fuzz::books::{Books, VRAM, front_end};
use fuzz::input::Input;
use fuzz::requests::{Requests, pick};
use ipc::mem::SharedMemory;
use libfuzzer_sys::fuzz_target;
use mdev_core::gpu::Pending;
use mdev_core::units::PAGE_SIZE;
use nvidia_rm::abi::uvm::MapExternal;
use programs::FrontEnd;
use programs::front_end::{Opener, Outcome};
use vendor_backends::nvidia::frontend::NvidiaFrontEnd;

/// Address of parameters in the program.
const PARAMS: u64 = 0x7000_0000;

struct Program<'a> {
    input: Input<'a>,
    front_end: NvidiaFrontEnd,
    gpu: Books,
    root: u32,
    requests: Requests,
}

impl Program<'_> {
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
                    let (class, _) = pick(&mut self.input, &self.requests.classes);
                    put(12, class);
                } else {
                    let (command, mut len) = pick(&mut self.input, &self.requests.controls);
                    if self.input.byte() & 7 == 0 {
                        len = self.input.number() as usize & 0x3fff;
                    }
                    put(8, command);
                    put(24, len as u32);
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
                put(offset_of!(MapExternal, control), fd);
                put(offset_of!(MapExternal, client), self.root);
                put(offset_of!(MapExternal, memory), memory);
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
            let shared =
                memory.as_ref().map(|memory: &SharedMemory| memory.fd.try_clone().expect("a file"));
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
                        self.root = done
                            .argument
                            .get(8..12)
                            .map_or(0, |word| u32::from_le_bytes(word.try_into().expect("4")));
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
    let mut program = Program {
        input,
        front_end: front_end(driver),
        gpu: Books::new(if flags & 2 == 0 { 0 } else { 7 }, flags & 4 == 0),
        root: 0,
        requests: Requests::default(),
    };
    for (file, node) in [Node::Control, Node::Gpu(0), Node::Uvm].into_iter().enumerate() {
        program.front_end.open(FileId(file as u64), node, Opener::new(1, None)).expect("a file");
    }
    for _ in 0..96 {
        if program.input.is_empty() {
            break;
        }
        let file = FileId(u64::from(program.input.byte() & 3));
        match program.input.byte() {
            0..0x50 => {
                let (number, len) = pick(&mut program.input, &program.requests.uvm);
                let short = usize::from(program.input.byte() == 0xff);
                program.ioctl(FileId(2), number, len.saturating_sub(short));
            }
            0x50..0xe0 => {
                let (request, len) = pick(&mut program.input, &program.requests.escapes);
                program.ioctl(file, request, len);
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
                let _ = program.front_end.open(file, node, Opener::new(2, None));
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
