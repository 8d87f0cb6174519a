//! Manager's side of an NVIDIA GPU.
//!
//! Each vGPU is a client of the driver in a process of its own, and the driver lets only a process
//! with the client's file change the slice and the gate of its channel groups, or reset them. The
//! manager therefore sends these requests to the workers, each of which has a thread for its
//! connection.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::seqpacket::{MAX_PACKET, SeqPacket, decode, encode};
use mdev_core::gpu::{
    Admission, ClientSpec, Gpu, GpuCapabilities, GpuDescription, GpuError, Usage, UsageReport,
};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::time::ClockId;
use nvidia_rm::rm::{Node, Rm, RmError};

use super::client::driver_layout;
use super::device::{Device, cards};
use super::usage_reconcile::{Account, Reconciler, Reported};
use super::wire::{self, Card, FromManager, FromWorker, Grant, Load, Options, Report};
use super::work_time::{ReportedTotal, WorkTime};

/// Timeout of the usage reports of all workers together. One report takes about 50 us.
const USAGE_TIMEOUT: Duration = Duration::from_millis(10);

/// Number of missed replies in a row after which the manager does not wait for a worker any more.
const MAX_MISSED_REPLIES: u32 = 3;

/// Mean slice while a long kernel of a program runs: the others wait for its slices, and the GPU
/// preempts it at any instruction. Slices of kernels that end by themselves are longer, since each
/// switch costs throughput.
const SHORT_SLICE: Duration = Duration::from_millis(5);

/// Time for which slices stay short after the last report of a long kernel.
const SHORT_SLICES_LINGER: Duration = Duration::from_secs(1);

/// The shortest slice is not made shorter than this: switches would take too much of it.
const SHORTEST_SLICE: Duration = Duration::from_millis(1);

/// Slices are shortened to a number of these parts.
const SLICE_PARTS: u32 = 16;

/// State of the gate of a vGPU between usage reports.
#[derive(Clone, Copy, Debug, Default)]
struct GateState {
    closed: bool,
    /// The gate was closed at the previous usage report, and was not changed since.
    closed_at_last_report: bool,
}

/// Connection to the worker of a vGPU, and the usage that it reports.
#[derive(Debug)]
struct WorkerConn {
    spec: ClientSpec,
    socket: SeqPacket,
    ready: bool,
    report: Report,
    missed_replies: u32,
    timeslice: Duration,
    gate: GateState,
    /// Total engine time of kernels that the worker has reported, in nanoseconds. None before the
    /// first report of a worker that ran under a previous manager.
    reported_ns: Option<u64>,
    /// Plausibility of the reported engine time of kernels.
    account: Account,
    /// Reported time with copies, and with any work.
    copying: ReportedTotal,
    work: WorkTime,
    /// Total engine time of kernels that is charged, in nanoseconds.
    compute_ns: u64,
    /// Total engine time of copies that is charged.
    copy_time: Duration,
    /// Copying time that is reported, plausible and not charged yet.
    new_copying: Duration,
}

/// First series of the driver whose structures the device files for programs know.
const FIRST_SERIES_WITH_PROGRAMS: u16 = 580;

/// Maximum total that is taken over from a previous manager: one year.
const MAX_TAKEN_OVER_NS: u64 = 365 * 86_400 * 1_000_000_000;

impl WorkerConn {
    /// Returns the engine time that is charged, in nanoseconds.
    fn engine_ns(&self) -> u64 {
        self.compute_ns.saturating_add(self.copy_time.as_nanos() as u64)
    }

    /// Returns the charged usage.
    fn usage(&self) -> Usage {
        let copy_ns = self.copy_time.as_nanos() as u64;
        let engine_ns = self.engine_ns();
        let wait_ns = self.work.wait_ns(engine_ns);
        Usage { engine_ns, compute_ns: self.compute_ns, copy_ns, wait_ns, ..self.report.usage }
    }

