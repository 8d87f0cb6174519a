//! Device features, migration data and DMA logging.

use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT as LOGGING_REPORT,
    VFIO_DEVICE_FEATURE_DMA_LOGGING_START as LOGGING_START,
    VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP as LOGGING_STOP,
    VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE as DEVICE_STATE,
    VFIO_DEVICE_FEATURE_MIGRATION as MIGRATION, VFIO_MIGRATION_PRE_COPY, VFIO_MIGRATION_STOP_COPY,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::device::Device;
use crate::errno::Errno;
use crate::migration::{DirtyPages, DmaLogging, DmaRange, MigrationState};
use crate::proto::header::MAX_DATA;
use crate::proto::message::{DMA_PAGE, Feature, FeatureAccess};
use crate::proto::wire;

/// Limit of ranges in one request to start DMA logging.
const MAX_RANGES: usize = 4096;

/// Migration and DMA logging state of a session's device.
#[derive(Debug)]
pub struct Features {
    state: MigrationState,
    logging: bool,
}

impl Default for Features {
    fn default() -> Self {
        Self { state: MigrationState::Running, logging: false }
    }
}

/// Splits a structure off the beginning of the data.
fn value<T: FromBytes + Immutable + KnownLayout>(data: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(data).map_err(|_| Errno::EINVAL)
}

/// Checks that a feature with the methods `get` and `set` supports the request's methods.
fn check_methods(access: FeatureAccess, get: bool, set: bool) -> Result<(), Errno> {
    let allowed = match access {
        FeatureAccess::Get => get,
        FeatureAccess::Set => set,
        FeatureAccess::Probe { get: probes_get, set: probes_set } => {
            (get || !probes_get) && (set || !probes_set)
        }
    };
    if allowed { Ok(()) } else { Err(Errno::EINVAL) }
}

impl Features {
    /// Returns true if neither a migration nor DMA logging is under way.
    pub fn are_idle(&self) -> bool {
        self.state == MigrationState::Running && !self.logging
    }

