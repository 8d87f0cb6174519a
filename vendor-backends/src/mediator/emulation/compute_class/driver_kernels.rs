//! Kernels that NVIDIA's libcuda brings for its own use: fills, and copies within video memory.
//!
//! The software GPU runs no machine code, but a CUDA program expects `cuMemset` and `cuMemcpy` to
//! work. libcuda runs these kernels for them. They are recognised by a hash of their first bytes
//! and executed as transfers. The kernels of another version of libcuda have other hashes, and are
//! refused as all machine code is.

use mdev_core::abi::compute::PARAM_BASE;
use mdev_core::abi::copy::remap;

use super::grid::Transfers;
use super::launch::read;
use crate::mediator::emulation::address_space::{AddressSpace, MmuFault};
use crate::mediator::emulation::remap::RemapRegisters;
use crate::mediator::emulation::transfer::{Transfer, Work};
use crate::mediator::fault::Fault;

/// Length of the part of a program that identifies it.
const PREFIX_BYTES: usize = 512;

/// A known kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DriverKernel {
    /// Fills rows of 32-bit words.
    FillWords,
    /// Fills rows of bytes with a pattern of four bytes.
    FillBytes,
    /// Copies 32-bit words.
    CopyWords,
    /// Copies bytes: those before an aligned address, words from there on, and the rest.
    CopyUnaligned,
    /// Copies 4 KiB in each block of the grid.
    CopyBlocks,
    /// Copies the bytes before and after those of [`Self::CopyBlocks`].
    CopyEnds,
    /// Copies bytes.
    CopyBytes,
    /// Copies rows of bytes.
    CopyRows,
    /// Copies rows of bytes, with its parameters in another order.
    CopyUnalignedRows,
}

/// Hashes of the kernels of libcuda 550.163.01 for Hopper.
const KNOWN: [(u64, DriverKernel); 11] = [
    (0x0fe3_fc1e_6608_4068, DriverKernel::FillWords),
    (0x4e62_bd0e_9e07_dd38, DriverKernel::FillBytes),
    (0xa781_bd0d_b2ea_7ca4, DriverKernel::CopyWords),
    (0x4ab0_42e6_bca1_73fe, DriverKernel::CopyUnaligned),
    (0x8a9d_4ec1_eb1b_a008, DriverKernel::CopyBlocks),
    (0x99a7_7d5a_6f3b_3309, DriverKernel::CopyBlocks),
    (0x7c9d_cd97_ee41_1233, DriverKernel::CopyEnds),
    (0xfc22_0f1f_0ff7_92ed, DriverKernel::CopyBytes),
    (0xa630_fc3c_536f_a9ce, DriverKernel::CopyRows),
    (0xa8b2_d6f5_9528_6609, DriverKernel::CopyRows),
    (0xb9d1_b529_0896_0f9f, DriverKernel::CopyUnalignedRows),
];

/// Parameters, each of 64 bits.
type Params = [u64; 6];

impl DriverKernel {
    /// Returns the kernel whose program is at `code`, if it is a known one.
    pub fn find(space: AddressSpace<'_>, code: u64) -> Result<Option<Self>, MmuFault> {
        let mut prefix = [0; PREFIX_BYTES];
        space.read(code, &mut prefix)?;
        let hash = hash(&prefix);
        Ok(KNOWN.iter().find(|(known, _)| *known == hash).map(|(_, kernel)| *kernel))
    }

    /// Returns the transfers that do the work of a grid. `constants` is constant buffer 0.
    pub fn transfers(
        self,
        space: AddressSpace<'_>,
        constants: u64,
        grid: [u32; 3],
    ) -> Result<Transfers, Fault> {
        let params: Params = read(space, constants.wrapping_add(PARAM_BASE))?;
        let [target, source, a, b, c, d] = params;
        let transfers = match self {
            Self::FillWords => [Some(fill(&params, 4, grid[1])?), None],
            Self::FillBytes => [Some(fill(&params, 1, grid[1])?), None],
            Self::CopyWords => [Some(copy(target, source, a.wrapping_mul(4))), None],
            Self::CopyUnaligned => {
                let bytes = a.wrapping_add(b.wrapping_mul(4)).wrapping_add(c);
                [Some(copy(target.wrapping_sub(a), source.wrapping_sub(a), bytes)), None]
            }
            Self::CopyBlocks => [Some(copy(target, source, u64::from(grid[0]) << 12)), None],
            Self::CopyEnds => {
                // `c` counts the bytes at both ends, `b` those in the middle.
                let skip = a.wrapping_add(b);
                let (target_end, source_end) =
                    (target.wrapping_add(skip), source.wrapping_add(skip));
                [
                    Some(copy(target, source, a)),
                    Some(copy(target_end, source_end, c.saturating_sub(a))),
                ]
            }
            Self::CopyBytes => [Some(copy(target, source, a)), None],
            Self::CopyRows => [Some(rows(copy(target, source, a), b, c, d)), None],
            Self::CopyUnalignedRows => {
                let [target, pitch_out, height, source, pitch_in, sizes] = params;
                [Some(rows(copy(target, source, sizes >> 32), height, pitch_out, pitch_in)), None]
            }
        };
        // Many empty lines would take time without progress.
        Ok(transfers.map(|transfer| transfer.filter(|transfer| transfer.line_bytes > 0)))
    }
}

fn fill(params: &Params, unit: u64, rows: u32) -> Result<Transfer, Fault> {
    let [target, value, count, pitch_out, ..] = *params;
    let words = remap::CONST_A | 3 << remap::COMPONENT_SIZE_SHIFT;
    let registers = RemapRegisters { components: words, constants: [value as u32, 0] };
    let work = Work::of_elements(registers).ok_or(Fault::class(target))?;
    Ok(Transfer { pitch_out, lines: rows, work, ..copy(target, 0, count.wrapping_mul(unit)) })
}

fn copy(target: u64, source: u64, bytes: u64) -> Transfer {
    Transfer {
        semaphore: None,
        interrupt: false,
        source,
        target,
        pitch_in: 0,
        pitch_out: 0,
        line_bytes: bytes,
        lines: 1,
        done: 0,
        work: Work::Copy,
    }
}

fn rows(first: Transfer, height: u64, pitch_out: u64, pitch_in: u64) -> Transfer {
    Transfer { pitch_in, pitch_out, lines: u32::try_from(height).unwrap_or(u32::MAX), ..first }
}

/// Returns the FNV-1a hash.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}
