//! Utilization of the compute engine, which the GPU's power management unit measures.
//!
//! The unit counts the cycles in which the engine worked, and keeps a sample of each fifth of a
//! second. An idle context that stays on the engine does not count.

use nvidia_rm::rm_client::Object;
use std::sync::Arc;

use nvidia_rm::abi::{self, UtilizationSamples};
use nvidia_rm::numbers::control;
use nvidia_rm::rm::RmError;

/// Value of [`abi::UtilizationSample::at_ns`] without a sample.
const NONE: u64 = 0;
/// Longest time of a sample, in nanoseconds: some are missing in a longer one.
const LONGEST_NS: u64 = 500_000_000;

/// Sample of the utilization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Start of the time that the sample is about, in nanoseconds of the GPU's clock.
    pub from_ns: u64,
    /// End of that time.
    pub until_ns: u64,
    /// Part of the time in which the engine worked, 0 to 1.
    pub busy: f64,
}

/// Samples that the driver keeps.
#[derive(Debug)]
pub struct Utilization {
    subdevice: Arc<Object>,
    /// Time of the last sample that was read.
    last_ns: u64,
    /// The driver has no samples, or others than are known here.
    unsupported: bool,
}

impl Utilization {
    /// Creates a reader of the samples of a GPU.
    pub fn new(subdevice: &Arc<Object>) -> Self {
        Self { subdevice: Arc::clone(subdevice), last_ns: NONE, unsupported: false }
    }

    /// Returns whether the driver has samples, as far as is known.
    pub fn is_supported(&self) -> bool {
        !self.unsupported
    }

    /// Reads the samples since the last call, oldest first. That takes the driver a millisecond or
    /// two.
    pub fn read(&mut self) -> Vec<Sample> {
        match self.samples() {
            Ok(samples) => self.since_last(&samples),
            Err(error) => {
                log::debug!("The usage of a vGPU that is alone is an upper bound: {error}");
                self.unsupported = true;
                Vec::new()
            }
        }
    }

    fn samples(&self) -> Result<Box<UtilizationSamples>, RmError> {
        let mut samples = Box::new(UtilizationSamples {
            kind: UtilizationSamples::PERFMON,
            bytes: size_of_val(&UtilizationSamples::default().samples) as u32,
            ..Default::default()
        });
        self.subdevice.control(control::UTILIZATION_SAMPLES, &mut *samples)?;
        Ok(samples)
    }

    fn since_last(&mut self, samples: &UtilizationSamples) -> Vec<Sample> {
        let mut samples: Vec<_> = samples.samples.iter().filter(|one| one.at_ns != NONE).collect();
        samples.sort_by_key(|sample| sample.at_ns);
        let pairs = samples.windows(2).filter_map(|pair| {
            let [before, sample] = pair else { return None };
            Some((before.at_ns, *sample))
        });
        let known = |(from_ns, sample): &(u64, &abi::UtilizationSample)| {
            *from_ns >= self.last_ns && sample.at_ns - from_ns <= LONGEST_NS
        };
        let new = pairs
            .filter(known)
            .map(|(from_ns, sample)| Sample {
                from_ns,
                until_ns: sample.at_ns,
                busy: f64::from(sample.graphics().hundredths.min(10_000)) / 10_000.0,
            })
            .collect();
        self.last_ns = samples.last().map_or(self.last_ns, |sample| sample.at_ns);
        new
    }
}

#[cfg(test)]
mod tests {
    use nvidia_rm::rm_client::RmClient;
    use nvidia_rm::version::Layout;

    use super::*;
    use nvidia_rm::fake_rm::FakeRm;

    #[test]
    fn each_sample_is_read_once_and_gaps_are_left_out() {
        let rm_client =
            RmClient::open(FakeRm::new("580.10"), Layout::of("580.10").unwrap(), 0).unwrap();
        let object = rm_client.adopt_object(None, 1);
        let mut utilization = Utilization::new(&object);
        let mut all = UtilizationSamples::default();
        let mut set = |index: usize, at_ms: u64, hundredths: u32| {
            all.samples[index].at_ns = at_ms * 1_000_000;
            all.samples[index].engines[1].hundredths = hundredths;
            all
        };
        // The buffer is a ring: the oldest sample is anywhere.
        set(70, 1_000, 9_000);
        set(71, 1_200, 300);
        let read = utilization.since_last(&set(0, 1_400, 600));
        let parts: Vec<_> = read.iter().map(|one| (one.until_ns / 1_000_000, one.busy)).collect();
        assert_eq!(parts, [(1_200, 0.03), (1_400, 0.06)]);
        assert_eq!(utilization.since_last(&set(0, 1_400, 600)), []);
        // Samples were lost before 5,000 ms.
        set(1, 5_000, 100);
        let read = utilization.since_last(&set(2, 5_200, 20_000));
        let parts: Vec<_> = read.iter().map(|one| (one.from_ns / 1_000_000, one.busy)).collect();
        assert_eq!(parts, [(5_000, 1.0)], "no more than all of the time");
    }
}
