//! Engine time, measured by the GPU's context switch log (FECS event buffer).
//!
//! The driver writes a record whenever a context gets or releases the graphics engine, and gives
//! every client read access. Records of other users name neither the process nor the context. Copy
//! engines have no such log.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::mem::Mapping;
use mdev_core::gpu::GpuError;
use mdev_core::units::PAGE_SIZE;
use nvidia_rm::abi;
use nvidia_rm::numbers::{class, control, flag};
use nvidia_rm::rm::Node;
use nvidia_rm::rm_client::Object;
use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::engine_demand::EngineDemand;
use super::engine_time::EngineTime;
use super::engine_use::{EngineUse, PROBE};
use super::other_processes::OtherProcesses;
use super::switch_probe::SwitchProbe;
use crate::nvidia::adoption::DAMAGED;
use crate::nvidia::adoption::descriptors::{self, Descriptors};
use crate::nvidia::adoption::state::LogObjects;
use crate::nvidia::device::Device;
use crate::nvidia::usermode_page;
use nvidia_rm::ctxsw_record::{CtxswRecord, RECORD_BYTES, START};

/// Maximum time to wait for the first residency of a probe. On an idle GPU it takes 0.5 ms.
const FIND_PROBE_WITHIN: Duration = Duration::from_millis(5);

/// Records between two readings: a quarter of a second at a switch every 20 us.
const RECORDS: u32 = 16 * 1024;
const RECORDS_BYTES: u64 = RECORDS as u64 * RECORD_BYTES as u64;

/// Offset of `recordPut` in `NV_EVENT_BUFFER_HEADER`.
const PUT: u64 = 4;

/// Part of each residency in which the engine changes contexts, in nanoseconds: the length of
/// residencies without work on H100s.
const CHANGE_NS: u64 = 60_000;

/// Source of the times at which a vGPU submits work to the compute engine.
pub trait SubmissionTimes: fmt::Debug + Send + Sync {
    /// Takes the times since the last call, in order.
    fn take(&self) -> Vec<Instant>;
}

/// The context switch log, as far as this process may read it.
#[derive(Debug)]
pub struct CtxswLog {
    buffer: Arc<Object>,
    /// The buffer's memory: header and records. Freed after the buffer, since the driver frees a
    /// buffer with its memory.
    memory: [Arc<Object>; 2],
    header: Arc<Mapping>,
    records: Arc<Mapping>,
    /// The usermode page, which contains the GPU's clock.
    clock: Arc<Mapping>,
    get: u32,
    process: u64,
    /// Number of records so far, of all processes.
    pub switches: u64,
    /// Engine time of this process.
    pub engine_time: EngineTime,
    /// Demand of this process.
    pub demand: EngineDemand,
    engine_use: EngineUse,
    submissions: Option<Arc<dyn SubmissionTimes>>,
    /// Residencies of other processes since the last one of this process.
    pub others: OtherProcesses,
    /// Time of the last record, of any process.
    pub last_record_ns: u64,
    /// Context of this process that was logged last.
    last_own_context: Option<u32>,
    /// Context of the probe, once it is known: no work of the guest.
    probe_context: Option<u32>,
}

/// What the context switch log shows.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// The vGPU has the engine.
    pub resident: bool,
    /// Number of completed residencies of the vGPU.
    pub residencies: u64,
    /// Time since the vGPU had the engine.
    pub since_resident: Duration,
    /// Time since the engine changed to another context, of any process.
    pub since_switch: Duration,
}

/// Place in the context switch log, and what was counted up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPosition {
    get: u32,
    switches: u64,
    engine_time: EngineTime,
    last_record_ns: u64,
    last_own_context: Option<u32>,
    probe_context: Option<u32>,
}

