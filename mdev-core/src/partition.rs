//! Partitions of a parent's video memory.
//!
//! vGPU types of different sizes share a parent. Partitions are separate files or heap allocations,
//! not ranges of one address space, so free memory is one number and cannot fragment.

use std::collections::BTreeMap;

use crate::ids::VgpuId;
use crate::profile::Profile;
use crate::units::MIB;

/// Error of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// The vGPU has a partition.
    #[error("vGPU {0} has a partition already")]
    Duplicate(VgpuId),
    /// The request exceeds the free video memory.
    #[error(
        "Not enough video memory: {} MiB requested, {} MiB free; stop a vGPU or choose a smaller type",
        asked / MIB, free / MIB
    )]
    NoRoom {
        /// Requested bytes.
        asked: u64,
        /// Free bytes.
        free: u64,
    },
}

/// Video memory of one parent.
#[derive(Clone, Debug)]
pub struct Partitions {
    total: u64,
    free: u64,
    held: BTreeMap<VgpuId, u64>,
}

impl Partitions {
    /// Returns a parent with `total` bytes, all free.
    pub fn new(total: u64) -> Self {
        Self { total, free: total, held: BTreeMap::new() }
    }

    /// Reserves `bytes` for a vGPU, or changes nothing.
    pub fn admit(&mut self, vgpu: VgpuId, bytes: u64) -> Result<(), PartitionError> {
        if self.held.contains_key(&vgpu) {
            return Err(PartitionError::Duplicate(vgpu));
        }
        let Some(free) = self.free.checked_sub(bytes) else {
            return Err(PartitionError::NoRoom { asked: bytes, free: self.free });
        };
        self.free = free;
        self.held.insert(vgpu, bytes);
        Ok(())
    }

    /// Releases a vGPU's partition. Returns its size in bytes, or `None` without a partition.
    pub fn release(&mut self, vgpu: VgpuId) -> Option<u64> {
        let bytes = self.held.remove(&vgpu)?;
        self.free += bytes;
        Some(bytes)
    }

    /// Returns the size of a vGPU's partition in bytes.
    pub fn held(&self, vgpu: VgpuId) -> Option<u64> {
        self.held.get(&vgpu).copied()
    }

    /// Returns the parent's video memory in bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the free video memory in bytes.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Returns the number of partitions.
    pub fn count(&self) -> usize {
        self.held.len()
    }

    /// Returns how many more vGPUs of a type can be started.
    pub fn available(&self, profile: &Profile) -> u32 {
        let Some(count) = self.free.checked_div(profile.vram_bytes) else {
            // Without video memory, the number of vGPUs is the limit.
            let held = u32::try_from(self.held.len()).unwrap_or(u32::MAX);
            return profile.max_instances.saturating_sub(held);
        };
        u32::try_from(count).unwrap_or(u32::MAX).min(profile.max_instances)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;
    use crate::gpu::{GpuCapabilities, GpuDescription};
    use crate::profile::{find, profiles};
    use crate::units::GIB;

    fn id(n: u8) -> VgpuId {
        VgpuId(Uuid::from_u128(u128::from(n)))
    }

    fn gpu() -> GpuDescription {
        GpuDescription {
            parent: "soft0".into(),
            model: "SOFT".into(),
            name: String::new(),
            vram_bytes: 8 * GIB,
            capabilities: GpuCapabilities::all(),
            max_vgpus: 256,
            max_channels: 64,
            max_import_bytes: 1 << 40,
            default_timeslice: Duration::from_millis(2),
            hang_timeout: None,
        }
    }

    #[test]
    fn types_of_different_sizes_share_the_free_memory() {
        let gpu = gpu();
        let mut vram = Partitions::new(gpu.vram_bytes);
        vram.admit(id(1), 4 * GIB).unwrap();
        vram.admit(id(2), GIB).unwrap();
        let available = |vram: &Partitions, name| vram.available(&find(&gpu, name).unwrap());
        assert_eq!(available(&vram, "SOFT-8Q"), 0);
        assert_eq!(available(&vram, "SOFT-2Q"), 1);
        assert_eq!(available(&vram, "SOFT-256MC"), 12);
        assert_eq!(vram.release(id(1)), Some(4 * GIB));
        assert_eq!(vram.release(id(1)), None);
        assert_eq!(available(&vram, "SOFT-2Q"), 3);
    }

    #[test]
    fn a_refusal_names_the_free_memory() {
        let mut vram = Partitions::new(GIB);
        vram.admit(id(1), 256 * MIB).unwrap();
        let error = vram.admit(id(2), GIB).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Not enough video memory: 1024 MiB requested, 768 MiB free; \
             stop a vGPU or choose a smaller type"
        );
        assert_eq!(vram.admit(id(1), 0), Err(PartitionError::Duplicate(id(1))));
    }

    proptest! {
            #[test]
            fn never_over_allocated(
                total in 0_u64..16 * GIB,
                steps in prop::collection::vec((0_u8..20, prop::option::of(0_u64..1 << 35)), 0..200),
            ) {
                let mut vram = Partitions::new(total);
                let mut model = std::collections::HashMap::new();
                for (n, step) in steps {
                    if let Some(bytes) = step {
                            let used: u64 = model.values().sum();
                            let fits = !model.contains_key(&n) && used + bytes <= total;
                            prop_assert_eq!(vram.admit(id(n), bytes).is_ok(), fits);
                            if fits {
                                model.insert(n, bytes);
                            }
                        } else {
     prop_assert_eq!(vram.release(id(n)), model.remove(&n));
    }
                    prop_assert_eq!(vram.free() + model.values().sum::<u64>(), total);
                    prop_assert_eq!(vram.count(), model.len());
                }
            }

            #[test]
            fn available_instances_can_be_started(
                picks in prop::collection::vec(0_usize..12, 0..40),
            ) {
                let all = profiles(&gpu());
                let mut vram = Partitions::new(gpu().vram_bytes);
                for (n, pick) in picks.into_iter().enumerate() {
                    let profile = &all[pick];
                    let before = vram.available(profile);
                    let admitted = vram.admit(id(n as u8), profile.vram_bytes).is_ok();
                    prop_assert_eq!(admitted, before > 0);
                    if admitted {
                        prop_assert_eq!(vram.available(profile), before - 1);
                    }
                }
            }
        }
}
