//! Host class `HOPPER_CHANNEL_GPFIFO_A` (c86f): GPFIFO entries, method headers, semaphores.
//! Symbols: clc86f.h.

use serde::{Deserialize, Serialize};

/// `HOPPER_CHANNEL_GPFIFO_A`.
pub const CLASS: u32 = 0xc86f;
/// Size of a GPFIFO entry in bytes (`NVC86F_GP_ENTRY__SIZE`).
pub const GP_ENTRY_BYTES: u64 = 8;
/// Width of a pushbuffer's address in bits (`GP_ENTRY0_GET` and `GP_ENTRY1_GET_HI`).
pub const PUSHBUFFER_VA_BITS: u32 = 40;

/// GPFIFO entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpEntry {
    /// A pushbuffer of `dwords` words at `va`.
    Segment {
        /// Address (4-byte aligned, 40 bits).
        va: u64,
        /// Length in 32-bit words (at most 0x1f_ffff).
        dwords: u32,
    },
    /// A control entry (`LENGTH` 0) with its `GP_ENTRY1_OPCODE`; 0 is `NOP`.
    Control {
        /// Opcode.
        opcode: u32,
    },
}

impl GpEntry {
    /// Maximum length of a segment in 32-bit words (`GP_ENTRY1_LENGTH` has 21 bits).
    pub const MAX_DWORDS: u32 = 0x1f_ffff;

    /// Returns the 64-bit entry, with `LEVEL` = `SUBROUTINE` as drivers set it.
    pub const fn encode(self) -> u64 {
        match self {
            Self::Segment { va, dwords } => {
                (va & 0xff_ffff_fffc) | 1 << 41 | ((dwords & Self::MAX_DWORDS) as u64) << 42
            }
            Self::Control { opcode } => (opcode as u64 & 0xff) << 32,
        }
    }

    /// Decodes a 64-bit entry.
    pub const fn decode(raw: u64) -> Self {
        let dwords = (raw >> 42) as u32 & Self::MAX_DWORDS;
        if dwords == 0 {
            Self::Control { opcode: (raw >> 32) as u32 & 0xff }
        } else {
            Self::Segment { va: raw & 0xff_ffff_fffc, dwords }
        }
    }
}

/// Operation of a method header: `NVC86F_DMA_SEC_OP`, bits 31:29.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SecOp {
    /// `INC_METHOD` (1): each data word goes to the next method.
    Inc,
    /// `NON_INC_METHOD` (3): all data words go to one method.
    NonInc,
    /// `IMMD_DATA_METHOD` (4): the count field is the data.
    Immediate,
    /// `ONE_INC` (5): the first data word goes to the method, the others to the next method.
    OneInc,
    /// `END_PB_SEGMENT` (7): end of the segment.
    EndSegment,
}

/// Method header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MethodHeader {
    /// Operation.
    pub op: SecOp,
    /// Subchannel, 0 to 7.
    pub subchannel: u8,
    /// Byte offset of the first method.
    pub method: u32,
    /// Number of data words, or the immediate data (13 bits).
    pub count: u32,
}

impl MethodHeader {
    /// Returns the 32-bit header.
    pub const fn encode(self) -> u32 {
        let op: u32 = match self.op {
            SecOp::Inc => 1,
            SecOp::NonInc => 3,
            SecOp::Immediate => 4,
            SecOp::OneInc => 5,
            SecOp::EndSegment => 7,
        };
        op << 29
            | (self.count & 0x1fff) << 16
            | (self.subchannel as u32 & 7) << 13
            | (self.method >> 2) & 0xfff
    }

    /// Decodes a header. Returns `None` for an operation that the class does not have.
    pub const fn decode(raw: u32) -> Option<Self> {
        let op = match raw >> 29 {
            1 => SecOp::Inc,
            3 => SecOp::NonInc,
            4 => SecOp::Immediate,
            5 => SecOp::OneInc,
            7 => SecOp::EndSegment,
            _ => return None,
        };
        Some(Self {
            op,
            subchannel: (raw >> 13) as u8 & 7,
            method: (raw & 0xfff) << 2,
            count: raw >> 16 & 0x1fff,
        })
    }
}

/// `NVC86F_DMA_NOP`: a word in place of a method header, without effect.
pub const DMA_NOP: u32 = 0;

/// Subchannel that drivers bind the compute class to.
pub const SUBCHANNEL_COMPUTE: u8 = 1;
/// Subchannel that drivers bind the copy class to.
pub const SUBCHANNEL_COPY: u8 = 4;