impl CtxswLog {
    /// Binds an event buffer to the log.
    pub fn open(device: &Device, clock: Arc<Mapping>) -> Result<Self, GpuError> {
        let rm_client = &device.rm_client;
        let memory = |bytes: u64, number: u64| -> Result<(Arc<Object>, Arc<Mapping>), GpuError> {
            let object = device.system_memory(bytes, true)?;
            let flags = flag::CPU_READ_ONLY;
            let fd = rm_client.aperture(&device.device, &object, Node::Control, bytes, flags)?;
            let mapping = descriptors::map(&fd, bytes, false)?;
            device.to_keep.keep(number, fd);
            Ok((object, mapping))
        };
        let (header_memory, header) = memory(PAGE_SIZE, descriptors::LOG_HEADER)?;
        let (record_memory, records) = memory(RECORDS_BYTES, descriptors::LOG_RECORDS)?;
        let mut params = abi::EventBufferParams {
            record_bytes: RECORD_BYTES as u32,
            record_count: RECORDS,
            subdevice: device.subdevice.handle(),
            header_memory: header_memory.handle(),
            record_memory: record_memory.handle(),
            ..Default::default()
        };
        let buffer = rm_client.alloc(
            None,
            class::EVENT_BUFFER,
            Some(params.as_mut_bytes()),
            "event buffer",
        )?;
        let mut bind = abi::BindCtxswLog {
            buffer: buffer.handle(),
            record_bytes: RECORD_BYTES as u32,
            detail: 1,
            ..Default::default()
        };
        device.subdevice.control(control::BIND_CTXSW_LOG, &mut bind)?;
        let mut enable = abi::Pair { first: 1, second: 1 };
        buffer.control(control::EVENT_BUFFER_ENABLE, &mut enable)?;
        Ok(Self {
            buffer,
            memory: [header_memory, record_memory],
            header,
            records,
            clock,
            get: 0,
            process: u64::from(std::process::id()),
            switches: 0,
            engine_time: EngineTime::default(),
            demand: EngineDemand::default(),
            engine_use: EngineUse::new(device, 0),
            submissions: None,
            others: OtherProcesses::default(),
            last_record_ns: 0,
            last_own_context: None,
            probe_context: None,
        })
    }

    /// Adopts the log of an earlier process, whose id its records have. Records that it has
    /// read since `position` are read again.
    pub fn adopt(
        device: &Device,
        clock: Arc<Mapping>,
        objects: &LogObjects,
        process: u32,
        position: Option<LogPosition>,
        files: &mut Descriptors<'_>,
    ) -> Result<Self, GpuError> {
        let rm_client = &device.rm_client;
        let position = position.filter(|position| position.get < RECORDS).ok_or(DAMAGED)?;
        let LogPosition { get, switches, engine_time, last_record_ns, .. } = position;
        let LogPosition { last_own_context, probe_context, .. } = position;
        let memory = [objects.header, objects.records];
        Ok(Self {
            buffer: rm_client.adopt_object(None, objects.buffer),
            memory: memory.map(|handle| device.adopt_object(handle)),
            header: descriptors::map(&files.take(descriptors::LOG_HEADER)?, PAGE_SIZE, false)?,
            records: descriptors::map(
                &files.take(descriptors::LOG_RECORDS)?,
                RECORDS_BYTES,
                false,
            )?,
            clock,
            get,
            process: u64::from(process),
            switches,
            engine_time,
            demand: EngineDemand::default(),
            engine_use: EngineUse::new(device, engine_time.completed_ns),
            submissions: None,
            others: OtherProcesses::default(),
            last_record_ns,
            last_own_context,
            probe_context,
        })
    }

    /// Returns the objects for the adopting process.
    pub fn objects(&self) -> LogObjects {
        let [header, records] = &self.memory;
        LogObjects {
            buffer: self.buffer.handle(),
            header: header.handle(),
            records: records.handle(),
        }
    }

    /// Returns the place up to which the log was read.
    pub fn position(&self) -> LogPosition {
        LogPosition {
            get: self.get,
            switches: self.switches,
            engine_time: self.engine_time,
            last_record_ns: self.last_record_ns,
            last_own_context: self.last_own_context,
            probe_context: self.probe_context,
        }
    }

    /// Reads the GPU's clock, in nanoseconds.
    pub fn now_ns(&self) -> Option<u64> {
        usermode_page::clock_ns(&self.clock)
    }

    /// Finds the context of a new probe in the log. If others keep the engine, it is found later.
    pub fn find_probe(&mut self, probe: &mut SwitchProbe) {
        let (request, started) = (probe.request(), Instant::now());
        while !probe.is_served(request) && started.elapsed() < FIND_PROBE_WITHIN {
            std::thread::sleep(Duration::from_micros(100));
        }
        if self.read().is_ok() {
            self.had_only_probe();
        }
    }

