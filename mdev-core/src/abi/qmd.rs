//! QMD version 4: the 384-byte descriptor of a grid launch. Symbols: `NVCBC0_QMDV04_00_*`.

/// Length in bytes.
pub const BYTES: usize = 384;
/// Alignment of a QMD in bytes (`SEND_PCAS_A` takes the address >> 8).
pub const ALIGN: u64 = 256;

/// Field of a QMD: an inclusive range of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Lowest bit.
    pub lo: u32,
    /// Highest bit.
    pub hi: u32,
}

const fn field(hi: u32, lo: u32) -> Field {
    Field { lo, hi }
}

/// `DEPENDENCE_COUNTER`: other grids that have to end first.
pub const DEPENDENCE_COUNTER: Field = field(15, 0);
/// `QMD_TYPE`: [`GRID_NULL`] or [`GRID_CTA`].
pub const QMD_TYPE: Field = field(25, 23);
/// `QMD_TYPE_GRID_NULL`: a grid without threads.
pub const GRID_NULL: u32 = 1;
/// `QMD_TYPE_GRID_CTA`: a grid.
pub const GRID_CTA: u32 = 2;
/// `QMD_TYPE_GRID_GPU_GPC_CGA`: the last of the grids with clusters of blocks, which only machine
/// code uses.
pub const GRID_LAST: u32 = 5;
/// Number of semaphores that a grid can release at its end.
pub const RELEASES: u32 = 3;

/// Returns `RELEASE_ENABLE(index)`.
pub const fn release_enable(index: u32) -> Field {
    field(320 + index * 16, 320 + index * 16)
}

/// Returns `RELEASE_STRUCTURE_SIZE(index)`: 0 is four words, with a timestamp at +8.
pub const fn release_structure_size(index: u32) -> Field {
    field(322 + index * 16, 321 + index * 16)
}

/// Returns `RELEASE_REDUCTION_ENABLE(index)`.
pub const fn release_reduction_enable(index: u32) -> Field {
    field(324 + index * 16, 324 + index * 16)
}

/// Returns `RELEASE_REDUCTION_OP(index)`, numbered as in
/// [`report_d`](super::compute::report_d::REDUCTION_SHIFT).
pub const fn release_reduction_op(index: u32) -> Field {
    field(327 + index * 16, 325 + index * 16)
}

/// Returns `RELEASE_REDUCTION_FORMAT(index)`: 1 is signed.
pub const fn release_reduction_format(index: u32) -> Field {
    field(329 + index * 16, 328 + index * 16)
}

/// Returns `RELEASE_TRAP_TYPE(index)`: if not 0, an interrupt is raised.
pub const fn release_trap_type(index: u32) -> Field {
    field(331 + index * 16, 330 + index * 16)
}

/// Returns `RELEASE_PAYLOAD64B(index)`.
pub const fn release_payload_64(index: u32) -> Field {
    field(332 + index * 16, 332 + index * 16)
}

/// Returns `RELEASE_SEMAPHORE_ADDR_LOWER` of a semaphore.
pub const fn release_address_lower(index: u32) -> Field {
    field(671 + index * 128, 640 + index * 128)
}

/// Returns `RELEASE_SEMAPHORE_ADDR_UPPER` of a semaphore.
pub const fn release_address_upper(index: u32) -> Field {
    field(696 + index * 128, 672 + index * 128)
}

/// Returns `RELEASE_SEMAPHORE_PAYLOAD_LOWER` of a semaphore.
pub const fn release_payload_lower(index: u32) -> Field {
    field(735 + index * 128, 704 + index * 128)
}

/// Returns `RELEASE_SEMAPHORE_PAYLOAD_UPPER` of a semaphore.
pub const fn release_payload_upper(index: u32) -> Field {
    field(767 + index * 128, 736 + index * 128)
}

