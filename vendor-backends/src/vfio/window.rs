//! DMA windows: the IOVA range of each vGPU, in which the device sees that vGPU's memory.
//!
//! A device that does DMA for several vGPUs has one set of IOMMU page tables. The mediator
//! translates a vGPU's addresses into its window and refuses addresses outside the window before
//! the device sees them. The IOMMU faults on addresses that belong to no window.

use std::ops::RangeInclusive;

use mdev_core::ids::VgpuId;
use mdev_core::units::{GIB, MIB, PAGE_SIZE};

/// Maximum number of windows of one device.
const MAX_WINDOWS: usize = 256;
/// IOVA ranges of a PC, without the MSI window.
const PC_IOVA_RANGES: [RangeInclusive<u64>; 2] = [0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX];

/// Error of taking a window or translating an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    /// All windows are in use.
    #[error("All {0} DMA windows of this device are in use: stop another vGPU first")]
    Full(usize),
    /// The vGPU has a window.
    #[error("vGPU {0} already has a DMA window")]
    Taken(VgpuId),
    /// The range is not inside the vGPU's window.
    #[error("{len:#x} bytes at DMA address {address:#x} are not in the vGPU's DMA window")]
    Outside {
        /// Start of the refused range.
        address: u64,
        /// Length of the refused range in bytes.
        len: u64,
    },
}

/// IOVA range of one vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First IOVA.
    pub iova: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Window {
    /// Translates an offset into the window to an IOVA.
    pub fn translate(&self, address: u64, len: u64) -> Result<u64, WindowError> {
        match address.checked_add(len) {
            Some(end) if len > 0 && end <= self.len => Ok(self.iova + address),
            _ => Err(WindowError::Outside { address, len }),
        }
    }
}

/// All windows of a device. They have the same length.
#[derive(Clone, Debug)]
pub struct Windows {
    len: u64,
    /// First IOVA of each window.
    starts: Vec<u64>,
    vgpus: Vec<Option<VgpuId>>,
    /// Allocations in each window.
    allocators: Vec<WindowAllocator>,
}

impl Windows {
    /// Creates as many windows of `len` bytes (a power of two) as fit into `dma_bits` address bits.
    /// The first slot is never given to a vGPU, so that IOVA 0 always faults. No window overlaps
    /// the MSI window.
    pub fn new(dma_bits: u8, len: u64) -> Self {
        Self::in_ranges(&PC_IOVA_RANGES, dma_bits, len)
    }

    /// Creates windows inside the IOVA ranges that the IOMMU can map.
    pub fn in_ranges(usable: &[RangeInclusive<u64>], dma_bits: u8, len: u64) -> Self {
        let last = last_address(dma_bits);
        let len = len.next_power_of_two().max(PAGE_SIZE);
        let fits = |start: &u64| {
            let Some(end) = start.checked_add(len - 1).filter(|end| *end <= last) else {
                return false;
            };
            let holds = |range: &RangeInclusive<u64>| range.contains(start) && range.contains(&end);
            usable.iter().any(holds) && PC_IOVA_RANGES.iter().any(holds)
        };
        // Ranges beyond a hole may be usable, but nothing beyond the device's last address is.
        let all = (1..=last / len).map_while(|index| index.checked_mul(len));
        let starts: Vec<u64> = all.take(4 * MAX_WINDOWS).filter(fits).take(MAX_WINDOWS).collect();
        let count = starts.len();
        Self {
            len,
            starts,
            vgpus: vec![None; count],
            allocators: vec![WindowAllocator::default(); count],
        }
    }

    /// Returns the default window length: a sixteenth of the device's address range (15 vGPUs), at
    /// least 64 MiB so that a VM fits, and at most 64 GiB.
    pub fn default_len(dma_bits: u8) -> u64 {
        let quarter = (last_address(dma_bits) / 4 + 1).next_power_of_two();
        (quarter / 4).max((64 * MIB).min(quarter)).min(64 * GIB)
    }

    /// Assigns a free window to a vGPU.
    pub fn take(&mut self, vgpu: VgpuId) -> Result<Window, WindowError> {
        if self.vgpus.contains(&Some(vgpu)) {
            return Err(WindowError::Taken(vgpu));
        }
        let count = self.vgpus.len();
        let free = self.vgpus.iter_mut().enumerate().find(|(_, slot)| slot.is_none());
        let (index, slot) = free.ok_or(WindowError::Full(count))?;
        *slot = Some(vgpu);
        Ok(self.at(index))
    }

    /// Returns `len` bytes at the end of the reserved first slot, for the mediator's own transfers.
    /// IOVA 0 stays unmapped.
    pub fn mediator_window(&self, len: u64) -> Option<Window> {
        let iova = self.len.checked_sub(len).filter(|iova| *iova > 0)?;
        Some(Window { iova, len })
    }

    /// Returns the number of windows.
    pub fn count(&self) -> u32 {
        self.vgpus.len() as u32
    }

    /// Returns a vGPU's window.
    pub fn get(&self, vgpu: VgpuId) -> Option<Window> {
        let index = self.vgpus.iter().position(|slot| *slot == Some(vgpu))?;
        Some(self.at(index))
    }

    /// Allocates `len` bytes in a vGPU's window. Returns the window and the IOVA.
    pub fn allocate(&mut self, vgpu: VgpuId, len: u64) -> Option<(Window, u64)> {
        let index = self.vgpus.iter().position(|slot| *slot == Some(vgpu))?;
        let window = self.at(index);
        Some((window, self.allocators[index].allocate(window, len)?))
    }

