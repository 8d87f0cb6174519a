//! A program on a vGPU: the transport's part, with memory at made-up addresses.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cuda_socket::{Block, FileId, IoctlRequest, MapRequest, Node, Range, SharedRange};
use ipc::mem::{Mapping, SharedMemory};
use mdev_core::gpu::{Client, ClientSpec};
use mdev_core::units::MIB;
use programs::FrontEnd;
use programs::front_end::{Mapped, Opener, Outcome};
use vendor_backends::mediator::MediatedClient;
use vendor_backends::nvidia::frontend::NvidiaFrontEnd;
use vendor_backends::nvidia::frontend::identity::Identity;
use vendor_backends::nvidia::frontend::testing::{front_end, identity};
pub use vendor_backends::nvidia::frontend::testing::{memory_params, word, words};

use crate::soft_vgpu;

/// Video memory of the vGPU, in bytes.
pub const VRAM: u64 = 64 * MIB;

/// Files that every program opens.
pub const CONTROL: FileId = FileId(1);
pub const GPU: FileId = FileId(2);
pub const UVM: FileId = FileId(3);

/// Descriptors by which the program knows these files.
pub const CONTROL_FD: u32 = 11;
pub const GPU_FD: u32 = 12;

/// Address of parameters in the program.
pub const PARAMS: u64 = 0x7000_0000;

/// A vGPU of a software GPU, and a program on it.
pub struct Program {
    pub front_end: NvidiaFrontEnd,
    pub client: MediatedClient,
    /// Memory of the program that is shared.
    pub shared: BTreeMap<u64, SharedMemory>,
    /// Number of parts of memory that is shared from now on.
    pub parts: u64,
    _held: soft_vgpu::Held,
}

/// Outcome of an ioctl.
#[derive(Debug, PartialEq, Eq)]
pub struct Result {
    pub errno: i32,
    pub argument: Vec<u8>,
    pub params: Vec<u8>,
}

impl Program {
    /// Starts a program with all of its device files open.
    pub fn start() -> Self {
        let mut program = Self::of(identity("550.163.01", VRAM), 8);
        for (file, node) in [(CONTROL, Node::Control), (GPU, Node::Gpu(0)), (UVM, Node::Uvm)] {
            program.front_end.open(file, node, Opener::new(1, None)).unwrap();
        }
        program
    }

    /// Starts a program without open files on a vGPU.
    pub fn of(identity: Identity, max_channels: u32) -> Self {
        let spec = ClientSpec {
            vgpu: identity.vgpu,
            vram_bytes: identity.vram_bytes,
            framebuffer_bytes: 0,
            max_channels,
            max_import_bytes: 256 * MIB,
        };
        let (client, held) = soft_vgpu::start(&spec);
        let front_end = front_end(identity, 256 * MIB);
        let shared = BTreeMap::new();
        Self { front_end, client, shared, parts: 1, _held: held }
    }

    /// Carries out an ioctl with an argument that has a pointer to `params` at `pointer`.
    pub fn ioctl_with(
        &mut self,
        file: FileId,
        request: u32,
        mut argument: Vec<u8>,
        pointer: Option<usize>,
        params: &[u8],
    ) -> Result {
        if let Some(at) = pointer {
            argument[at..at + 8].copy_from_slice(&PARAMS.to_le_bytes());
        }
        let mut params = params.to_vec();
        let mut request = IoctlRequest {
            file,
            request,
            argument,
            blocks: Vec::new(),
            files: vec![(CONTROL_FD.cast_signed(), CONTROL), (GPU_FD.cast_signed(), GPU)],
            shared: Vec::new(),
            refused: cuda_socket::Refused::default(),
        };
        for _ in 0..cuda_socket::MAX_FETCHES {
            let shared = request.shared.iter().map(|shared| shared.range.address).min();
            let shared = shared.map(|address| self.shared[&address].fd.try_clone().unwrap());
            match self.front_end.ioctl(&mut self.client, &request, shared) {
                Outcome::Fetch(fetch) => {
                    for Range { address, len } in fetch.blocks {
                        let (at, len) = ((address - PARAMS) as usize, len as usize);
                        let mut bytes = params.get(at..).unwrap_or_default().to_vec();
                        bytes.resize(len, 0);
                        request.blocks.push(Block { address, bytes });
                    }
                    for range in fetch.share {
                        request.shared.extend(self.share(range));
                    }
                }
                Outcome::Done(done, _) => {
                    for Block { address, bytes } in done.writes {
                        if let Some(at) = address.checked_sub(PARAMS)
                            && let Some(target) =
                                params.get_mut(at as usize..at as usize + bytes.len())
                        {
                            target.copy_from_slice(&bytes);
                        }
                    }
                    return Result { errno: done.errno, argument: done.argument, params };
                }
            }
        }
        Result { errno: libc::EFAULT, argument: request.argument, params }
    }

    /// Makes a range shared memory, in parts that lie in its file in reverse order.
    fn share(&mut self, range: Range) -> Vec<SharedRange> {
        let len = range.len / self.parts;
        let parts = (0..self.parts).map(|part| SharedRange {
            range: Range { address: range.address + part * len, len },
            offset: (self.parts - 1 - part) * len,
        });
        let memory = SharedMemory::new(c"program", range.len).unwrap();
        self.shared.insert(range.address, memory);
        parts.rev().collect()
    }

