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
    /// What of each is in use.
    places: Vec<Places>,
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
        Self { len, owners: vec![None; count], places: vec![Places::default(); count] }
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
        Ok(self.at(index))
    }

    /// The end of the first window, which is no vGPU's: for what the mediator itself moves. Address 0 stays unmapped.
    pub fn mediators(&self, len: u64) -> Option<Window> {
        let iova = self.len.checked_sub(len).filter(|iova| *iova > 0)?;
        Some(Window { iova, len })
    }

    /// How many vGPUs can have one.
    pub fn count(&self) -> u32 {
        self.owners.len() as u32
    }

    /// A vGPU's window.
    pub fn of(&self, vgpu: VgpuId) -> Option<Window> {
        let index = self.owners.iter().position(|owner| *owner == Some(vgpu))?;
        Some(self.at(index))
    }

    /// A free place in a vGPU's window, and the window.
    pub fn place(&mut self, vgpu: VgpuId, len: u64) -> Option<(Window, u64)> {
        let index = self.owners.iter().position(|owner| *owner == Some(vgpu))?;
        let window = self.at(index);
        Some((window, self.places[index].take(window, len)?))
    }

    /// Gives a place back.
    pub fn give_back_place(&mut self, window: Window, iova: u64) {
        let index = (window.iova / self.len).checked_sub(1).map(|index| index as usize);
        if let Some(places) = index.and_then(|index| self.places.get_mut(index)) {
            places.give_back(window, iova);
        }
    }

    fn at(&self, index: usize) -> Window {
        Window { iova: (index as u64 + 1) * self.len, len: self.len }
    }

    /// Gives a vGPU's back.
    pub fn give_back(&mut self, vgpu: VgpuId) {
        for owner in self.owners.iter_mut().filter(|owner| **owner == Some(vgpu)) {
            *owner = None;
        }
    }
}

/// What of one window is in use: memory comes and goes in pieces of any length.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// First byte and length of each piece, in order.
    taken: Vec<(u64, u64)>,
}

impl Places {
    /// Takes the first gap that is long enough; its address as the device sees it.
    pub fn take(&mut self, window: Window, len: u64) -> Option<u64> {
        let mut at = 0;
        let mut index = 0;
        for (start, taken) in &self.taken {
            if start - at >= len {
                break;
            }
            at = start + taken;
            index += 1;
        }
        let end = at.checked_add(len).filter(|_| len > 0)?;
        if end > window.len {
            return None;
        }
        self.taken.insert(index, (at, len));
        Some(window.iova + at)
    }

    /// Gives a piece back, by its address.
    pub fn give_back(&mut self, window: Window, iova: u64) {
        self.taken.retain(|(start, _)| window.iova + start != iova);
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
        fn pieces_of_a_window_never_overlap_and_gaps_are_used_again(
            steps in prop::collection::vec((any::<bool>(), 1..9_u64, 0..8_usize), 0..60),
        ) {
            let window = Window { iova: 1 << 26, len: 32 };
            let (mut places, mut held) = (Places::default(), Vec::<(u64, u64)>::new());
            for (take, len, which) in steps {
                if take {
                    let longest = {
                        let mut edges: Vec<_> = held.clone();
                        edges.sort_unstable();
                        edges.push((window.iova + window.len, 0));
                        let mut at = window.iova;
                        edges.iter().map(|(start, len)| { let gap = start - at; at = start + len; gap }).max()
                    };
                    let got = places.take(window, len);
                    prop_assert_eq!(got.is_some(), longest >= Some(len));
                    if let Some(iova) = got {
                        prop_assert!(window.translate(iova - window.iova, len).is_ok());
                        prop_assert!(held.iter().all(|(at, size)| iova + len <= *at || at + size <= iova));
                        held.push((iova, len));
                    }
                } else if which < held.len() {
                    places.give_back(window, held.swap_remove(which).0);
                }
            }
        }

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