    /// Returns the engine time of kernels reported since the previous call.
    fn take_reported(&mut self) -> Reported<'_> {
        let total_ns = self.report.usage.compute_ns;
        let reported_ns = self.reported_ns.get_or_insert_with(|| {
            // The worker ran under a previous manager. That time counts as charged.
            self.compute_ns = total_ns.min(MAX_TAKEN_OVER_NS);
            self.copying.take_over(self.report.copying_ns);
            self.work.take_over(self.report.had_work_ns, MAX_TAKEN_OVER_NS);
            total_ns
        });
        let engine_ns = total_ns.saturating_sub(*reported_ns);
        *reported_ns = total_ns.max(*reported_ns);
        let gated = self.gate.closed && self.gate.closed_at_last_report;
        Reported { account: &mut self.account, engine_ns, gated }
    }

    /// Takes the reported times with copies and with any work, as far as they are plausible.
    fn take_times(&mut self, now: Instant) {
        self.new_copying = self.copying.take(now, self.report.copying_ns);
        self.work.take(now, self.report.had_work_ns, self.engine_ns());
    }
}

/// NVIDIA GPU, as a parent of vGPUs.
#[derive(Debug)]
pub struct NvidiaGpu {
    card: Card,
    description: GpuDescription,
    options: Options,
    workers: BTreeMap<VgpuId, WorkerConn>,
    /// Number of the last usage request.
    usage_request: u64,
    reconciler: Reconciler,
    /// When a worker last reported a long kernel.
    long_kernel_at: Option<Instant>,
    /// Part of their slices that all vGPUs have, in [`SLICE_PARTS`].
    slice_parts: u32,
    buffer: Vec<u8>,
    /// Keeps the GPU initialized. The driver shuts down a GPU without open descriptors, and the
    /// next open would take seconds.
    _keep_open: OwnedFd,
}

impl NvidiaGpu {
    /// Returns the PCI addresses of the driver's GPUs.
    pub fn list(rm: &dyn Rm) -> Result<Vec<String>, GpuError> {
        Ok(cards(rm)?.into_iter().map(|card| card.address).collect())
    }

    /// Opens the GPU at a PCI address.
    pub fn open(rm: Arc<dyn Rm>, address: &str, options: Options) -> Result<Self, GpuError> {
        let (_, layout) = driver_layout(&*rm)?;
        let all = cards(&*rm)?;
        let Some(card) = all.iter().find(|card| card.address.eq_ignore_ascii_case(address)) else {
            let found: Vec<_> = all.iter().map(|card| card.address.as_str()).collect();
            return Err(GpuError::Io(std::io::Error::new(
                std::io::ErrorKind::NotFound,
                format!(
                    "The NVIDIA driver has no GPU at {address}: use one of {}",
                    found.join(", ")
                ),
            )));
        };
        let keep_open = rm.open(Node::Gpu(card.minor)).map_err(RmError::open)?;
        let device = Device::open(rm, layout, card)?;
        let mut description = device.describe(address)?;
        description.capabilities.set(GpuCapabilities::NEED_WAKEUP, !options.direct_doorbell);
        description.capabilities.set(GpuCapabilities::VRAM_APERTURE, options.direct_vram);
        let programs = layout.series >= FIRST_SERIES_WITH_PROGRAMS && !options.direct_doorbell;
        description.capabilities.set(GpuCapabilities::PROGRAMS, programs);
        // What a VM maps of the GPU itself would be another one's after a restore.
        let maps_gpu = options.direct_doorbell || options.direct_vram;
        description.capabilities.set(GpuCapabilities::SAVE, !maps_gpu);
        // Refuses an unsupported generation now rather than at the start of the first VM.
        device.usermode()?;
        if !device.generation.is_tested() {
            let name = device.generation.name;
            log::warn!(
                "The GPU {address} is of the generation {name}, on which Tessera was never tested: \
                 it is offered for CUDA programs only"
            );
        }
        Ok(Self {
            card: card.clone(),
            description,
            options,
            workers: BTreeMap::new(),
            usage_request: 0,
            reconciler: Reconciler::new(Instant::now()),
            long_kernel_at: None,
            slice_parts: SLICE_PARTS,
            buffer: vec![0; MAX_PACKET],
            _keep_open: keep_open,
        })
    }