    /// Registers pages at an address of the program as a memory object. Returns the status.
    pub fn register(&mut self, context: Context, handle: u32, address: u64, len: u64) -> u32 {
        let mut argument = words(&[context.root, context.device, handle, 0x71, 0x4000_1010, 0]);
        argument.extend(address.to_le_bytes());
        argument.extend((len - 1).to_le_bytes());
        argument.extend(words(&[0xffff, 0, u32::MAX, 0]));
        let done = self.ioctl_with(GPU, 0xc038_4627, argument, None, &[]);
        assert_eq!(done.errno, 0);
        word(&done.argument, 10)
    }

    /// Attaches the file of the GPU to the control file.
    pub fn attach_gpu_file(&mut self) {
        let attached = self.ioctl_with(GPU, 0xc004_46c9, words(&[CONTROL_FD]), None, &[]);
        assert_eq!(attached.errno, 0);
    }

    /// Allocates an object. Returns the status, the handle and the parameters.
    pub fn alloc(
        &mut self,
        root: u32,
        parent: u32,
        handle: u32,
        class: u32,
        params: &[u8],
    ) -> (u32, u32, Vec<u8>) {
        let argument = words(&[root, parent, handle, class, 0, 0, 0, 0, 0, 0, 0xffff, 0]);
        let done = self.ioctl_with(CONTROL, 0xc030_462b, argument, Some(16), params);
        assert_eq!(done.errno, 0);
        (word(&done.argument, 10), word(&done.argument, 2), done.params)
    }

    /// Allocates an object that must be possible.
    pub fn new_object(
        &mut self,
        root: u32,
        parent: u32,
        handle: u32,
        class: u32,
        params: &[u8],
    ) -> u32 {
        let (status, handle, _) = self.alloc(root, parent, handle, class, params);
        assert_eq!(status, 0, "class {class:#x}");
        handle
    }

    /// Calls a control. Returns the status and the parameters.
    pub fn control(
        &mut self,
        root: u32,
        object: u32,
        command: u32,
        params: &[u8],
    ) -> (u32, Vec<u8>) {
        let argument = words(&[root, object, command, 0, 0, 0, params.len() as u32, 0xffff]);
        let done = self.ioctl_with(CONTROL, 0xc020_462a, argument, Some(16), params);
        assert_eq!(done.errno, 0);
        (word(&done.argument, 7), done.params)
    }

    /// Calls nvidia-uvm. Returns the argument.
    pub fn uvm(&mut self, request: u32, argument: &[u32], len: usize) -> Vec<u8> {
        let mut bytes = words(argument);
        bytes.resize(len, 0);
        let done = self.ioctl_with(UVM, request, bytes, None, &[]);
        assert_eq!(done.errno, 0, "{request}");
        done.argument
    }

    /// Maps memory for the GPU, with nvidia-uvm.
    pub fn map_for_gpu(&mut self, root: u32, memory: u32, va: u64, len: u64) -> u32 {
        let mut argument = vec![0; 9264];
        argument[..8].copy_from_slice(&va.to_le_bytes());
        argument[8..16].copy_from_slice(&len.to_le_bytes());
        for (at, value) in [(9248, CONTROL_FD), (9252, root), (9256, memory)] {
            argument[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        let done = self.ioctl_with(UVM, 33, argument, None, &[]);
        assert_eq!(done.errno, 0);
        word(&done.argument, 9260 / 4)
    }

    /// Maps memory into the program.
    pub fn map(&mut self, root: u32, memory: u32, len: u64) -> Arc<Mapping> {
        let mut argument = words(&[root, 0, memory, 0, 0, 0]);
        argument.extend(len.to_le_bytes());
        argument.extend(words(&[0, 0, 0xffff, 0, GPU_FD, 0]));
        let done = self.ioctl_with(CONTROL, 0xc038_464e, argument, None, &[]);
        assert_eq!((done.errno, word(&done.argument, 10)), (0, 0));
        let request = MapRequest { file: GPU, len, offset: 0, writable: true };
        match self.front_end.map(&request).unwrap() {
            Mapped::File(fd, offset) => Mapping::new(fd.as_fd(), offset, len, true).unwrap(),
            Mapped::Guest(_) => panic!("the program is no VM's"),
            Mapped::Doorbell => {
                let page = self.client.apertures().doorbell.as_ref().unwrap();
                Mapping::new(page.fd.as_fd(), page.offset, len, true).unwrap()
            }
        }
    }

    /// Creates a client with device, subdevice and a registered address space.
    pub fn context(&mut self) -> Context {
        let root = self.new_object(0, 0, 0, 0, &[]);
        let device = self.new_object(root, root, 0x10, 0x80, &[0; 56]);
        let subdevice = self.new_object(root, device, 0x11, 0x2080, &[0; 4]);
        let space = self.new_object(root, device, 0x12, 0x90f1, &[0; 48]);
        let done = self.uvm(25, &[0, 0, 0, 0, CONTROL_FD, root, space, 0xffff], 32);
        assert_eq!(word(&done, 7), 0);
        Context { root, device, subdevice, space }
    }
}

/// Objects that a program creates first.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    pub root: u32,
    pub device: u32,
    pub subdevice: u32,
    pub space: u32,
}

/// Waits until `done` returns true.
pub fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < end, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}