    /// Notes that the guest has had no channel so far: what was logged is the probe's.
    pub fn had_only_probe(&mut self) {
        if self.probe_context.is_none() && self.last_own_context.is_some() {
            self.probe_context = self.last_own_context;
            self.engine_time = EngineTime::default();
            self.demand = EngineDemand::default();
            self.engine_use.restart();
        }
    }

    /// Returns whether the log tells residencies of the guest from those of the probe.
    pub fn knows_probe(&self) -> bool {
        self.probe_context.is_some()
    }

    /// Follows the submissions to the compute engine.
    pub fn follow(&mut self, submissions: Arc<dyn SubmissionTimes>) {
        self.submissions = Some(submissions);
    }

    fn submit(&mut self, at_ns: u64) {
        if self.demand.submit(at_ns) {
            // What others did while this vGPU had no work says nothing about its work.
            self.others.clear();
        }
    }

    /// Takes the times of submissions, in nanoseconds of the GPU's clock.
    fn take_submissions(&self) -> Vec<u64> {
        let times = self.submissions.as_ref().map(|submissions| submissions.take());
        let (Some(times), now, Some(now_ns)) = (times, Instant::now(), self.now_ns()) else {
            return Vec::new();
        };
        let ago_ns = |at: Instant| now.saturating_duration_since(at).as_nanos() as u64;
        times.into_iter().map(|at| now_ns.saturating_sub(ago_ns(at))).collect()
    }

    /// Records that the gate has opened or closed.
    pub fn gate(&mut self, open: bool, now_ns: u64) {
        self.engine_time.gate(open, now_ns);
        self.demand.gate(open, self.engine_time.resident_since_ns.is_some(), now_ns);
        self.others.clear();
    }

    /// Takes the time that was not used off the engine time until `now_ns`, as far as is known.
    /// While other vGPUs have work, as `contended` says, all of it counts.
    pub fn withhold_unused(&mut self, now_ns: u64, contended: bool) {
        let waited_ns = self.demand.waited_ns(now_ns);
        self.engine_use.withhold_unused(&mut self.engine_time, waited_ns, now_ns, contended);
    }

    /// Reads and accounts the records since the previous call.
    pub fn read(&mut self) -> Result<Vec<CtxswRecord>, GpuError> {
        self.buffer.control_bytes(control::EVENT_BUFFER_FLUSH, &mut [])?;
        let put = self.header.load_u32(PUT).unwrap_or(self.get) % RECORDS;
        let mut submitted = self.take_submissions().into_iter().peekable();
        let mut records = Vec::new();
        while self.get != put {
            let mut bytes = [0; RECORD_BYTES];
            if self.records.read(u64::from(self.get) * RECORD_BYTES as u64, &mut bytes).is_none() {
                break;
            }
            let mut record = CtxswRecord::read(&bytes);
            if record.process == self.process {
                self.last_own_context = Some(record.context);
                if self.probe_context == Some(record.context) {
                    record.process = PROBE;
                }
            }
            while let Some(at_ns) = submitted.next_if(|at_ns| *at_ns <= record.at_ns) {
                self.submit(at_ns);
            }
            if self.demand.add(&record, self.process) {
                self.engine_time.works_until(record.at_ns);
            }
            self.engine_time.add(&record, self.process);
            if (record.tag, record.process) == (START, self.process) {
                self.engine_time.begin_without_work(CHANGE_NS);
            }
            self.engine_use.add(&record, self.process);
            if record.process != PROBE {
                self.others.add(&record, self.process);
            }
            self.switches += 1;
            self.last_record_ns = record.at_ns;
            records.push(record);
            self.get = (self.get + 1) % RECORDS;
        }
        submitted.for_each(|at_ns| self.submit(at_ns));
        if !records.is_empty() {
            let mut get = abi::Pair { first: self.get, second: 0 };
            self.buffer.control(control::EVENT_BUFFER_UPDATE_GET, &mut get)?;
        }
        Ok(records)
    }
}
