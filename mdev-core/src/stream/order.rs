//! Order of the chunks of a stream.

use super::{ChunkHeader, Head, MAX_DOMAIN, MAX_STATE, MAX_VGPUS, Part, StreamError, kind};
use crate::ids::GuestPa;

/// Damage of a stream whose parts come in an impossible order.
const DISORDER: &str = "its parts are not in order";

/// Order of the parts of a stream.
#[derive(Debug, Default)]
pub(super) struct Order {
    state_bytes: u64,
    /// End of the guest memory that was read. `None` before the first.
    guest_end: Option<u64>,
    /// End of the video memory that was read. `None` before the first.
    memory_end: Option<u64>,
    /// Bytes of the domain's XML. `None` before the first.
    domain_bytes: Option<u64>,
    /// Bytes of the VM's state. `None` before the first.
    machine_bytes: Option<u64>,
    /// Number of vGPUs.
    vgpus: usize,
    vram_bytes: u64,
    pub(super) ended: bool,
}

/// Kind of a part, without its data.
#[derive(Clone, Copy, Debug)]
pub(super) enum PartKind {
    State,
    Memory { offset: u64 },
    Guest { address: u64 },
    Next,
    Domain,
    Machine,
    End,
}

impl Order {
    /// Reads the chunk that a stream begins with.
    pub(super) fn begin(&mut self, chunk: ChunkHeader, data: &[u8]) -> Result<Head, StreamError> {
        if (chunk.kind, chunk.offset) != (kind::HEAD, 0) {
            return Err(StreamError::Damaged("it does not begin with a description"));
        }
        let head = parse_head(data)?;
        self.begin_vgpu(&head);
        Ok(head)
    }

    fn begin_vgpu(&mut self, head: &Head) {
        self.vram_bytes = head.vram_bytes;
        self.state_bytes = 0;
        (self.guest_end, self.memory_end) = (None, None);
        self.vgpus += 1;
    }

    fn is_in_state(&self) -> bool {
        self.guest_end.is_none() && self.memory_end.is_none()
    }

    /// Checks that a chunk, which begins at byte `at` of the stream, may come next.
    pub(super) fn admit(&mut self, chunk: ChunkHeader, at: u64) -> Result<PartKind, StreamError> {
        let ChunkHeader { kind, offset, .. } = chunk;
        let len = chunk.len as u64;
        match kind {
            _ if self.ended => Err(StreamError::Damaged(DISORDER)),
            kind::MACHINE if len > 0 && offset == self.machine_bytes.unwrap_or(0) => {
                self.machine_bytes = Some(offset.saturating_add(len));
                Ok(PartKind::Machine)
            }
            kind::END if len == 0 && offset == at => {
                self.ended = true;
                Ok(PartKind::End)
            }
            _ if self.machine_bytes.is_some() => Err(StreamError::Damaged(DISORDER)),
            kind::DOMAIN if len > 0 && offset == self.domain_bytes.unwrap_or(0) => {
                let end = offset.saturating_add(len);
                if end > MAX_DOMAIN {
                    return Err(StreamError::Damaged("its domain is too long"));
                }
                self.domain_bytes = Some(end);
                Ok(PartKind::Domain)
            }
            _ if self.domain_bytes.is_some() => Err(StreamError::Damaged(DISORDER)),
            kind::NEXT if offset == 0 && self.vgpus < MAX_VGPUS => Ok(PartKind::Next),
            kind::STATE if self.is_in_state() && offset == self.state_bytes => {
                self.state_bytes += len;
                if self.state_bytes > MAX_STATE {
                    return Err(StreamError::Damaged("its state is too long"));
                }
                Ok(PartKind::State)
            }
            kind::GUEST
                if self.memory_end.is_none()
                    && len > 0
                    && offset >= self.guest_end.unwrap_or(0) =>
            {
                let end = offset.checked_add(len);
                self.guest_end = Some(end.ok_or(StreamError::Damaged(DISORDER))?);
                Ok(PartKind::Guest { address: offset })
            }
            kind::MEMORY if len > 0 && offset >= self.memory_end.unwrap_or(0) => {
                let end = offset.checked_add(len).filter(|end| *end <= self.vram_bytes);
                let outside = StreamError::Damaged("it has more video memory than its vGPU");
                self.memory_end = Some(end.ok_or(outside)?);
                Ok(PartKind::Memory { offset })
            }
            _ => Err(StreamError::Damaged(DISORDER)),
        }
    }
}

impl PartKind {
    pub(super) fn with<'a>(
        self,
        order: &mut Order,
        data: &'a [u8],
    ) -> Result<Part<'a>, StreamError> {
        Ok(match self {
            Self::State => Part::State(data),
            Self::Memory { offset } => Part::Memory { offset, data },
            Self::Guest { address } => Part::Guest { address: GuestPa(address), data },
            Self::Next => {
                let head = parse_head(data)?;
                order.begin_vgpu(&head);
                Part::Next(head)
            }
            Self::Domain => Part::Domain(data),
            Self::Machine => Part::Machine(data),
            Self::End => Part::End,
        })
    }
}

fn parse_head(data: &[u8]) -> Result<Head, StreamError> {
    serde_json::from_slice(data).map_err(|_| StreamError::Damaged("its description cannot be read"))
}
