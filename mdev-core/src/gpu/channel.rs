//! Channels and the check of their parameters.

use serde::{Deserialize, Serialize};

use super::{Backing, GpuCapabilities};
use crate::abi::control::VECTORS;
use crate::abi::host::{GP_ENTRY_BYTES, GpEntry};
use crate::abi::mailbox::{ENGINE_COMPUTE, ENGINE_COPY, MAX_GPFIFO_ENTRIES, VA_END, VA_START};
use crate::abi::userd;
use crate::ids::{ChannelId, GpuVa, SpaceId, Token};
use crate::units::{PAGE_SIZE, is_aligned};

/// Engine of a channel. Every channel has the host class too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EngineKind {
    /// Copy class only ([`crate::abi::copy`]).
    Copy,
    /// Compute and copy classes ([`crate::abi::compute`]).
    Compute,
}

impl EngineKind {
    /// Returns the engine with this number in the mailbox interface.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            ENGINE_COPY => Some(Self::Copy),
            ENGINE_COMPUTE => Some(Self::Compute),
            _ => None,
        }
    }

    /// Returns the capability of GPUs with this engine.
    pub const fn capability(self) -> GpuCapabilities {
        match self {
            Self::Copy => GpuCapabilities::COPY,
            Self::Compute => GpuCapabilities::COMPUTE,
        }
    }
}

/// Parameters of a new channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelSpec {
    /// Engine.
    pub engine: EngineKind,
    /// Address of the GPFIFO in the GPU virtual address space (40 bits, 8-byte aligned).
    pub gpfifo: GpuVa,
    /// Number of GPFIFO entries, a power of two from 2 to [`MAX_GPFIFO_ENTRIES`].
    pub gpfifo_entries: u32,
    /// Location of the 512-byte USERD, 512-byte aligned.
    pub userd: Backing,
    /// Interrupt vector of non-stall interrupts.
    pub vector: u32,
    /// Address space.
    pub space: SpaceId,
    /// Group that is scheduled as one. Channels of a client with the same number are in the same
    /// group, and must have the same engine and address space. `None`: the default group of the
    /// engine and address space.
    pub group: Option<u32>,
    /// Part of the GPU that a program has asked for. GPU processes have no use for it.
    #[serde(skip)]
    pub placement: Placement,
    /// Pushbuffer that gives a channel of hardware its state again. GPU processes have no use for
    /// it.
    #[serde(skip)]
    pub preamble: Option<Preamble>,
}

/// Pushbuffer that gives a new channel the state that its driver has given it
/// ([`preamble_va`](crate::abi::mailbox::ChannelCreate::preamble_va)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preamble {
    /// Address, 4-byte aligned and below [`VA_END`].
    pub va: GpuVa,
    /// Length in 32-bit words, at most [`GpEntry::MAX_DWORDS`].
    pub dwords: u32,
}

impl Preamble {
    /// Returns the preamble, or `None` if no channel can have it.
    pub fn new(va: GpuVa, dwords: u32) -> Option<Self> {
        let end = va.0.checked_add(u64::from(dwords) * 4)?;
        let fits =
            is_aligned(va.0, 4) && end <= VA_END && (1..=GpEntry::MAX_DWORDS).contains(&dwords);
        fits.then_some(Self { va, dwords })
    }
}

/// Part of a GPU that a channel is placed on, where the GPU has several of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Number of a copy engine. Another one takes its place if the GPU does not have it, or not for
    /// guests.
    pub copy_engine: Option<u32>,
    /// Second of two runqueues of the engine, each of which fetches the commands of one channel at
    /// a time.
    pub second_runqueue: bool,
}

impl ChannelSpec {
    /// Checks all parameters that do not depend on the vGPU's memory.
    ///
    /// The mailbox checks a guest's request with [`ChannelRequest::check`], and a GPU checks the
    /// worker's request again.
    pub fn check(&self, capabilities: GpuCapabilities) -> Result<(), ChannelSpecError> {
        let offset = self.userd.offset();
        let Self { engine, gpfifo, gpfifo_entries, vector, .. } = *self;
        let request = ChannelRequest { engine, gpfifo, gpfifo_entries, userd: offset, vector };
        let va_start = if self.space == SpaceId::DEFAULT { VA_START } else { PAGE_SIZE };
        request.check_from(va_start, capabilities)
    }
}

/// Parameters of a new channel before its USERD is located in imported memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelRequest {
    /// Engine.
    pub engine: EngineKind,
    /// Address of the GPFIFO.
    pub gpfifo: GpuVa,
    /// Number of GPFIFO entries.
    pub gpfifo_entries: u32,
    /// Address or offset of the USERD.
    pub userd: u64,
    /// Interrupt vector.
    pub vector: u32,
}

impl ChannelRequest {
    /// Checks the parameters.
    pub fn check(&self, capabilities: GpuCapabilities) -> Result<(), ChannelSpecError> {
        self.check_from(VA_START, capabilities)
    }

    /// Checks the parameters for an address space that starts at `va_start`.
    fn check_from(
        &self,
        va_start: u64,
        capabilities: GpuCapabilities,
    ) -> Result<(), ChannelSpecError> {
        use ChannelSpecError as E;
        let GpuVa(gpfifo) = self.gpfifo;
        let entries = self.gpfifo_entries;
        let end = gpfifo.checked_add(u64::from(entries) * GP_ENTRY_BYTES);
        if !capabilities.contains(self.engine.capability()) {
            Err(E::Engine)
        } else if !entries.is_power_of_two() || !(2..=MAX_GPFIFO_ENTRIES).contains(&entries) {
            Err(E::GpfifoEntries)
        } else if !is_aligned(gpfifo, GP_ENTRY_BYTES) {
            Err(E::GpfifoAlignment)
        } else if !is_aligned(self.userd, userd::BYTES) {
            Err(E::UserdAlignment)
        } else if self.vector >= VECTORS {
            Err(E::Vector)
        } else if gpfifo < va_start || end.is_none_or(|end| end > VA_END) {
            Err(E::GpfifoRange)
        } else {
            Ok(())
        }
    }

