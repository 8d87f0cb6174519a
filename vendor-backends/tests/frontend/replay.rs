//! Recorded programs again, with the front end in the place of NVIDIA's driver.
//!
//! A program cannot tell a vGPU from a GPU as long as its requests have the same results. What may
//! differ is in [`OWN`].

use std::collections::BTreeMap;
use std::ops::Range;

use cuda_socket::{Block, Fetch, FileId, IoctlRequest, MapRequest, Refused, SharedRange};
use ipc::mem::SharedMemory;
use mdev_core::ids::VgpuId;
use mdev_core::units::GIB;
use programs::FrontEnd;
use programs::front_end::{Opener, Outcome};
use vendor_backends::nvidia::frontend::identity::Identity;

use crate::program::{Program, word};
use crate::recording::{self, Ioctl, Part, Step};

const ALLOC: u32 = 0x2b;
const CONTROL: u32 = 0x2a;

/// Part of an ioctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    /// The argument of `NV_ESC_*`.
    Escape(u32),
    /// Parameters of the allocation of a class.
    Class(u32),
    /// Parameters of a control.
    Control(u32),
    /// The argument of a request of nvidia-uvm.
    Uvm(u32),
}

/// What a vGPU answers by itself, and why.
const OWN: &[(Where, Range<usize>, &str)] = &[
    (Where::Escape(0xc8), 20..24, "interrupt"),
    (Where::Escape(0xc8), 24..56, "addresses and sizes of the GPU's BARs"),
    (Where::Escape(0x4e), 32..40, "an address of the kernel"),
    (Where::Control(0x101), 36..40, "number of the driver's build"),
    (Where::Class(0x90f1), 8..16, "size of address spaces"),
    (Where::Class(0x40), 80..88, "offset in video memory"),
    (Where::Class(0xc86f), 132..136, "number of the channel"),
    (Where::Class(0x79), 16..24, "an address of the kernel"),
    (Where::Control(0xc36f_0108), 0..4, "token of the channel"),
    (Where::Control(0x503c_0102), 8..16, "token of an address space, for access of other devices"),
    (Where::Control(0x2080_0406), 8..264, "times"),
    (Where::Control(0x2080_0111), 0..64, "name"),
    (Where::Control(0x2080_1218), 8..16, "size that programs reserve, and which varies"),
    (Where::Control(0x2080_1303), 4..1028, "sizes of video memory"),
    (
        Where::Control(0xd01),
        8..12,
        "memory for rings is system memory; both doorbells are registers",
    ),
    (Where::Escape(0x4e), 44..48, "the same"),
];

/// What the answers of other recordings than the vector addition's were not the driver's own in:
/// they were made with an emulated nvidia-uvm and with rings in system memory.
const EMULATED: &[(Where, Range<usize>, &str)] = &[
    (Where::Class(0x90f1), 4..8, "flags for nvidia-uvm"),
    (Where::Class(0x40), 8..80, "attributes of the rings"),
    (Where::Uvm(34), 8..12, "the wrong word was set"),
];

/// A program in progress.
struct Replay {
    /// What may differ.
    own: Vec<&'static (Where, Range<usize>, &'static str)>,
    program: Program,
    files: BTreeMap<i32, FileId>,
    last_file: u64,
    /// Handles of clients, which the driver chooses: ours by the recorded one.
    roots: BTreeMap<u32, u32>,
    shared: BTreeMap<u64, SharedMemory>,
    differences: Vec<String>,
}

impl Replay {
    fn new(emulated: bool) -> Self {
        let identity = Identity {
            vgpu: VgpuId("00112233-4455-6677-8899-aabbccddeeff".parse().unwrap()),
            name: "NVIDIA H200".into(),
            driver: "580.159.04".into(),
            pci_ids: (0x10de, 0x2335),
            address: (0, 6),
            vram_bytes: 16 * GIB,
        };
        Self {
            own: OWN.iter().chain(EMULATED.iter().filter(|_| emulated)).collect(),
            program: Program::of(identity, 64),
            files: BTreeMap::new(),
            last_file: 0,
            roots: BTreeMap::new(),
            shared: BTreeMap::new(),
            differences: Vec::new(),
        }
    }