    /// Checks whether a vGPU can be admitted. The driver does not limit video memory per client.
    fn check_admission(&self, spec: &ClientSpec) -> Result<(), GpuError> {
        if spec.vram_bytes == 0 || !spec.vram_bytes.is_multiple_of(2 * MIB) {
            return Err(GpuError::Invalid("video memory must be a multiple of 2 MiB"));
        }
        if spec.framebuffer_bytes != 0 {
            return Err(GpuError::Unsupported("a display head"));
        }
        let used: u64 = self.workers.values().map(|worker| worker.spec.vram_bytes).sum();
        let total = used.checked_add(spec.vram_bytes);
        if total.is_none_or(|total| total > self.description.vram_bytes) {
            return Err(GpuError::Limit("video memory"));
        }
        if self.workers.contains_key(&spec.vgpu) {
            return Err(GpuError::Invalid("the vGPU is admitted already"));
        }
        Ok(())
    }

    /// Adds a connection to a worker. Returns the worker's end.
    fn add_worker(&mut self, spec: &ClientSpec, ready: bool) -> Result<OwnedFd, GpuError> {
        // The manager's thread closes no descriptor of a worker.
        let (socket, worker_socket) = SeqPacket::pair_without_fds()?;
        let now = Instant::now();
        let worker = WorkerConn {
            spec: spec.clone(),
            socket,
            ready,
            report: Report { alive: true, ..Default::default() },
            missed_replies: 0,
            timeslice: self.description.default_timeslice,
            gate: GateState::default(),
            // A new worker starts at 0.
            reported_ns: (!ready).then_some(0),
            account: Account::new(now),
            copying: ReportedTotal::new(now),
            work: WorkTime::new(now),
            compute_ns: 0,
            copy_time: Duration::ZERO,
            new_copying: Duration::ZERO,
        };
        self.workers.insert(spec.vgpu, worker);
        Ok(worker_socket.into())
    }