/// `NVC86F_SET_OBJECT`: binds a class to the header's subchannel. Methods below 0x100 are host
/// methods on every subchannel.
pub const SET_OBJECT: u32 = 0x0000;
/// `NVC86F_NOP`.
pub const NOP: u32 = 0x0008;
/// `NVC86F_NON_STALL_INTERRUPT`.
pub const NON_STALL_INTERRUPT: u32 = 0x0020;
/// `NVC86F_MEM_OP_A`; B to D follow up to 0x34. Only the membar of D is unprivileged.
pub const MEM_OP_A: u32 = 0x0028;
/// `NVC86F_MEM_OP_D`.
pub const MEM_OP_D: u32 = 0x0034;
/// `NVC86F_MEM_OP_D_OPERATION_MEMBAR`, in bits 31:27 of `MEM_OP_D`.
pub const MEM_OP_D_MEMBAR: u32 = 0x5;
/// `NVC86F_SET_REFERENCE`.
pub const SET_REFERENCE: u32 = 0x0050;
/// `NVC86F_SEM_ADDR_LO`, bits 31:2.
pub const SEM_ADDR_LO: u32 = 0x005c;
/// `NVC86F_SEM_ADDR_HI`, bits 24:0.
pub const SEM_ADDR_HI: u32 = 0x0060;
/// `NVC86F_SEM_PAYLOAD_LO`.
pub const SEM_PAYLOAD_LO: u32 = 0x0064;
/// `NVC86F_SEM_PAYLOAD_HI`.
pub const SEM_PAYLOAD_HI: u32 = 0x0068;
/// `NVC86F_SEM_EXECUTE`: see [`sem`].
pub const SEM_EXECUTE: u32 = 0x006c;
/// `NVC86F_WFI`.
pub const WFI: u32 = 0x0078;
/// `NVC86F_YIELD`.
pub const YIELD: u32 = 0x0080;
/// `YIELD_OP_TSG`: the next channel with work of the same group runs first. Time slices of groups
/// do not change.
pub const YIELD_TSG: u32 = 3;
/// First method of the subchannel's class.
pub const FIRST_CLASS_METHOD: u32 = 0x0100;

/// Fields of `NVC86F_SEM_EXECUTE`.
pub mod sem {
    /// `OPERATION`, bits 2:0.
    pub const OPERATION_MASK: u32 = 0x7;
    /// Wait until equal.
    pub const ACQUIRE: u32 = 0;
    /// Write the payload.
    pub const RELEASE: u32 = 1;
    /// Wait until memory >= payload, unsigned.
    pub const ACQ_STRICT_GEQ: u32 = 2;
    /// Wait until memory - payload >= 0 as a signed difference.
    pub const ACQ_CIRC_GEQ: u32 = 3;
    /// Wait until memory & payload is not zero.
    pub const ACQ_AND: u32 = 4;
    /// Wait until !(memory | payload) is not zero.
    pub const ACQ_NOR: u32 = 5;
    /// Operations that wait.
    pub const ACQUIRES: [u32; 5] = [ACQUIRE, ACQ_STRICT_GEQ, ACQ_CIRC_GEQ, ACQ_AND, ACQ_NOR];
    /// Read-modify-write; the operation is in bits 30:27: 0 min, 1 max, 2 xor, 3 and, 4 or, 5 add,
    /// 6 inc, 7 dec.
    pub const REDUCTION: u32 = 6;
    /// Shift of the operation of a reduction.
    pub const REDUCTION_SHIFT: u32 = 27;
    /// Mask of the shifted operation.
    pub const REDUCTION_MASK: u32 = 0xf;
    /// `REDUCTION_FORMAT_UNSIGNED`.
    pub const REDUCTION_UNSIGNED: u32 = 1 << 31;
    /// `ACQUIRE_SWITCH_TSG`: release the rest of the slice during the wait.
    pub const ACQUIRE_SWITCH_TSG: u32 = 1 << 12;
    /// `RELEASE_WFI`: wait for idle before the release.
    pub const RELEASE_WFI: u32 = 1 << 20;
    /// `PAYLOAD_SIZE_64BIT`.
    pub const PAYLOAD_64: u32 = 1 << 24;
    /// `RELEASE_TIMESTAMP`: also write nanoseconds at +8 (16-byte aligned address).
    pub const RELEASE_TIMESTAMP: u32 = 1 << 25;
}