/// `QMD_MINOR_VERSION`: 0.
pub const QMD_MINOR_VERSION: Field = field(579, 576);
/// `QMD_MAJOR_VERSION`: 4.
pub const QMD_MAJOR_VERSION: Field = field(583, 580);
/// `SASS_VERSION`: architecture of the machine code.
pub const SASS_VERSION: Field = field(543, 536);
/// `API_VISIBLE_CALL_LIMIT`: 1 disables the check.
pub const API_VISIBLE_CALL_LIMIT: Field = field(568, 568);
/// `SHARED_MEMORY_SIZE`, bytes.
pub const SHARED_MEMORY_SIZE: Field = field(601, 584);
/// `INVALIDATE_SHADER_DATA_CACHE`: loads see stores since the last launch.
pub const INVALIDATE_SHADER_DATA_CACHE: Field = field(605, 605);
/// `MIN_SM_CONFIG_SHARED_MEM_SIZE`: units of 4 KiB, plus one.
pub const MIN_SM_CONFIG_SHARED_MEM_SIZE: Field = field(613, 608);
/// `MAX_SM_CONFIG_SHARED_MEM_SIZE`.
pub const MAX_SM_CONFIG_SHARED_MEM_SIZE: Field = field(619, 614);
/// `TARGET_SM_CONFIG_SHARED_MEM_SIZE`.
pub const TARGET_SM_CONFIG_SHARED_MEM_SIZE: Field = field(625, 620);
/// `CONSTANT_BUFFER_VALID(0)`.
pub const CONSTANT_BUFFER_VALID_0: Field = field(416, 416);
/// `CONSTANT_BUFFER_INVALIDATE(0)`.
pub const CONSTANT_BUFFER_INVALIDATE_0: Field = field(419, 419);
/// `CTA_RASTER_WIDTH`: blocks in x.
pub const CTA_RASTER_WIDTH: Field = field(1055, 1024);
/// `CTA_RASTER_HEIGHT`: blocks in y.
pub const CTA_RASTER_HEIGHT: Field = field(1071, 1056);
/// `CTA_RASTER_DEPTH`: blocks in z.
pub const CTA_RASTER_DEPTH: Field = field(1103, 1088);
/// `CWD_MEMBAR_TYPE`: 1 is `L1_SYSMEMBAR`.
pub const CWD_MEMBAR_TYPE: Field = field(1137, 1136);
/// `CTA_THREAD_DIMENSION0`: threads in x.
pub const CTA_THREAD_DIMENSION0: Field = field(1167, 1152);
/// `CTA_THREAD_DIMENSION1`: threads in y.
pub const CTA_THREAD_DIMENSION1: Field = field(1183, 1168);
/// `CTA_THREAD_DIMENSION2`: threads in z.
pub const CTA_THREAD_DIMENSION2: Field = field(1199, 1184);
/// `REGISTER_COUNT`.
pub const REGISTER_COUNT: Field = field(1208, 1200);
/// `BARRIER_COUNT`.
pub const BARRIER_COUNT: Field = field(1215, 1211);
/// `PROGRAM_ADDRESS_LOWER`.
pub const PROGRAM_ADDRESS_LOWER: Field = field(1247, 1216);
/// `PROGRAM_ADDRESS_UPPER`.
pub const PROGRAM_ADDRESS_UPPER: Field = field(1272, 1248);
/// `CONSTANT_BUFFER_ADDR_LOWER_SHIFTED6(0)`.
pub const CONSTANT_BUFFER_ADDR_LOWER_0: Field = field(1567, 1536);
/// `CONSTANT_BUFFER_ADDR_UPPER_SHIFTED6(0)`.
pub const CONSTANT_BUFFER_ADDR_UPPER_0: Field = field(1586, 1568);
/// `CONSTANT_BUFFER_SIZE_SHIFTED4(0)`.
pub const CONSTANT_BUFFER_SIZE_0: Field = field(1599, 1587);

/// Launch descriptor of a grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qmd([u32; BYTES / 4]);

impl Default for Qmd {
    fn default() -> Self {
        Self([0; BYTES / 4])
    }
}