    fn send(&mut self, vgpu: VgpuId, message: &FromManager) -> Result<(), GpuError> {
        let worker = self.workers.get(&vgpu).ok_or(GpuError::NotFound("vGPU"))?;
        match worker.socket.try_send(&encode(message)?, &[]) {
            Ok(()) => {}
            // The worker has ended. The manager notices that elsewhere, or has ended it itself.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                log::debug!("The worker of vGPU {vgpu} has ended: {error}");
            }
            // It does not read.
            Err(error) => log::warn!("Cannot send to the worker of vGPU {vgpu}: {error}"),
        }
        Ok(())
    }

    /// Requests usage from all workers. Returns those to wait for.
    fn request_usage(&mut self) -> Result<Vec<VgpuId>, GpuError> {
        self.usage_request += 1;
        let busy = self.workers.values().filter(|worker| worker.report.usage.runnable).count();
        let may_run = self.workers.values().filter(|worker| worker.report.usage.channels > 0);
        let round: Duration = may_run.map(|worker| worker.timeslice).sum();
        let round = round * self.slice_parts / SLICE_PARTS;
        let mut requested = Vec::new();
        for (vgpu, worker) in &mut self.workers {
            let others_busy = busy - usize::from(worker.report.usage.runnable);
            let load = Load { contended: others_busy > 0, round };
            let request = encode(&FromManager::Usage(self.usage_request, load))?;
            if worker.ready && worker.socket.try_send(&request, &[]).is_ok() {
                worker.missed_replies = worker.missed_replies.saturating_add(1);
                if worker.missed_replies <= MAX_MISSED_REPLIES {
                    requested.push(*vgpu);
                }
            }
        }
        Ok(requested)
    }

    /// Receives the replies of workers until all have replied or the timeout ends.
    fn await_usage(&mut self, mut missing: Vec<VgpuId>) {
        let deadline = Instant::now() + USAGE_TIMEOUT;
        while !missing.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let workers = missing.iter().filter_map(|vgpu| self.workers.get(vgpu));
            let mut fds: Vec<_> = workers
                .map(|worker| PollFd::new(worker.socket.as_fd(), PollFlags::POLLIN))
                .collect();
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            if left.is_zero() || !matches!(poll(&mut fds, timeout), Ok(1..)) {
                break;
            }
            let hung_up: Vec<bool> = fds
                .iter()
                .map(|fd| fd.revents().is_some_and(|events| events.contains(PollFlags::POLLHUP)))
                .collect();
            drop(fds);
            let mut hung_up = hung_up.into_iter();
            missing.retain(|vgpu| !(self.receive(*vgpu) | hung_up.next().unwrap_or(true)));
        }
    }

    /// Receives the messages of a worker. Returns whether it has replied to the last usage request.
    fn receive(&mut self, vgpu: VgpuId) -> bool {
        let Some(worker) = self.workers.get_mut(&vgpu) else { return false };
        let mut replied = false;
        while let Ok(Some(packet)) = worker.socket.try_recv(&mut self.buffer) {
            match decode(&self.buffer[..packet.len]) {
                Ok(FromWorker::Ready) => worker.ready = true,
                Ok(FromWorker::Usage(number, report)) if number == self.usage_request => {
                    worker.report = *report;
                    worker.missed_replies = 0;
                    replied = true;
                }
                // Late replies are outdated, and malformed messages are ignored.
                Ok(FromWorker::Usage(..)) | Err(_) => {}
            }
        }
        replied
    }

    /// Charges the engine time of kernels that the workers report, as far as it is plausible.
    fn charge_kernels(&mut self, now: Instant) {
        let replied = self.workers.iter_mut().filter(|(_, worker)| worker.missed_replies == 0);
        let (mut reports, mut trusted) = (Vec::new(), Vec::new());
        for (_, worker) in replied {
            trusted.push(!worker.account.is_suspect(now));
            reports.push(worker.take_reported());
        }
        let charged = self.reconciler.charge(now, &mut reports);
        let replied = self.workers.iter_mut().filter(|(_, worker)| worker.missed_replies == 0);
        for (((vgpu, worker), charged_ns), trusted) in replied.zip(charged).zip(trusted) {
            worker.compute_ns = worker.compute_ns.saturating_add(charged_ns);
            worker.gate.closed_at_last_report = worker.gate.closed;
            if trusted && worker.account.is_suspect(now) {
                log::warn!(
                    "The worker of vGPU {vgpu} reports more engine time than has passed: its \
                     reports are cut"
                );
            }
        }
    }

    /// Shortens the slices of all vGPUs, in proportion, while a long kernel of a program runs.
    fn adapt_slices(&mut self, now: Instant) -> Result<(), GpuError> {
        // The last report of a worker that does not reply is outdated.
        let mut replied = self.workers.values().filter(|worker| worker.missed_replies == 0);
        if replied.any(|worker| worker.report.long_kernel) {
            self.long_kernel_at = Some(now);
        }
        let long = self
            .long_kernel_at
            .is_some_and(|at| now.saturating_duration_since(at) < SHORT_SLICES_LINGER);
        let slices = self.workers.values().map(|worker| worker.timeslice);
        let parts = if long { short_slice_parts(slices) } else { SLICE_PARTS };
        if std::mem::replace(&mut self.slice_parts, parts) == parts {
            return Ok(());
        }
        let slices: Vec<_> =
            self.workers.iter().map(|(vgpu, worker)| (*vgpu, worker.timeslice)).collect();
        slices.into_iter().try_for_each(|(vgpu, slice)| self.send_slice(vgpu, slice))
    }

    /// Tells a worker its slice.
    fn send_slice(&mut self, vgpu: VgpuId, slice: Duration) -> Result<(), GpuError> {
        self.send(vgpu, &FromManager::SetTimeslice(slice * self.slice_parts / SLICE_PARTS))
    }

    /// Charges the time since the previous call in which vGPUs had copies to do. The copy engine
    /// reports no times, but the hardware keeps to the slices, so vGPUs are charged by their
    /// slices.
    fn charge_copies(&mut self, now: Instant) {
        let replied = self.workers.values_mut().filter(|worker| worker.missed_replies == 0);
        replied.for_each(|worker| worker.take_times(now));
        let longest =
            self.workers.values().map(|worker| worker.new_copying).max().unwrap_or_default();
        let weight =
            |worker: &WorkerConn| worker.new_copying.as_secs_f64() * worker.timeslice.as_secs_f64();
        let total: f64 = self.workers.values().map(weight).sum();
        for worker in self.workers.values_mut() {
            let part = if total > 0.0 { weight(worker) / total } else { 0.0 };
            worker.copy_time += longest.mul_f64(part).min(worker.new_copying);
            worker.new_copying = Duration::ZERO;
        }
    }
}