    fn run(&mut self, steps: &[Step]) {
        for step in steps {
            match step {
                Step::Open(fd, node) => {
                    self.last_file += 1;
                    self.program
                        .front_end
                        .open(FileId(self.last_file), *node, Opener::new(1, None))
                        .unwrap();
                    self.files.insert(*fd, FileId(self.last_file));
                }
                Step::Close(fd) => {
                    if let Some(file) = self.files.remove(fd) {
                        self.program.front_end.close(&mut self.program.client, file);
                    }
                }
                Step::Map(fd, len, offset) => {
                    let (file, len, offset) = (self.files[fd], *len, *offset);
                    let request = MapRequest { file, len, offset, writable: true };
                    if let Err(error) = self.program.front_end.map(&request) {
                        self.differences.push(format!("mapping of {fd}: {error}"));
                    }
                }
                Step::Ioctl(ioctl) => self.ioctl(ioctl),
            }
        }
    }

    fn ioctl(&mut self, ioctl: &Ioctl) {
        let Ioctl { argument, params, .. } = ioctl;
        let address = pointer(ioctl);
        let before = self.renamed(&params.before);
        let mut request = IoctlRequest {
            file: self.files[&ioctl.fd],
            request: ioctl.request,
            argument: self.renamed(&argument.before),
            blocks: Vec::new(),
            files: Vec::new(),
            shared: Vec::new(),
            refused: Refused::default(),
        };
        for _ in 0..cuda_socket::MAX_FETCHES {
            let shared = request.shared.first().map(|shared| shared.range.address);
            let shared = shared.map(|address| self.shared[&address].fd.try_clone().unwrap());
            let front_end = &mut self.program.front_end;
            match front_end.ioctl(&mut self.program.client, &request, shared) {
                Outcome::Fetch(fetch) => self.answer(&mut request, fetch, address, &before),
                Outcome::Done(done, _) => {
                    let mut after = before.clone();
                    for Block { address: at, bytes } in done.writes {
                        let at = at.wrapping_sub(address) as usize;
                        if let Some(target) = after.get_mut(at..at.saturating_add(bytes.len())) {
                            target.copy_from_slice(&bytes);
                        }
                    }
                    if (done.errno != 0) != ioctl.failed {
                        self.differences.push(format!("{}: {}", name(ioctl), done.errno));
                    }
                    self.learn(ioctl, &done.argument);
                    self.compare(ioctl, &done.argument, &after);
                    return;
                }
            }
        }
        panic!("{} does not end", name(ioctl));
    }

    /// Sends what the front end needs.
    fn answer(&mut self, request: &mut IoctlRequest, fetch: Fetch, address: u64, params: &[u8]) {
        for cuda_socket::Range { address: at, len } in fetch.blocks {
            let start = at.wrapping_sub(address) as usize;
            let bytes = params.get(start..).unwrap_or_default();
            let mut bytes = bytes[..bytes.len().min(len as usize)].to_vec();
            bytes.resize(len as usize, 0);
            request.blocks.push(Block { address: at, bytes });
        }
        for fd in fetch.files {
            match self.files.get(&fd) {
                Some(file) => request.files.push((fd, *file)),
                None => request.refused.files.push(fd),
            }
        }
        for range in fetch.share {
            let memory = SharedMemory::new(c"program", range.len).unwrap();
            self.shared.insert(range.address, memory);
            request.shared.push(SharedRange { range, offset: 0 });
        }
    }

    /// Replaces recorded handles of clients by ours.
    fn renamed(&self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for bytes in bytes.chunks_exact_mut(4) {
            if let Some(root) = self.roots.get(&word(bytes, 0)) {
                bytes.copy_from_slice(&root.to_le_bytes());
            }
        }
        bytes
    }

