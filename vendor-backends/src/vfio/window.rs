//! Windows of DMA addresses: each vGPU has one, in which its memory appears to the device, and no other.
//!
//! A device that does DMA for several vGPUs has one set of page tables in the IOMMU. So a vGPU's addresses are translated
//! into its own window, what is not in it is refused before the device sees it, and the IOMMU faults what is in nobody's.

use std::ops::RangeInclusive;

use mdev_core::ids::VgpuId;
use mdev_core::units::{GIB, MIB, PAGE_SIZE};

/// Windows of one device, at most.
const MOST: usize = 256;
/// Addresses of a PC that are memory to a device: not those where messages of interrupts go.
const PC: [RangeInclusive<u64>; 2] = [0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX];

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
    /// First address of each.
    starts: Vec<u64>,
    owners: Vec<Option<VgpuId>>,
    /// What of each is in use.
    places: Vec<Places>,
}

impl Windows {
    /// As many windows of `len` bytes (a power of two) as a device with so many address bits can use. The first is
    /// nobody's, so that address 0 always faults; and none is where messages of interrupts go.
    pub fn new(dma_bits: u8, len: u64) -> Self {
        Self::within(&PC, dma_bits, len)
    }

    /// The same, of addresses that the IOMMU takes.
    pub fn within(usable: &[RangeInclusive<u64>], dma_bits: u8, len: u64) -> Self {
        let last = last_address(dma_bits);
        let len = len.next_power_of_two().max(PAGE_SIZE);
        let fits = |start: &u64| {
            let Some(end) = start.checked_add(len - 1).filter(|end| *end <= last) else {
                return false;
            };
            let holds = |range: &RangeInclusive<u64>| range.contains(start) && range.contains(&end);
            usable.iter().any(holds) && PC.iter().any(holds)
        };
        // What is beyond a hole may be usable again, but a device's last address is an end.
        let all = (1..=last / len).map_while(|index| index.checked_mul(len));
        let starts: Vec<u64> = all.take(4 * MOST).filter(fits).take(MOST).collect();
        let count = starts.len();
        Self { len, starts, owners: vec![None; count], places: vec![Places::default(); count] }
    }

    /// How long a window is where nobody chose: a sixteenth of what the device can address, which is 15 vGPUs, but 64 MiB
    /// at least, so that a VM fits, and 64 GiB at most.
    pub fn usual_len(dma_bits: u8) -> u64 {
        let quarter = (last_address(dma_bits) / 4 + 1).next_power_of_two();
        (quarter / 4).max((64 * MIB).min(quarter)).min(64 * GIB)
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
        let index = self.starts.iter().position(|start| *start == window.iova);
        if let Some(places) = index.and_then(|index| self.places.get_mut(index)) {
            places.give_back(window, iova);
        }
    }

    fn at(&self, index: usize) -> Window {
        Window { iova: self.starts[index], len: self.len }
    }

    /// Gives a vGPU's back.
    pub fn give_back(&mut self, vgpu: VgpuId) {
        for owner in self.owners.iter_mut().filter(|owner| **owner == Some(vgpu)) {
            *owner = None;
        }
    }
}

/// The last address with so many bits.
fn last_address(bits: u8) -> u64 {
    1_u64.checked_shl(bits.into()).map_or(u64::MAX, |end| end - 1)
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
    }

    #[test]
    fn windows_leave_holes_out_and_go_on_beyond_them() {
        let mut windows = Windows::new(40, GIB);
        assert_eq!(windows.count(), 256);
        let mut take = |n| windows.take(id(n)).unwrap().iova / GIB;
        assert_eq!([take(1), take(2), take(3)], [1, 2, 4], "the fourth is where interrupts go");
        // An IOMMU with a hole of its own, and an end.
        let usable = [0..=8 * GIB - 1, 10 * GIB..=13 * GIB];
        let mut windows = Windows::within(&usable, 64, GIB);
        let all: Vec<_> = (0..9).map_while(|n| windows.take(id(n)).ok()).collect();
        let all: Vec<_> = all.iter().map(|window| window.iova / GIB).collect();
        assert_eq!(all, [1, 2, 4, 5, 6, 7, 10, 11, 12]);
        // What is beyond the last address is nobody's.
        assert_eq!(Windows::new(64, 1 << 63).count(), 1);
        assert_eq!(Windows::new(28, 128 * MIB).count(), 1);
    }

    #[test]
    fn where_nobody_chose_vms_fit_and_there_are_several() {
        for (bits, mib, count) in [
            (24, 4, 3),
            (28, 64, 3),
            (30, 64, 15),
            (32, 256, 14),
            (40, 65_536, 15),
            (64, 65_536, 256),
        ] {
            let len = Windows::usual_len(bits);
            assert_eq!((len / MIB, Windows::new(bits, len).count()), (mib, count), "{bits} bits");
        }
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
