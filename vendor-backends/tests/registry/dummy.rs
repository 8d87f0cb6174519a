//! A backend as its author writes it: this folder, and one line in the list of backends.

use std::sync::Arc;
use std::time::Duration;

use ipc::mem::SharedMemory;
use mdev_core::gpu::{ClientSpec, GpuCapabilities, GpuDescription};
use mdev_core::units::MIB;
use vendor_backends::backend::{Backend, BoxError, OpenHardware, Opener, Parent};
use vendor_backends::mediator::Hardware;
use vendor_backends::mediator::hardware::{Partition, PartitionMemory, Reservation};
use vendor_backends::mediator::wire::Refusal;

/// A device that has memory and no engine.
#[derive(Debug)]
pub struct DummyBackend;

#[derive(Debug)]
struct DummyParent(String);

#[derive(Debug)]
struct DummyHardware(GpuDescription);

/// Reservation of a partition. The dummy has memory for every vGPU.
#[derive(Debug)]
struct DummyReservation;

impl Reservation for DummyReservation {}

impl Backend for DummyBackend {
    fn name(&self) -> &'static str {
        "dummy"
    }

    fn example(&self) -> &'static str {
        "dummy:d0"
    }

    fn parse(&self, place: Option<&str>, options: &[&str]) -> Result<Arc<dyn Parent>, String> {
        match (place, options) {
            (Some(name), []) => Ok(Arc::new(DummyParent(name.to_owned()))),
            _ => Err("a dummy has a name and no options, as in dummy:d0".to_owned()),
        }
    }
}

impl Parent for DummyParent {
    fn name(&self) -> &str {
        &self.0
    }

    fn backend(&self) -> &'static dyn Backend {
        &DummyBackend
    }

    fn argument(&self) -> String {
        format!("dummy:{}", self.0)
    }

    fn opener(&self) -> Opener<'_> {
        Opener::Process(self)
    }
}

impl OpenHardware for DummyParent {
    fn open(&self) -> Result<Arc<dyn Hardware>, BoxError> {
        Ok(Arc::new(DummyHardware(GpuDescription {
            parent: self.0.clone(),
            model: "DUMMY".into(),
            name: "Dummy device".into(),
            vram_bytes: 64 * MIB,
            capabilities: GpuCapabilities::empty(),
            max_vgpus: 4,
            max_channels: 1,
            max_import_bytes: 1 << 30,
            default_timeslice: Duration::from_millis(2),
            hang_timeout: None,
        })))
    }
}

impl Hardware for DummyHardware {
    fn describe(&self) -> &GpuDescription {
        &self.0
    }

    fn partition(&self, spec: &ClientSpec) -> Result<Partition, Refusal> {
        let SharedMemory { fd, mapping } = SharedMemory::new(c"dummy", spec.vram_bytes)?;
        let memory = PartitionMemory { mapping, fd, offset: 0 };
        Ok(Partition { memory: Some(memory), reservation: Box::new(DummyReservation) })
    }
}
