//! Trapped accesses to memory that a client normally maps.
//!
//! Clients need not map apertures, and QEMU disables its mappings for a moment after an INTx.

use std::os::fd::AsFd;

use vm_memory::Bytes;

use crate::gpu::Aperture;
use crate::sigbus::{GuardedMapping, Protection};

/// Worker's mapping of an aperture. It is created on first use: an aperture of real hardware can be
/// mapped only once, and that mapping is the client's.
#[derive(Debug, Default)]
pub(super) struct Window {
    mapping: Option<GuardedMapping>,
    failed: bool,
}

impl Window {
    /// Reads bytes; bytes outside of the aperture are zero.
    pub fn read(&mut self, aperture: &Aperture, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some((mapping, range)) = self.range(aperture, offset, data.len()) {
            let _ = mapping.slice().read_slice(&mut data[..range.1], range.0);
        }
    }

    /// Writes bytes; bytes outside of the aperture are ignored.
    pub fn write(&mut self, aperture: &Aperture, offset: u64, data: &[u8]) {
        if let Some((mapping, range)) = self.range(aperture, offset, data.len()) {
            let _ = mapping.slice().write_slice(&data[..range.1], range.0);
        }
    }

    /// Fills the first `len` bytes with zeros.
    pub fn clear(&mut self, aperture: &Aperture, len: u64) {
        static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];
        let len = len.min(aperture.len);
        for offset in (0..len).step_by(ZEROS.len()) {
            let part = (len - offset).min(ZEROS.len() as u64) as usize;
            self.write(aperture, offset, &ZEROS[..part]);
        }
    }

    /// Returns the mapping, and the offset and length of the part inside the aperture.
    fn range(
        &mut self,
        aperture: &Aperture,
        offset: u64,
        len: usize,
    ) -> Option<(&GuardedMapping, (usize, usize))> {
        if self.mapping.is_none() && !self.failed {
            let size = usize::try_from(aperture.len).ok()?;
            let (fd, offset) = (aperture.fd.as_fd(), aperture.offset);
            match GuardedMapping::map(fd, offset, size, Protection::ReadWrite) {
                Ok(mapping) => self.mapping = Some(mapping),
                Err(error) => {
                    self.failed = true;
                    log::warn!("Cannot map an aperture for trapped accesses: {error}");
                }
            }
        }
        let mapping = self.mapping.as_ref()?;
        let start = usize::try_from(offset).ok().filter(|start| *start < mapping.len())?;
        Some((mapping, (start, len.min(mapping.len() - start))))
    }
}
