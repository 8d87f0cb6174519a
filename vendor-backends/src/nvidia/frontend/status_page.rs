//! The page with the GPU's state that NVML maps (`NV00DE_SHARED_DATA`): utilization.
//!
//! Everything else there stays invalid, and NVML asks for it with controls.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mdev_core::gpu::Client;
use mdev_core::units::PAGE_SIZE;
use nvidia_rm::numbers::{class, status};

use super::NvidiaFrontEnd;
use super::call::{Call, Stop};
use super::objects::Kind;

/// Shortest time over which utilization is measured.
const WINDOW: Duration = Duration::from_millis(200);

/// Engine time at an instant.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    engine_ns: u64,
}

/// Measurement of the vGPU's utilization.
#[derive(Debug, Default)]
pub struct Utilization {
    /// Two samples, the older first.
    samples: [Option<Sample>; 2],
}

impl Utilization {
    /// Returns true if the last sample is old.
    fn is_due(&self, now: Instant) -> bool {
        self.samples[1].is_none_or(|last| now.saturating_duration_since(last.at) >= WINDOW)
    }

    fn add(&mut self, sample: Sample) {
        self.samples = [self.samples[1], Some(sample)];
    }

    /// Returns the part of the time with the engine, in per cent.
    fn percent(&self) -> u32 {
        let [Some(from), Some(to)] = self.samples else { return 0 };
        let wall = to.at.saturating_duration_since(from.at).as_nanos().max(1);
        let engine = u128::from(to.engine_ns.saturating_sub(from.engine_ns));
        (engine * 100 / wall).min(100) as u32
    }
}

/// Maximum number of pages: all of them are written at once.
const MAX_PAGES: usize = 256;

impl NvidiaFrontEnd {
    /// Creates a page with the state.
    pub(super) fn new_status_page(&mut self, call: &mut Call<'_>) -> Result<Kind, Stop> {
        let pages = self.clients.all().filter(|object| object.class == class::STATUS_PAGE);
        if pages.count() >= MAX_PAGES {
            return Err(Stop::Status(status::INSUFFICIENT_RESOURCES));
        }
        let memory = call.new_memory(PAGE_SIZE)?;
        let owner = self.owner(call.file())?;
        Ok(Kind::Memory(self.memories.add(owner, memory, PAGE_SIZE)?))
    }

    /// Samples the engine time now and then, while programs look at the state. To be called before
    /// requests: each request is to make the same calls of the GPU if it is repeated.
    pub(super) fn sample_utilization(&mut self, gpu: &mut dyn Client) {
        let now = Instant::now();
        if self.utilization.is_due(now)
            && let Ok(usage) = gpu.usage()
        {
            self.utilization.add(Sample { at: now, engine_ns: usage.engine_ns });
            self.write_status_pages();
        }
    }

    /// Writes the state to the pages of all programs.
    pub(super) fn write_status_pages(&self) {
        let (at, len) = self.layout.utilization();
        // The share of the engine, and that of memory, which nothing measures.
        let numbers = [self.utilization.percent(), 0].map(u32::to_le_bytes);
        let numbers: Vec<u8> = numbers.iter().flat_map(|bytes| &bytes[..len]).copied().collect();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        for object in self.clients.all().filter(|object| object.class == class::STATUS_PAGE) {
            if let Kind::Memory(store) = object.kind {
                self.memories.write(store, at + 8, &numbers);
                self.memories.write(store, at, &(now.as_nanos() as u64).to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utilization_is_that_between_two_samples() {
        let mut utilization = Utilization::default();
        let start = Instant::now();
        assert!(utilization.is_due(start));
        assert_eq!(utilization.percent(), 0);
        utilization.add(Sample { at: start, engine_ns: 1_000 });
        assert!(!utilization.is_due(start + WINDOW / 2));
        let later = start + Duration::from_secs(1);
        assert!(utilization.is_due(later));
        utilization.add(Sample { at: later, engine_ns: 250_001_000 });
        assert_eq!(utilization.percent(), 25);
    }
}
