//! A program of the host, whose workers die at any call of the driver.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};

use cuda_socket::{Block, FileId, IoctlRequest, Node, Refused};
use ipc::mem::SharedMemory;
use mdev_core::units::{KIB, MIB, PAGE_SIZE};
use nvidia_rm::fake_rm::{self, FakeRm};
use programs::FrontEnd;
use programs::front_end::{MemoryFileId, NewFiles, Opener, Outcome};
use programs::guest_memory::FreedPages;
use vendor_backends::nvidia::frontend::NvidiaFrontEnd;
use vendor_backends::nvidia::frontend::testing::{front_end, identity, memory_params, word, words};
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu};

use super::{Anchor, CONTINUED, Worker};
use crate::{DRIVER, spec};

const CONTROL: FileId = FileId(1);
const UVM: FileId = FileId(2);
/// Descriptor by which the program knows its control file.
const CONTROL_FD: u32 = 11;
/// Address of parameters in the program.
const PARAMS: u64 = 0x7000_0000;
/// Root of the first client.
const ROOT: u32 = 0xc1d0_0001;

/// What a program does.
#[derive(Clone, Debug)]
enum Step {
    Ioctl(FileId, u32, Vec<u8>, Vec<u8>),
    Close(FileId),
}

/// Allocation of an object with a handle.
fn alloc(parent: u32, handle: u32, class: u32, params: &[u8]) -> Step {
    let root = if class == 0 { 0 } else { ROOT };
    let mut argument = words(&[root, parent, handle, class]);
    argument.extend(if params.is_empty() { 0 } else { PARAMS }.to_le_bytes());
    argument.resize(48, 0);
    Step::Ioctl(CONTROL, 0xc030_462b, argument, params.to_vec())
}

/// Request of nvidia-uvm, with an argument of `len` bytes.
fn uvm(request: u32, argument: &[u32], len: usize) -> Step {
    let mut argument = words(argument);
    argument.resize(len, 0);
    Step::Ioctl(UVM, request, argument, Vec::new())
}