/// Returns the part of the slices that makes them short, in [`SLICE_PARTS`].
fn short_slice_parts(slices: impl Iterator<Item = Duration> + Clone) -> u32 {
    let parts_of = |short: Duration, whole: Duration| {
        let parts = (short * SLICE_PARTS).as_nanos() / whole.as_nanos().max(1);
        u32::try_from(parts).unwrap_or(SLICE_PARTS)
    };
    let count = u32::try_from(slices.clone().count().max(1)).unwrap_or(u32::MAX);
    let mean = slices.clone().sum::<Duration>() / count;
    let least = slices.min().map_or(1, |shortest| parts_of(SHORTEST_SLICE, shortest).max(1));
    parts_of(SHORT_SLICE, mean).max(least).min(SLICE_PARTS)
}

impl Gpu for NvidiaGpu {
    fn describe(&self) -> &GpuDescription {
        &self.description
    }

    fn admit(&mut self, spec: &ClientSpec) -> Result<Admission, GpuError> {
        self.check_admission(spec)?;
        let fd = self.add_worker(spec, false)?;
        let grant = Grant {
            version: wire::VERSION,
            card: self.card.clone(),
            gpu: self.description.clone(),
            spec: spec.clone(),
            options: self.options,
        };
        let sent = self.send(spec.vgpu, &FromManager::Grant(Box::new(grant)));
        if let Err(error) = sent {
            self.workers.remove(&spec.vgpu);
            return Err(error);
        }
        Ok(Admission { backend: super::BACKEND, spec: spec.clone(), fd: Some(fd.into()) })
    }

    fn readmit(&mut self, spec: &ClientSpec) -> Result<Option<OwnedFd>, GpuError> {
        self.workers.remove(&spec.vgpu);
        self.check_admission(spec)?;
        self.add_worker(spec, true).map(Some)
    }

    fn evict(&mut self, vgpu: VgpuId) -> Result<(), GpuError> {
        self.send(vgpu, &FromManager::Evict)?;
        self.workers.remove(&vgpu);
        Ok(())
    }

    fn set_timeslice(&mut self, vgpu: VgpuId, slice: Duration) -> Result<(), GpuError> {
        if let Some(worker) = self.workers.get_mut(&vgpu) {
            worker.timeslice = slice;
        }
        self.send_slice(vgpu, slice)
    }

    fn set_gate(&mut self, vgpu: VgpuId, open: bool) -> Result<(), GpuError> {
        if let Some(worker) = self.workers.get_mut(&vgpu) {
            worker.gate = GateState { closed: !open, closed_at_last_report: false };
        }
        self.send(vgpu, &FromManager::SetGate(open))
    }

    fn reset_group(&mut self, vgpu: VgpuId) -> Result<(), GpuError> {
        self.send(vgpu, &FromManager::Reset)
    }

    fn usage(&mut self) -> Result<UsageReport, GpuError> {
        let vgpus: Vec<VgpuId> = self.workers.keys().copied().collect();
        for vgpu in vgpus {
            self.receive(vgpu);
        }
        let requested = self.request_usage()?;
        self.await_usage(requested);
        let now = ClockId::CLOCK_MONOTONIC.now().map(Duration::from).unwrap_or_default();
        let taken_at = Instant::now();
        self.charge_kernels(taken_at);
        self.charge_copies(taken_at);
        self.adapt_slices(taken_at)?;
        Ok(UsageReport {
            now_ns: now.as_nanos() as u64,
            vgpus: self.workers.iter().map(|(vgpu, worker)| (*vgpu, worker.usage())).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_slices_become_short_and_short_ones_stay() {
        let short = |ms: &[u64]| short_slice_parts(ms.iter().map(|ms| Duration::from_millis(*ms)));
        assert_eq!(short(&[12, 12]), 6, "4.5 ms");
        assert_eq!(short(&[50, 10]), 2);
        assert_eq!((short(&[5]), short(&[2, 2]), short(&[0])), (16, 16, 16));
        assert_eq!(short(&[24, 2]), 8, "one of 1 ms");
        assert_eq!(short(&[24, 1]), 16, "one of 1 ms already");
    }
}
