//! Warnings about how a VM was started, derived from its memory mappings.
//!
//! A VM without shared memory boots and draws; only its channels fail or silently lose work. Each
//! cause has its own line, which names the fix.

use std::io;

use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::{DmaAccess, GuestMemory, Map};
use crate::units::{KIB, MIB, PAGE_SIZE};

/// Minimum size of a range without a file that counts as the guest's RAM.
const LARGE: u64 = 32 * MIB;
/// Part of the lowest RAM that is checked for non-zero bytes: the memory of a PC below the VGA
/// hole.
const SAMPLE: u64 = 640 * KIB;

/// Limits of the guest memory that a vGPU can import, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportLimits {
    /// Limit of the GPU.
    pub gpu: u64,
    /// Limit of the vGPU's admission.
    pub vgpu: u64,
}

impl GuestMemory {
    /// Returns warnings about the VM's memory for the operator, one line each.
    ///
    /// `own` are the device's own BARs, which a client may map back without a file. `active` is
    /// true while the guest's driver runs, so that its RAM cannot be all zeros. `limits` are the
    /// limits of imports.
    pub fn advice(&self, own: &[(u64, u64)], active: bool, limits: ImportLimits) -> Vec<String> {
        let mut lines = Vec::new();
        lines.extend(self.ram_beyond_limits(limits));
        let is_own =
            |start: u64| own.iter().any(|(bar, len)| start.wrapping_sub(*bar) < *len && *len > 0);
        let ram = |map: &Map| map.size >= LARGE && map.access.contains(DmaAccess::WRITE);
        let has_shared = self.maps.values().any(|map| map.file.is_some() && ram(map));
        let fileless = self.maps.iter().find(|(start, map)| {
            map.file.is_none() && !map.truncated && ram(map) && !is_own(**start)
        });
        if let Some((start, map)) = fileless.filter(|_| !has_shared) {
            lines.push(match &map.failure {
                None => format!(
                    "Guest RAM at {start:#x} ({} MiB) is not shared with the device, so channels \
                     cannot use it: start the VM with a shared memory backend, for QEMU -object \
                     memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem",
                    map.size / MIB
                ),
                Some(error) => format!(
                    "Guest RAM at {start:#x} ({} MiB) cannot be mapped: {error}",
                    map.size / MIB
                ),
            });
        } else if let Some((address, error)) = self.missed_failure() {
            lines.push(format!(
                "The guest's driver used memory at {address:#x} that cannot be mapped: {error}"
            ));
        } else if let Some(address) = self.missed {
            lines.push(format!(
                "The guest's driver used memory at {address:#x} that the VMM does not share with \
                 the device: give every memory backend of the VM share=on"
            ));
        }
        if active && self.looks_private() {
            lines.push(
                "Guest RAM reads as zeros although the guest runs, so the VMM keeps its own copy of \
                 it: give the VM's memory backend share=on instead of share=off"
                    .to_owned(),
            );
        }
        let poisoned = self.shared.iter().any(|region| region.mapping.poisoned());
        if poisoned || self.maps.values().any(|map| map.truncated) {
            lines.push("The VMM truncated the file of the guest's RAM: restart the VM".to_owned());
        }
        lines
    }

    /// Returns a warning if the VM has more RAM than can be imported. The guest gets an error only
    /// when it uses the memory.
    fn ram_beyond_limits(&self, limits: ImportLimits) -> Option<String> {
        let ram = self.maps.values().filter(|map| map.file.is_some());
        let bytes = ram.fold(0_u64, |sum, map| sum.saturating_add(map.size));
        let mib = |bytes: u64| bytes.div_ceil(MIB);
        if bytes > limits.gpu {
            return Some(format!(
                "The VM has {} MiB of memory, and the GPU reaches {} MiB of each VM: give the VM less, or \
                 the parent a longer window (vgpud --parent ...,window={}M)",
                mib(bytes),
                limits.gpu / MIB,
                mib(bytes).next_power_of_two()
            ));
        }
        (bytes > limits.vgpu).then(|| {
            format!(
                "The VM has {} MiB of memory, and this vGPU may have {} MiB of it pinned: give the VM \
                 less, or raise max_pinned",
                mib(bytes),
                limits.vgpu / MIB
            )
        })
    }

    /// Returns the address of a guest's access to memory whose file cannot be mapped, and the
    /// cause.
    fn missed_failure(&self) -> Option<(u64, &io::Error)> {
        let address = self.missed?;
        let (start, map) = self.maps.range(..=address).next_back()?;
        let error = map.failure.as_ref().filter(|_| address - start < map.size)?;
        Some((address, error))
    }