    /// Frees an allocation.
    pub fn free(&mut self, window: Window, iova: u64) {
        let index = self.starts.iter().position(|start| *start == window.iova);
        if let Some(allocator) = index.and_then(|index| self.allocators.get_mut(index)) {
            allocator.free(window, iova);
        }
    }

    fn at(&self, index: usize) -> Window {
        Window { iova: self.starts[index], len: self.len }
    }

    /// Frees a vGPU's window.
    pub fn release(&mut self, vgpu: VgpuId) {
        for slot in self.vgpus.iter_mut().filter(|slot| **slot == Some(vgpu)) {
            *slot = None;
        }
    }
}

/// Returns the last address with `bits` bits.
fn last_address(bits: u8) -> u64 {
    1_u64.checked_shl(bits.into()).map_or(u64::MAX, |end| end - 1)
}

/// Allocator of one window. Allocations have any length.
#[derive(Clone, Debug, Default)]
pub struct WindowAllocator {
    /// Offset and length of each allocation, in ascending order.
    allocated: Vec<(u64, u64)>,
}

impl WindowAllocator {
    /// Allocates the first gap that is long enough and returns its IOVA.
    pub fn allocate(&mut self, window: Window, len: u64) -> Option<u64> {
        let mut at = 0;
        let mut index = 0;
        for (start, length) in &self.allocated {
            if start - at >= len {
                break;
            }
            at = start + length;
            index += 1;
        }
        let end = at.checked_add(len).filter(|_| len > 0)?;
        if end > window.len {
            return None;
        }
        self.allocated.insert(index, (at, len));
        Some(window.iova + at)
    }

    /// Frees the allocation at `iova`.
    pub fn free(&mut self, window: Window, iova: u64) {
        self.allocated.retain(|(start, _)| window.iova + start != iova);
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
        windows.release(id(1));
        assert_eq!(windows.take(id(3)).unwrap().iova >> 20, 128);
    }

    #[test]
    fn windows_skip_holes_in_the_iova_ranges() {
        let mut windows = Windows::new(40, GIB);
        assert_eq!(windows.count(), 256);
        let mut take = |n| windows.take(id(n)).unwrap().iova / GIB;
        assert_eq!([take(1), take(2), take(3)], [1, 2, 4], "the slot of the MSI window is skipped");
        // An IOMMU with a hole and an upper limit.
        let usable = [0..=8 * GIB - 1, 10 * GIB..=13 * GIB];
        let mut windows = Windows::in_ranges(&usable, 64, GIB);
        let all: Vec<_> = (0..9).map_while(|n| windows.take(id(n)).ok()).collect();
        let all: Vec<_> = all.iter().map(|window| window.iova / GIB).collect();
        assert_eq!(all, [1, 2, 4, 5, 6, 7, 10, 11, 12]);
        // Nothing lies beyond the last address.
        assert_eq!(Windows::new(64, 1 << 63).count(), 1);
        assert_eq!(Windows::new(28, 128 * MIB).count(), 1);
    }

    #[test]
    fn default_length_fits_a_vm_and_allows_several_windows() {
        for (bits, mib, count) in [
            (24, 4, 3),
            (28, 64, 3),
            (30, 64, 15),
            (32, 256, 14),
            (40, 65_536, 15),
            (64, 65_536, 256),
        ] {
            let len = Windows::default_len(bits);
            assert_eq!((len / MIB, Windows::new(bits, len).count()), (mib, count), "{bits} bits");
        }
    }

    proptest! {
        #[test]
        fn allocations_never_overlap_and_gaps_are_reused(
            steps in prop::collection::vec((any::<bool>(), 1..9_u64, 0..8_usize), 0..60),
        ) {
            let window = Window { iova: 1 << 26, len: 32 };
            let (mut allocator, mut held) = (WindowAllocator::default(), Vec::<(u64, u64)>::new());
            for (take, len, which) in steps {
                if take {
                    let longest = {
                        let mut edges: Vec<_> = held.clone();
                        edges.sort_unstable();
                        edges.push((window.iova + window.len, 0));
                        let mut at = window.iova;
                        edges.iter().map(|(start, len)| { let gap = start - at; at = start + len; gap }).max()
                    };
                    let got = allocator.allocate(window, len);
                    prop_assert_eq!(got.is_some(), longest >= Some(len));
                    if let Some(iova) = got {
                        prop_assert!(window.translate(iova - window.iova, len).is_ok());
                        prop_assert!(held.iter().all(|(at, size)| iova + len <= *at || at + size <= iova));
                        held.push((iova, len));
                    }
                } else if which < held.len() {
                    allocator.free(window, held.swap_remove(which).0);
                }
            }
        }

        #[test]
        fn windows_never_overlap_and_translate_only_their_own_range(
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
                    windows.release(id(n));
                    held.remove(&n);
                } else if let Ok(window) = windows.take(id(n)) {
                    prop_assert!(held.insert(n, window).is_none());
                }
            }
            let all: Vec<_> = held.values().copied().collect();
            for (index, one) in all.iter().enumerate() {
                prop_assert!(one.iova > 0 && one.iova + (one.len - 1) <= last_address(bits));
                prop_assert!(one.iova + one.len <= 0xfee0_0000 || one.iova >= 0xfef0_0000);
                for two in &all[index + 1..] {
                    prop_assert!(one.iova.abs_diff(two.iova) >= one.len);
                }
                for (address, size) in [(address, size), (address % one.len, size % one.len)] {
                    if let Ok(at) = one.translate(address, size) {
                        prop_assert!(at >= one.iova && at - one.iova + size <= one.len);
                    }
                }
            }
        }
    }
}
