//! Windows of DMA addresses: each vGPU has one, in which its memory appears to the device, and no other.
//!
//! A device that does DMA for several vGPUs has one set of page tables in the IOMMU. So a vGPU's addresses are translated
//! into its own window, what is not in it is refused before the device sees it, and the IOMMU faults what is in nobody's.

use mdev_core::ids::VgpuId;

/// Why there is no window, or no such address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    /// The device cannot tell more of them apart.
    #[error("All {0} DMA windows of this device are taken: stop another vGPU first")]
    Full(usize),
    /// It has one.
    #[error("vGPU {0} has a DMA window already")]
    Taken(VgpuId),
    /// Not in its window.
    #[error("DMA address {address:#x} with {len:#x} bytes is not the vGPU's own memory")]
    Outside {
        /// The address that was named.
        address: u64,
        /// How many bytes.
        len: u64,
    },
}

/// One vGPU's window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its first address, as the device sees it.
    pub iova: u64,
    /// How long it is.
    pub len: u64,
}

impl Window {
    /// The device's address for one of the vGPU's, which begin at 0.
    pub fn translate(&self, address: u64, len: u64) -> Result<u64, WindowError> {
        match address.checked_add(len) {
            Some(end) if len > 0 && end <= self.len => Ok(self.iova + address),
            _ => Err(WindowError::Outside { address, len }),
        }
    }
}

/// All windows of a device, of one length each.
#[derive(Clone, Debug)]
pub struct Windows {
    len: u64,
    owners: Vec<Option<VgpuId>>,
}

impl Windows {
    /// As many windows of `len` bytes (a power of two) as a device with so many address bits can use. The first is
    /// nobody's, so that address 0 always faults; and none is where messages of interrupts go.
    pub fn new(dma_bits: u8, len: u64) -> Self {
        /// Where the IOMMU reserves addresses for interrupts, on PCs.
        const INTERRUPTS: u64 = 0xfee0_0000;
        let end = 1_u64.checked_shl(dma_bits.into()).unwrap_or(u64::MAX).min(INTERRUPTS);
        let len = len.next_power_of_two().max(mdev_core::units::PAGE_SIZE);
        let count = (end / len).saturating_sub(1).min(256) as usize;
        Self { len, owners: vec![None; count] }
    }

    /// Takes one for a vGPU.
    pub fn take(&mut self, vgpu: VgpuId) -> Result<Window, WindowError> {
        if self.owners.contains(&Some(vgpu)) {
            return Err(WindowError::Taken(vgpu));
        }
        let count = self.owners.len();
        let free = self.owners.iter_mut().enumerate().find(|(_, owner)| owner.is_none());
        let (index, owner) = free.ok_or(WindowError::Full(count))?;
        *owner = Some(vgpu);
        Ok(Window { iova: (index as u64 + 1) * self.len, len: self.len })
    }

    /// Gives a vGPU's back.
    pub fn give_back(&mut self, vgpu: VgpuId) {
        for owner in self.owners.iter_mut().filter(|owner| **owner == Some(vgpu)) {
            *owner = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

    fn id(n: u8) -> VgpuId {
        VgpuId(Uuid::from_u128(n.into()))
    }

    #[test]
    fn a_device_with_few_address_bits_has_few_windows() {
        let mut windows = Windows::new(28, 64 << 20);
        let all: Vec<_> = (0..3).map(|n| windows.take(id(n)).unwrap().iova >> 20).collect();
        assert_eq!(all, [64, 128, 192]);
        assert_eq!(windows.take(id(3)), Err(WindowError::Full(3)));
        assert_eq!(windows.take(id(1)), Err(WindowError::Taken(id(1))));
        windows.give_back(id(1));
        assert_eq!(windows.take(id(3)).unwrap().iova >> 20, 128);
        assert!(Windows::new(64, 1 << 30).owners.len() == 2, "below the interrupts' addresses");
    }

    proptest! {
        #[test]
        fn windows_never_overlap_and_translate_only_what_is_theirs(
            bits in 12..=64_u8,
            len in 1..=(1_u64 << 32),
            steps in prop::collection::vec((any::<bool>(), 0..12_u8), 0..40),
            address in any::<u64>(),
            size in any::<u64>(),
        ) {
            let mut windows = Windows::new(bits, len);
            let mut held = std::collections::BTreeMap::new();
            for (take, n) in steps {
                if !take {
                    windows.give_back(id(n));
                    held.remove(&n);
                } else if let Ok(window) = windows.take(id(n)) {
                    prop_assert!(held.insert(n, window).is_none());
                }
            }
            let all: Vec<_> = held.values().copied().collect();
            for (index, one) in all.iter().enumerate() {
                prop_assert!(one.iova > 0 && one.iova + one.len <= 1_u64.checked_shl(bits.into()).unwrap_or(u64::MAX));
                for two in &all[index + 1..] {
                    prop_assert!(one.iova + one.len <= two.iova || two.iova + two.len <= one.iova);
                }
                for (address, size) in [(address, size), (address % one.len, size % one.len)] {
                    if let Ok(at) = one.translate(address, size) {
                        prop_assert!(at >= one.iova && at + size <= one.iova + one.len);
                    }
                }
            }
        }
    }
}