/// Mapping of a memory object for the GPU.
fn map(memory: u32, va: u64, len: u64) -> Step {
    let mut argument = vec![0; 9264];
    argument[..8].copy_from_slice(&va.to_le_bytes());
    argument[8..16].copy_from_slice(&len.to_le_bytes());
    for (at, value) in [(9248, CONTROL_FD), (9252, ROOT), (9256, memory)] {
        argument[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    Step::Ioctl(UVM, 33, argument, Vec::new())
}

fn steps() -> Vec<Step> {
    const VA: u64 = 0x3_0000_0000;
    /// The lowest address that Linux gives a program.
    const LOWEST: u64 = 64 * KIB;
    let len = 16 * PAGE_SIZE;
    let free = |handle| {
        Step::Ioctl(CONTROL, 0xc010_4629, words(&[ROOT, ROOT, handle, 0xffff]), Vec::new())
    };
    vec![
        alloc(0, 0, 0, &[]),
        alloc(ROOT, 0x10, 0x80, &[0; 56]),
        alloc(0x10, 0x11, 0x2080, &[0; 4]),
        alloc(0x10, 0x12, 0x90f1, &[0; 56]),
        uvm(25, &[0, 0, 0, 0, CONTROL_FD, ROOT, 0x12, 0xffff], 32),
        alloc(0x10, 0x40, 0x3e, &memory_params(len, 0)),
        map(0x40, LOWEST, len),
        // Memory that comes into being and is imported in one request.
        uvm(68, &[0, 2, 2 * MIB as u32, 0], 9248),
        alloc(0x10, 0x41, 0x40, &memory_params(2 * MIB, 0)),
        map(0x41, VA, 2 * MIB),
        map(0x41, VA, 2 * MIB),
        uvm(34, &[0, 2, 0, 0], 24),
        free(0x40),
        free(0x41),
        Step::Close(UVM),
        Step::Close(CONTROL),
    ]
}

/// Files of memory, which outlive workers.
#[derive(Clone, Debug, Default)]
struct Files(Arc<Mutex<BTreeMap<MemoryFileId, SharedMemory>>>);

impl NewFiles for Files {
    fn create(&mut self, store: MemoryFileId, len: u64) -> io::Result<OwnedFd> {
        let mut files = self.0.lock().unwrap();
        let file = match files.entry(store) {
            Entry::Occupied(file) => file.into_mut(),
            Entry::Vacant(place) => place.insert(SharedMemory::new(c"memory", len)?),
        };
        file.fd.try_clone()
    }
}

/// What is recorded of the program.
#[derive(Default)]
struct Recorded {
    changes: Vec<Vec<u8>>,
    files: Files,
}

impl Recorded {
    fn new_front_end(&self) -> NvidiaFrontEnd {
        let mut front_end = front_end(identity(DRIVER, 64 * MIB), 256 * MIB);
        front_end.set_files(Box::new(self.files.clone()));
        front_end
    }

    fn record(&mut self, front_end: &mut NvidiaFrontEnd) {
        self.changes.extend(front_end.take_changes().map(|changes| changes.bytes));
    }

    fn adopt(&self) -> NvidiaFrontEnd {
        let mut front_end = self.new_front_end();
        let files = self.files.clone();
        let mut take = |store| Some(files.0.lock().unwrap()[&store].fd.try_clone().unwrap());
        front_end.adopt(&self.changes, &FreedPages::default(), &mut take).unwrap();
        front_end
    }
}

/// Carries out a step. Returns the error and the argument.
fn carry_out(
    front_end: &mut NvidiaFrontEnd,
    client: &mut NvidiaClient,
    step: &Step,
) -> (i32, Vec<u8>) {
    let (file, request, argument, params) = match step {
        Step::Close(file) => {
            front_end.close(client, *file);
            return (0, Vec::new());
        }
        Step::Ioctl(file, request, argument, params) => (*file, *request, argument, params),
    };
    let blocks = vec![Block { address: PARAMS, bytes: params.clone() }];
    let request = IoctlRequest {
        file,
        request,
        argument: argument.clone(),
        blocks,
        files: vec![(CONTROL_FD.cast_signed(), CONTROL)],
        shared: Vec::new(),
        refused: Refused::default(),
    };
    match front_end.ioctl(client, &request, None) {
        Outcome::Done(done, _) => (done.errno, done.argument),
        Outcome::Fetch(fetch) => panic!("{fetch:?}"),
    }
}

/// End of a worker: before the call after this number of calls, or when that has had its effect.
type End = Option<(u64, bool)>;

/// Results of the steps, what the driver has before the last two, and the number of its calls.
type Results = (Vec<(i32, Vec<u8>)>, Vec<String>, u64);

/// Runs the program, whose worker ends once.
fn run(end: End) -> Results {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, CONTINUED).unwrap();
    let (mut anchor, mut worker) = Anchor::new(&rm, &mut gpu, &spec(64 * MIB));
    let mut recorded = Recorded::default();
    let mut front_end = recorded.new_front_end();
    for (file, node) in [(CONTROL, Node::Control), (UVM, Node::Uvm)] {
        front_end.open(file, node, Opener::new(1, None)).unwrap();
    }
    recorded.record(&mut front_end);
    anchor.record(&mut worker.client);
    let before = rm.calls();
    match end {
        Some((calls, false)) => worker.process.end_after(calls),
        Some((calls, true)) => worker.process.end_within(calls),
        None => {}
    }
    let (mut results, mut objects, mut deaths) = (Vec::new(), Vec::new(), 0);
    for step in steps() {
        if matches!(step, Step::Close(UVM)) {
            objects = rm.describe();
        }
        loop {
            let Worker { client, .. } = &mut worker;
            let done = catch_unwind(AssertUnwindSafe(|| carry_out(&mut front_end, client, &step)));
            match done {
                Ok(done) => {
                    results.push(done);
                    break;
                }
                Err(_) if deaths < end.iter().len() => deaths += 1,
                Err(error) => resume_unwind(error),
            }
            worker.client.end();
            worker = anchor.adopt().unwrap();
            front_end = recorded.adopt();
            anchor.record(&mut worker.client);
        }
        recorded.record(&mut front_end);
        anchor.record(&mut worker.client);
    }
    let calls = rm.calls() - before;
    assert_eq!(front_end.counts(), [0; 4], "nothing is left");
    drop(worker);
    assert_eq!(rm.video_memory(), 0, "everything is freed at last");
    (results, objects, calls)
}

#[test]
fn a_program_of_the_host_has_the_same_results_wherever_its_worker_dies() {
    let (results, objects, calls) = run(None);
    let status = |step: usize, at: usize| word(&results[step].1, at);
    assert_eq!(word(&results[0].1, 2), ROOT, "the first client");
    assert!(results.iter().all(|(errno, _)| *errno == 0), "{results:?}");
    let mapped = [6, 9, 10].map(|step| status(step, 9260 / 4));
    assert!(mapped[..2] == [0, 0] && mapped[2] != 0, "{mapped:x?}");
    assert_eq!((status(4, 7), status(7, 9240 / 4)), (0, 0), "space and pool");
    assert!(calls > 8, "{calls} calls of the driver");
    for end in (0..calls).flat_map(|calls| [(calls, false), (calls, true)]) {
        let (again, same, _) = run(Some(end));
        assert_eq!((again, same), (results.clone(), objects.clone()), "at {end:?}");
    }
}
