//! Kernels of libcuda as transfers, without their machine code.

use std::sync::atomic::{AtomicBool, AtomicU32};

use ipc::mem::SharedMemory;
use mdev_core::abi::compute::PARAM_BASE;
use mdev_core::gpu::{Backing, MapRequest};
use mdev_core::ids::{GpuVa, SpaceId, VgpuId};
use nix::sys::eventfd::EventFd;
use zerocopy::IntoBytes;

use super::driver_kernels::DriverKernel;
use super::grid::{Grid, Work};
use crate::mediator::emulation::address_space::AddressSpaces;
use crate::mediator::emulation::context::{Context, Progress};
use crate::mediator::emulation::interrupts::Interrupts;
use crate::mediator::emulation::run_limit::RunLimit;
use crate::mediator::fault::Fault;
use crate::soft::SoftGpu;

const BYTES: u64 = 1 << 20;
const VA: u64 = 0x7f00_0000_0000;
const CONSTANTS: u64 = 0x8_0000;

/// Runs a kernel with parameters, after filling memory with its offsets' low bytes. Returns memory.
fn run(kernel: DriverKernel, params: &[u64], grid: [u32; 3]) -> Result<Vec<u8>, Fault> {
    let memory = SharedMemory::new(c"kernels", BYTES).unwrap().mapping;
    let bytes: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    memory.write(0, &bytes).unwrap();
    memory.write(CONSTANTS + PARAM_BASE, &[0xff; 64]).unwrap();
    memory.write(CONSTANTS + PARAM_BASE, params.as_bytes()).unwrap();
    let mut spaces = AddressSpaces::new(Some(memory.clone()), 0);
    let id: SpaceId = spaces.create().unwrap();
    let all = MapRequest::new(GpuVa(VA), BYTES, Backing::Vram { offset: 0 });
    spaces.map(&all.in_space(id)).unwrap();
    let space = spaces.get(id).unwrap();
    let status = SharedMemory::new(c"status", 4096).unwrap().mapping;
    let interrupts = Interrupts::new(status, EventFd::new().unwrap().into()).unwrap();
    let (waiting, gate_open) = (AtomicU32::new(0), AtomicBool::new(true));
    let limit = RunLimit {
        end_ns: u64::MAX,
        waiting_requests: &waiting,
        gate_open: &gate_open,
        turn: None,
    };
    let (hardware, vgpu) = (&SoftGpu::new("soft0", BYTES), VgpuId::random());
    let interrupts = &interrupts;
    let cx = Context { hardware, vgpu, space, limit: &limit, interrupts, vector: 0 };
    let work = Work::Transfers(Box::new(kernel.transfers(space, VA + CONSTANTS, grid)?));
    let mut grid = Grid { work, releases: Vec::new(), interrupt: false };
    assert_eq!(grid.run(cx)?, Progress::Done);
    let mut after = vec![0; CONSTANTS as usize];
    memory.read(0, &mut after).unwrap();
    Ok(after)
}

/// Returns the bytes that memory has at first.
fn first(at: u64, len: u64) -> Vec<u8> {
    (at..at + len).map(|at| (at % 251) as u8).collect()
}

#[test]
fn fills_write_rows_and_nothing_else() {
    let after = run(DriverKernel::FillWords, &[VA + 16, 0x0403_0201, 2, 32], [1, 3, 1]).unwrap();
    for row in [16, 48, 80] {
        assert_eq!(after[row..row + 8], [1, 2, 3, 4, 1, 2, 3, 4]);
        assert_eq!(after[row + 8..row + 16], first(row as u64 + 8, 8));
    }
    assert_eq!(after[112..120], first(112, 8), "three rows");
    let after = run(DriverKernel::FillBytes, &[VA + 1, 0x5a5a_5a5a, 5, 0], [1, 1, 1]).unwrap();
    assert_eq!(after[..8], [0, 0x5a, 0x5a, 0x5a, 0x5a, 0x5a, 6, 7]);
}

#[test]
fn copies_move_as_many_bytes_as_their_kernels() {
    let (target, source) = (VA + 0x2_0001, VA + 0x100);
    for (kernel, rest, len) in [
        (DriverKernel::CopyWords, vec![25], 100),
        (DriverKernel::CopyBlocks, vec![], 3 * 4096),
        (DriverKernel::CopyBytes, vec![5], 5),
    ] {
        let params = [&[target, source], rest.as_slice()].concat();
        let after = run(kernel, &params, [3, 1, 1]).unwrap();
        assert!(after[0x2_0001..][..len] == first(0x100, len as u64), "{kernel:?}");
        let end = 0x2_0001 + len;
        assert_eq!(after[end..end + 8], first(end as u64, 8), "{kernel:?}");
    }
    // 3 bytes before the addresses, 16 words, 1 byte.
    let unaligned = [target + 3, source + 3, 3, 0x10, 1];
    let after = run(DriverKernel::CopyUnaligned, &unaligned, [2, 1, 1]).unwrap();
    assert!(after[0x2_0001..][..68] == first(0x100, 68));
    assert_eq!(after[0x2_0001 + 68], first(0x2_0001 + 68, 1)[0]);
    // 127 bytes, 4 KiB that another kernel copies, and 129 bytes.
    let ends = [target, source, 127, 0x1000, 256];
    let after = run(DriverKernel::CopyEnds, &ends, [2, 1, 1]).unwrap();
    assert!(after[0x2_0001..][..127] == first(0x100, 127));
    assert!(after[0x2_0001 + 127..][..4096] == first(0x2_0001 + 127, 4096));
    assert!(after[0x2_0001 + 4223..][..129] == first(0x100 + 4223, 129));
    assert_eq!(after[0x2_0001 + 4352], first(0x2_0001 + 4352, 1)[0]);
    for (kernel, params) in [
        (DriverKernel::CopyRows, [target, source, 7, 2, 100, 200]),
        (DriverKernel::CopyUnalignedRows, [target, 100, 2, source, 200, 7 << 32 | 2]),
    ] {
        let after = run(kernel, &params, [1, 2, 1]).unwrap();
        assert_eq!(after[0x2_0001..][..7], first(0x100, 7));
        assert_eq!(after[0x2_0001 + 100..][..7], first(0x100 + 200, 7));
        assert_eq!(after[0x2_0001 + 200..][..7], first(0x2_0001 + 200, 7));
    }
}

#[test]
fn senseless_parameters_fault_or_do_nothing() {
    let huge = [VA, VA, u64::MAX, u64::MAX, u64::MAX, u64::MAX];
    assert!(run(DriverKernel::CopyRows, &huge, [1; 3]).is_err());
    assert!(run(DriverKernel::FillBytes, &[VA, 0, u64::MAX, 0], [1; 3]).is_err());
    let empty = [VA, VA, 0, u64::MAX, 0, 0];
    run(DriverKernel::CopyRows, &empty, [1; 3]).unwrap();
    run(DriverKernel::FillWords, &[VA, 0, 0, 0], [1, u32::MAX, 1]).unwrap();
}