    /// Returns true if the lowest shared RAM is all zeros. A client that maps its file privately
    /// passes the file, but the guest's stores never reach it.
    fn looks_private(&self) -> bool {
        let Some(region) = self.shared.iter().next() else { return false };
        let len = region.len().min(SAMPLE);
        let mut page = [0; PAGE_SIZE as usize];
        (0..len / PAGE_SIZE).all(|index| {
            let read = region.read_slice(&mut page, MemoryRegionAddress(index * PAGE_SIZE));
            read.is_ok() && page.iter().all(|byte| *byte == 0)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::ids::GuestPa;
    use crate::testing::shared_ram;

    const RW: DmaAccess = DmaAccess::READ.union(DmaAccess::WRITE);
    const ALL: ImportLimits = ImportLimits { gpu: u64::MAX, vgpu: u64::MAX };

    #[test]
    fn memory_without_a_file_is_explained() {
        let mut memory = GuestMemory::default();
        memory.map(GuestPa(0xf000_0000), 256 * MIB, RW, None).unwrap();
        assert!(
            memory.advice(&[(0xf000_0000, 256 * MIB)], true, ALL).is_empty(),
            "the device's BAR"
        );
        memory.map(GuestPa(0), 512 * MIB, RW, None).unwrap();
        let advice = memory.advice(&[(0xf000_0000, 256 * MIB)], false, ALL);
        assert!(advice[0].contains("share=on") && advice[0].contains("512 MiB"), "{advice:?}");
    }

    #[test]
    fn memory_beyond_the_limits_is_explained() {
        let mut memory = GuestMemory::default();
        let ram = shared_ram(&mut memory, 0, 48 * MIB);
        ram.write_all_at(&[1], 0x400).unwrap();
        shared_ram(&mut memory, 64 * MIB, 48 * MIB);
        let advice = |gpu, vgpu| memory.advice(&[], true, ImportLimits { gpu, vgpu });
        assert!(advice(96 * MIB, 96 * MIB).is_empty());
        let lines = advice(64 * MIB, 64 * MIB);
        assert_eq!(lines.len(), 1);
        assert!(
            lines[0].contains("has 96 MiB") && lines[0].contains("reaches 64 MiB"),
            "{lines:?}"
        );
        assert!(lines[0].ends_with("window=128M)"), "{lines:?}");
        assert!(advice(1 << 40, 64 * MIB)[0].ends_with("raise max_pinned"));
    }

    #[test]
    fn another_devices_bar_is_ignored_while_ram_is_shared() {
        let mut memory = GuestMemory::default();
        let ram = shared_ram(&mut memory, 0, 64 * MIB);
        ram.write_all_at(&[1], 0x400).unwrap();
        memory.map(GuestPa(0x1_0000_0000), 512 * MIB, RW, None).unwrap();
        assert!(memory.advice(&[], true, ALL).is_empty());
        assert!(memory.read(GuestPa(0x1_0000_0000), &mut [0]).is_err());
        assert!(
            memory.advice(&[], true, ALL)[0].contains("0x100000000"),
            "unless a driver asks for it"
        );
    }

    #[test]
    fn memory_mapped_privately_is_explained() {
        let mut memory = GuestMemory::default();
        let ram = shared_ram(&mut memory, 0, 64 * MIB);
        assert!(memory.advice(&[], false, ALL).is_empty(), "nothing has run yet");
        assert!(memory.advice(&[], true, ALL)[0].contains("share=off"));
        ram.write_all_at(&[1], 0x9_0000).unwrap();
        assert!(memory.advice(&[], true, ALL).is_empty());
    }

    #[test]
    fn a_truncated_file_is_survived_and_explained() {
        let mut memory = GuestMemory::default();
        let ram = shared_ram(&mut memory, 0, 0x4000);
        ram.set_len(0).unwrap();
        assert!(memory.read(GuestPa(0x1000), &mut [0; 64]).is_err());
        assert!(memory.write(GuestPa(0x2000), &[0; 64]).is_err());
        assert_eq!(memory.shared.num_regions(), 0, "the file is no longer mapped");
        assert!(memory.advice(&[], false, ALL)[0].contains("truncated"));
    }

    #[test]
    fn a_file_that_cannot_be_mapped_does_not_stop_the_vm() {
        let mut memory = GuestMemory::default();
        let fd = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
        memory.map(GuestPa(0), 64 * MIB, RW, Some((fd, 0))).unwrap();
        let advice = memory.advice(&[], false, ALL);
        assert!(advice[0].contains("cannot be mapped: its file is neither a memfd"), "{advice:?}");
        let ram = shared_ram(&mut memory, 64 * MIB, 64 * MIB);
        ram.write_all_at(&[1], 0).unwrap();
        assert!(memory.advice(&[], false, ALL).is_empty(), "a file that is not used");
        assert!(memory.read(GuestPa(0x1000), &mut [0]).is_err());
        let advice = memory.advice(&[], false, ALL);
        assert!(advice[0].contains("at 0x1000 that cannot be mapped: its file"), "{advice:?}");
    }
}