    fn learn(&mut self, ioctl: &Ioctl, argument: &[u8]) {
        let Part { before, after } = &ioctl.argument;
        if is_rm(ioctl, ALLOC) && word(before, 0) == 0 {
            self.roots.insert(word(after, 2), word(argument, 2));
        }
    }

    fn compare(&mut self, ioctl: &Ioctl, argument: &[u8], params: &[u8]) {
        let expected = [&ioctl.argument, &ioctl.params].map(|part| self.renamed(&part.after));
        for (at, what) in places(ioctl).into_iter().enumerate() {
            let (expected, found) = (&expected[at], [argument, params][at]);
            let own = |at: usize| {
                self.own.iter().any(|(place, range, _)| *place == what && range.contains(&at))
            };
            let differing: Vec<_> = (0..expected.len())
                .filter(|at| found.get(*at) != expected.get(*at) && !own(*at))
                .collect();
            if let (Some(first), Some(last)) = (differing.first(), differing.last()) {
                let range = first / 4 * 4..(last / 4 * 4 + 4).min(expected.len());
                let show = |bytes: &[u8]| {
                    let bytes = bytes.get(range.clone()).unwrap_or_default();
                    let words = bytes.chunks_exact(4).take(24);
                    words.map(|bytes| word(bytes, 0)).collect::<Vec<_>>()
                };
                let (found, expected) = (show(found), show(expected));
                self.differences.push(format!(
                    "line {}: {what:x?} bytes {range:?}: {found:x?} instead of {expected:x?}",
                    ioctl.line
                ));
            }
        }
    }
}

fn is_rm(ioctl: &Ioctl, number: u32) -> bool {
    ioctl.request & 0xffff == 0x4600 | number
}

/// Returns the address of the parameters.
fn pointer(ioctl: &Ioctl) -> u64 {
    match ioctl.argument.before.get(16..24) {
        Some(bytes) if is_rm(ioctl, ALLOC) || is_rm(ioctl, CONTROL) => {
            u64::from_le_bytes(bytes.try_into().unwrap())
        }
        _ => 0,
    }
}

fn places(ioctl: &Ioctl) -> [Where; 2] {
    let argument = &ioctl.argument.before;
    let number = ioctl.request & 0xff;
    if is_rm(ioctl, ALLOC) {
        [Where::Escape(number), Where::Class(word(argument, 3))]
    } else if is_rm(ioctl, CONTROL) {
        [Where::Escape(number), Where::Control(word(argument, 2))]
    } else if ioctl.request >> 8 & 0xff == 0x46 {
        [Where::Escape(number); 2]
    } else {
        [Where::Uvm(ioctl.request); 2]
    }
}

fn name(ioctl: &Ioctl) -> String {
    format!("line {}: {:x?}", ioctl.line, places(ioctl))
}

fn replay(recording: &str, emulated: bool) {
    let mut replay = Replay::new(emulated);
    replay.run(&recording::parse(recording));
    let differences = &replay.differences;
    assert!(differences.is_empty(), "{}\n{}", differences.len(), differences.join("\n"));
    for file in std::mem::take(&mut replay.files).into_values() {
        replay.program.front_end.close(&mut replay.program.client, file);
    }
    assert_eq!(replay.program.front_end.counts(), [0; 4]);
}

#[test]
fn a_vector_addition_gets_the_drivers_answers() {
    replay(include_str!("recorded/vadd.txt"), false);
}

#[test]
fn dynamic_parallelism_gets_the_drivers_answers() {
    replay(include_str!("recorded/cdp.txt"), true);
}

#[test]
fn pytorch_gets_the_drivers_answers() {
    replay(include_str!("recorded/torch.txt"), true);
}

#[test]
fn nvidia_smi_gets_the_drivers_answers() {
    replay(include_str!("recorded/nvidia-smi.txt"), true);
}