/// Parameters of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// GPU virtual address of the program.
    pub program: u64,
    /// GPU virtual address of constant buffer 0, 64-byte aligned.
    pub constants: u64,
    /// Size of constant buffer 0 in bytes, a multiple of 16.
    pub constant_bytes: u32,
    /// Registers per thread.
    pub registers: u32,
}

impl From<Launch> for Qmd {
    fn from(launch: Launch) -> Self {
        let constants = launch.constants >> 6;
        Self::default()
            .with(QMD_TYPE, 2)
            .with(QMD_MAJOR_VERSION, 4)
            .with(API_VISIBLE_CALL_LIMIT, 1)
            .with(CWD_MEMBAR_TYPE, 1)
            .with(REGISTER_COUNT, launch.registers)
            .with(CTA_RASTER_WIDTH, launch.grid[0])
            .with(CTA_RASTER_HEIGHT, launch.grid[1])
            .with(CTA_RASTER_DEPTH, launch.grid[2])
            .with(CTA_THREAD_DIMENSION0, launch.block[0])
            .with(CTA_THREAD_DIMENSION1, launch.block[1])
            .with(CTA_THREAD_DIMENSION2, launch.block[2])
            .with(PROGRAM_ADDRESS_LOWER, launch.program as u32)
            .with(PROGRAM_ADDRESS_UPPER, (launch.program >> 32) as u32)
            .with(CONSTANT_BUFFER_VALID_0, 1)
            .with(CONSTANT_BUFFER_INVALIDATE_0, 1)
            .with(CONSTANT_BUFFER_ADDR_LOWER_0, constants as u32)
            .with(CONSTANT_BUFFER_ADDR_UPPER_0, (constants >> 32) as u32)
            .with(CONSTANT_BUFFER_SIZE_0, launch.constant_bytes >> 4)
    }
}

impl Qmd {
    /// Returns the descriptor with these bytes.
    pub fn from_bytes(bytes: &[u8; BYTES]) -> Self {
        let mut words = [0; BYTES / 4];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
        }
        Self(words)
    }

    /// Returns the descriptor's bytes.
    pub fn to_bytes(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(4).zip(self.0) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Returns a field of at most 32 bits.
    pub fn get(&self, field: Field) -> u32 {
        let (word, shift, width) = Self::place(field);
        let pair = u64::from(self.0[word])
            | u64::from(self.0.get(word + 1).copied().unwrap_or_default()) << 32;
        (pair >> shift & ((1 << width) - 1)) as u32
    }

    /// Returns the descriptor with a field set; excess bits of `value` are dropped.
    #[must_use]
    pub fn with(mut self, field: Field, value: u32) -> Self {
        let (word, shift, width) = Self::place(field);
        let mask = ((1u64 << width) - 1) << shift;
        let bits = u64::from(value) << shift & mask;
        self.0[word] = self.0[word] & !(mask as u32) | bits as u32;
        if let Some(next) = self.0.get_mut(word + 1) {
            *next = *next & !((mask >> 32) as u32) | (bits >> 32) as u32;
        }
        self
    }

    fn place(field: Field) -> (usize, u32, u32) {
        (field.lo as usize / 32, field.lo % 32, field.hi - field.lo + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_match_the_class_header() {
        let qmd = Qmd::default()
            .with(QMD_TYPE, 2)
            .with(QMD_MAJOR_VERSION, 4)
            .with(CTA_RASTER_WIDTH, 0xffff_ffff)
            .with(CONSTANT_BUFFER_ADDR_UPPER_0, 0x7ffff);
        let bytes = qmd.to_bytes();
        assert_eq!(bytes[3] & 0x3, 0x1, "bit 24 of the type");
        assert_eq!(bytes[72], 0x40);
        assert_eq!(&bytes[128..132], &[0xff; 4]);
        assert_eq!(bytes[198], 0x07);
        assert_eq!(Qmd::from_bytes(&bytes), qmd);
        assert_eq!(qmd.get(CTA_RASTER_WIDTH), 0xffff_ffff);
    }
}