    /// Returns the specification with the location of the USERD, in the default address space and
    /// group.
    pub const fn with_userd(self, userd: Backing) -> ChannelSpec {
        let Self { engine, gpfifo, gpfifo_entries, vector, .. } = self;
        let (space, group) = (SpaceId::DEFAULT, None);
        let placement = Placement { copy_engine: None, second_runqueue: false };
        let preamble = None;
        ChannelSpec {
            engine,
            gpfifo,
            gpfifo_entries,
            userd,
            vector,
            space,
            group,
            placement,
            preamble,
        }
    }
}

/// Invalid parameter of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelSpecError {
    /// The GPU has no such engine.
    #[error("The GPU has no such engine")]
    Engine,
    /// The number of GPFIFO entries is invalid.
    #[error("The number of GPFIFO entries must be a power of two from 2 to {MAX_GPFIFO_ENTRIES}")]
    GpfifoEntries,
    /// The GPFIFO is not aligned.
    #[error("The GPFIFO must be {GP_ENTRY_BYTES}-byte aligned")]
    GpfifoAlignment,
    /// The USERD is not aligned. NVIDIA's driver accepts such a USERD; the hardware reads another.
    #[error("The USERD must be {}-byte aligned", userd::BYTES)]
    UserdAlignment,
    /// The interrupt vector does not exist.
    #[error("The interrupt vector must be less than {VECTORS}")]
    Vector,
    /// The GPFIFO is outside of the GPU virtual address range.
    #[error("The GPFIFO must be in the GPU virtual address range {VA_START:#x} to {VA_END:#x}")]
    GpfifoRange,
}

/// Ids of a new channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelHandle {
    /// Id in requests.
    pub id: ChannelId,
    /// Value that the guest writes to the doorbell.
    pub token: Token,
}

/// Status of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelStatus {
    /// 0, or the code of the error notifier (`ROBUST_CHANNEL_*`, see [`crate::abi::notifier`]).
    pub error: u32,
    /// The faulting GPU virtual address or the invalid method.
    pub error_info: u64,
    /// Consumed GPFIFO entries, modulo the ring.
    pub gp_get: u32,
    /// Engine time, in nanoseconds.
    pub engine_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::ChannelSpecError as E;
    use super::*;

    const GOOD: ChannelSpec = ChannelSpec {
        engine: EngineKind::Compute,
        gpfifo: GpuVa(VA_START),
        gpfifo_entries: 2,
        userd: Backing::Vram { offset: 512 },
        vector: VECTORS - 1,
        space: SpaceId::DEFAULT,
        group: None,
        placement: Placement { copy_engine: None, second_runqueue: false },
        preamble: None,
    };

    #[test]
    fn channel_parameters_are_accepted_up_to_their_limits() {
        let ring = u64::from(MAX_GPFIFO_ENTRIES) * GP_ENTRY_BYTES;
        let largest = ChannelSpec {
            gpfifo: GpuVa(VA_END - ring),
            gpfifo_entries: MAX_GPFIFO_ENTRIES,
            ..GOOD
        };
        let low =
            ChannelSpec { gpfifo: GpuVa(PAGE_SIZE), space: SpaceId(1), group: Some(7), ..GOOD };
        for spec in [GOOD, largest, low] {
            assert_eq!(spec.check(GpuCapabilities::COMPUTE), Ok(()), "{spec:?}");
        }
    }

    #[test]
    fn each_invalid_channel_parameter_is_refused() {
        let userd = |offset| Backing::Vram { offset };
        for (spec, error) in [
            (ChannelSpec { engine: EngineKind::Copy, ..GOOD }, E::Engine),
            (ChannelSpec { gpfifo_entries: 0, ..GOOD }, E::GpfifoEntries),
            (ChannelSpec { gpfifo_entries: 1, ..GOOD }, E::GpfifoEntries),
            (ChannelSpec { gpfifo_entries: 3, ..GOOD }, E::GpfifoEntries),
            (ChannelSpec { gpfifo_entries: MAX_GPFIFO_ENTRIES * 2, ..GOOD }, E::GpfifoEntries),
            (ChannelSpec { gpfifo: GpuVa(VA_START + 4), ..GOOD }, E::GpfifoAlignment),
            (ChannelSpec { userd: userd(256), ..GOOD }, E::UserdAlignment),
            (ChannelSpec { vector: VECTORS, ..GOOD }, E::Vector),
            (ChannelSpec { gpfifo: GpuVa(VA_START - 8), ..GOOD }, E::GpfifoRange),
            (ChannelSpec { gpfifo: GpuVa(VA_END - 8), ..GOOD }, E::GpfifoRange),
            (ChannelSpec { gpfifo: GpuVa(!7), ..GOOD }, E::GpfifoRange),
            (ChannelSpec { gpfifo: GpuVa(8), space: SpaceId(1), ..GOOD }, E::GpfifoRange),
            (ChannelSpec { gpfifo: GpuVa(VA_END), space: SpaceId(1), ..GOOD }, E::GpfifoRange),
        ] {
            assert_eq!(spec.check(GpuCapabilities::COMPUTE), Err(error), "{spec:?}");
        }
    }
}