    /// Probes, reads or sets a feature and appends its value, of at most `room` bytes, to `reply`.
    pub fn access<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        feature: Feature<'_>,
        room: usize,
        reply: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let Feature { access, data, .. } = feature;
        let probe = matches!(access, FeatureAccess::Probe { .. });
        if probe {
            reply.extend_from_slice(data);
        }
        match u32::from(feature.index) {
            MIGRATION => {
                let migration = device.migration().ok_or(Errno::ENOTTY)?;
                check_methods(access, true, false)?;
                if !probe {
                    let pre_copy = if migration.pre_copy() { VFIO_MIGRATION_PRE_COPY } else { 0 };
                    let flags = u64::from(VFIO_MIGRATION_STOP_COPY | pre_copy);
                    reply.extend_from_slice(wire::Migration { flags }.as_bytes());
                }
                Ok(())
            }
            DEVICE_STATE => {
                if device.migration().is_none() {
                    return Err(Errno::ENOTTY);
                }
                if matches!(access, FeatureAccess::Set) {
                    let (request, _) = value::<wire::DeviceState>(data)?;
                    let state = MigrationState::from_raw(request.device_state);
                    self.change_state(device, state.ok_or(Errno::EINVAL)?)?;
                    reply.extend_from_slice(data);
                } else if !probe {
                    let state = self.state as u32;
                    let state = wire::DeviceState { device_state: state, data_fd: 0 };
                    reply.extend_from_slice(state.as_bytes());
                }
                Ok(())
            }
            LOGGING_START | LOGGING_STOP | LOGGING_REPORT => {
                let logging = device.dma_logging().ok_or(Errno::ENOTTY)?;
                let report = u32::from(feature.index) == LOGGING_REPORT;
                check_methods(access, report, !report)?;
                match u32::from(feature.index) {
                    _ if probe => Ok(()),
                    LOGGING_START => self.start_logging(logging, data, reply),
                    LOGGING_STOP => {
                        logging.stop();
                        self.logging = false;
                        reply.extend_from_slice(data);
                        Ok(())
                    }
                    _ => self.report(logging, data, room, reply),
                }
            }
            _ => {
                if matches!(access, FeatureAccess::Set) {
                    reply.extend_from_slice(data);
                }
                device.feature(feature, reply)
            }
        }
    }

    /// Changes the migration state, in single steps.
    fn change_state<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        target: MigrationState,
    ) -> Result<(), Errno> {
        let Some(migration) = device.migration() else { return Err(Errno::ENOTTY) };
        while self.state != target {
            let next = self.state.step_to(target, migration.pre_copy())?;
            if let Err(errno) = migration.step(self.state, next) {
                if self.state == MigrationState::Resuming {
                    self.state = MigrationState::Error;
                }
                return Err(errno);
            }
            self.state = next;
        }
        if target == MigrationState::Error { Err(Errno::EINVAL) } else { Ok(()) }
    }

    /// Returns to the running state after a device reset.
    pub fn reset(&mut self) {
        self.state = MigrationState::Running;
    }

    /// Stops DMA logging when the client leaves.
    pub fn stop_logging<D: Device + ?Sized>(&mut self, device: &mut D) {
        if std::mem::take(&mut self.logging)
            && let Some(logging) = device.dma_logging()
        {
            logging.stop();
        }
    }

    /// Executes MIG_DATA_READ and appends the reply.
    pub fn read_state<D: Device + ?Sized>(
        &self,
        device: &mut D,
        size: u32,
        reply: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let migration = device.migration().ok_or(Errno::ENOTSUP)?;
        if !self.state.is_saving() {
            return Err(Errno::EINVAL);
        }
        let head = reply.len();
        let start = head + wire::MigrationData::SIZE;
        reply.resize(start + size as usize, 0);
        let got = migration.read(&mut reply[start..])?.min(size as usize);
        reply.truncate(start + got);
        let argsz = (wire::MigrationData::SIZE + got) as u32;
        let fixed = wire::MigrationData { argsz, size: got as u32 };
        reply[head..start].copy_from_slice(fixed.as_bytes());
        Ok(())
    }

    /// Executes MIG_DATA_WRITE.
    pub fn write_state<D: Device + ?Sized>(
        &self,
        device: &mut D,
        data: &[u8],
    ) -> Result<(), Errno> {
        let migration = device.migration().ok_or(Errno::ENOTSUP)?;
        if self.state == MigrationState::Resuming {
            migration.write(data)
        } else {
            Err(Errno::EINVAL)
        }
    }

    /// Executes a set of the DMA logging start feature.
    fn start_logging(
        &mut self,
        logging: &mut dyn DmaLogging,
        data: &[u8],
        reply: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let (mut control, rest) = value::<wire::LoggingControl>(data)?;
        let count = control.ranges as usize;
        if self.logging {
            return Err(Errno::EBUSY);
        }
        if count > MAX_RANGES {
            return Err(Errno::E2BIG);
        }
        if rest.len() != count * wire::LoggingRange::SIZE || !control.page_size.is_power_of_two() {
            return Err(Errno::EINVAL);
        }
        let mut ranges: Vec<DmaRange> = Vec::with_capacity(count);
        for bytes in rest.chunks_exact(wire::LoggingRange::SIZE) {
            let (raw, _) = value::<wire::LoggingRange>(bytes)?;
            ranges.push(range(raw.address, raw.size)?);
        }
        control.page_size = logging.start(control.page_size, &ranges)?;
        self.logging = true;
        reply.extend_from_slice(control.as_bytes());
        reply.extend_from_slice(rest);
        Ok(())
    }

    /// Executes a get of the DMA logging report feature.
    fn report(
        &self,
        logging: &mut dyn DmaLogging,
        data: &[u8],
        room: usize,
        reply: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let (request, _) = value::<wire::LoggingReport>(data)?;
        let range = range(request.address, request.size)?;
        if !self.logging || !request.page_size.is_power_of_two() || request.page_size < DMA_PAGE {
            return Err(Errno::EINVAL);
        }
        let bytes = DirtyPages::bytes(range.size, request.page_size);
        if bytes > MAX_DATA.into() {
            return Err(Errno::E2BIG);
        }
        reply.extend_from_slice(request.as_bytes());
        let start = reply.len();
        reply.resize(start + bytes as usize, 0);
        // A report clears the log, so it is skipped if the reply has no room for the bitmap.
        if wire::LoggingReport::SIZE + bytes as usize <= room {
            let mut pages = DirtyPages::new(range, request.page_size, &mut reply[start..]);
            logging.report(range, &mut pages)?;
        }
        Ok(())
    }

    /// Appends the bitmap of DMA_UNMAP and its header to the reply.
    pub fn dirty_bitmap<D: Device + ?Sized>(
        &self,
        device: &mut D,
        range: DmaRange,
        page_size: u64,
        bytes: u32,
        reply: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let logging = device.dma_logging().ok_or(Errno::ENOTSUP)?;
        if !self.logging {
            return Err(Errno::EINVAL);
        }
        reply.extend_from_slice(wire::Bitmap { page_size, size: bytes.into() }.as_bytes());
        let start = reply.len();
        reply.resize(start + bytes as usize, 0);
        logging.report(range, &mut DirtyPages::new(range, page_size, &mut reply[start..]))
    }
}

/// Adds the pages written since the last report to the bitmap of DMA_UNMAP.
pub fn update_dirty_bitmap<D: Device + ?Sized>(
    device: &mut D,
    range: DmaRange,
    page_size: u64,
    bitmap: &mut [u8],
) -> Result<(), Errno> {
    let logging = device.dma_logging().ok_or(Errno::ENOTSUP)?;
    logging.report(range, &mut DirtyPages::new(range, page_size, bitmap))
}

/// Returns a range whose end does not overflow.
fn range(address: u64, size: u64) -> Result<DmaRange, Errno> {
    let fits = size.checked_sub(1).is_some_and(|span| address.checked_add(span).is_some());
    if fits { Ok(DmaRange { address, size }) } else { Err(Errno::EINVAL) }
}
