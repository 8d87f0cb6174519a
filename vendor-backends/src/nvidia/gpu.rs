//! The manager's side of an NVIDIA GPU.
//!
//! Each vGPU is a client of the driver in a process of its own, and only the process that made a channel may move its
//! slice, its gate and its reset. So the manager asks the workers, over a connection that each of them has a thread for.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mdev_core::gpu::{
    Admission, ClientSpec, Gpu, GpuCapabilities, GpuDescription, GpuError, Usage, UsageReport,
};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::time::ClockId;

use super::believe::{Believed, Told};
use super::client::layout;
use super::device::{Card, Device, cards};
use super::rm::{Node, Rm, RmError};
use super::wire::{self, FromManager, FromWorker, Grant, Options, Report};
use crate::seqpacket::{MAX_PACKET, SeqPacket, decode, encode};

/// How long all workers together may take to tell their counters. One takes some 50 us.
const PATIENCE: Duration = Duration::from_millis(10);

/// One that has not answered so many questions in a row is not waited for any more.
const DEAF: u32 = 3;

#[derive(Debug)]
struct Seat {
    spec: ClientSpec,
    socket: SeqPacket,
    ready: bool,
    report: Report,
    missed: u32,
    slice: Duration,
    /// Its gate is closed, and was so when the counters were last read.
    closed: [bool; 2],
    /// Engine time of kernels that it has told of, and what of that it is charged, in nanoseconds.
    told_ns: Option<u64>,
    kernels_ns: u64,
    /// What it is charged for copies.
    copies: Duration,
    /// What of its copying was charged.
    copied_ns: u64,
}

impl Seat {
    /// What it has used, copies included.
    fn usage(&self) -> Usage {
        let copy_ns = self.copies.as_nanos() as u64;
        let engine_ns = self.kernels_ns + copy_ns;
        // What it did not run of the time in which it had work, it waited.
        let wait_ns = self.report.had_work_ns.saturating_sub(engine_ns);
        Usage { engine_ns, compute_ns: self.kernels_ns, copy_ns, wait_ns, ..self.report.usage }
    }

    /// What it tells of kernels since it was last asked.
    fn tell(&mut self) -> Told {
        let all_ns = self.report.usage.compute_ns;
        let Some(told_ns) = &mut self.told_ns else {
            // One that an earlier manager admitted has a past.
            self.told_ns = Some(all_ns);
            self.kernels_ns = all_ns;
            return Told::default();
        };
        let ran_ns = all_ns.saturating_sub(*told_ns);
        *told_ns = all_ns.max(*told_ns);
        Told { ran_ns, held: self.closed == [true; 2] }
    }
}

/// One NVIDIA GPU.
#[derive(Debug)]
pub struct NvidiaGpu {
    card: Card,
    description: GpuDescription,
    options: Options,
    seats: BTreeMap<VgpuId, Seat>,
    questions: u64,
    believed: Believed,
    buffer: Vec<u8>,
    /// Kept open: a GPU that nobody uses is shut down, and takes seconds to come up again.
    _keep: OwnedFd,
}

impl NvidiaGpu {
    /// The PCI addresses of the GPUs that the driver has.
    pub fn list(rm: &dyn Rm) -> Result<Vec<String>, GpuError> {
        Ok(cards(rm)?.into_iter().map(|card| card.address).collect())
    }

    /// Opens the GPU at a PCI address.
    pub fn open(rm: Arc<dyn Rm>, address: &str, options: Options) -> Result<Self, GpuError> {
        let layout = layout(&*rm)?;
        let all = cards(&*rm)?;
        let Some(card) = all.iter().find(|card| card.address.eq_ignore_ascii_case(address)) else {
            let there: Vec<_> = all.iter().map(|card| card.address.as_str()).collect();
            return Err(GpuError::Io(std::io::Error::new(
                std::io::ErrorKind::NotFound,
                format!("NVIDIA's driver has no GPU at {address}; there is {}", there.join(", ")),
            )));
        };
        let keep = rm.open(Node::Gpu(card.minor)).map_err(RmError::os("NVIDIA's driver"))?;
        let device = Device::open(rm, layout, card)?;
        let mut description = device.describe(address)?;
        description.capabilities.set(GpuCapabilities::NEED_WAKEUP, !options.direct_doorbell);
        // Refuses a GPU of another generation now, and not when the first VM starts.
        device.usermode()?;
        Ok(Self {
            card: card.clone(),
            description,
            options,
            seats: BTreeMap::new(),
            questions: 0,
            believed: Believed::default(),
            buffer: vec![0; MAX_PACKET],
            _keep: keep,
        })
    }

    /// The driver enforces no share of video memory, so this does.
    fn check(&self, spec: &ClientSpec) -> Result<(), GpuError> {
        if spec.vram_bytes == 0 || !spec.vram_bytes.is_multiple_of(2 * MIB) {
            return Err(GpuError::Invalid("video memory comes in pieces of 2 MiB"));
        }
        if spec.framebuffer_bytes != 0 {
            return Err(GpuError::Unsupported("a display head"));
        }
        let used: u64 = self.seats.values().map(|seat| seat.spec.vram_bytes).sum();
        let total = used.checked_add(spec.vram_bytes);
        if total.is_none_or(|total| total > self.description.vram_bytes) {
            return Err(GpuError::Limit("video memory"));
        }
        if self.seats.contains_key(&spec.vgpu) {
            return Err(GpuError::Invalid("this vGPU is admitted already"));
        }
        Ok(())
    }

    fn seat(&mut self, spec: &ClientSpec, ready: bool) -> Result<OwnedFd, GpuError> {
        let (ours, theirs) = SeqPacket::pair()?;
        let seat = Seat {
            spec: spec.clone(),
            socket: ours,
            ready,
            report: Report { alive: true, ..Default::default() },
            missed: 0,
            slice: self.description.default_timeslice,
            closed: [false; 2],
            told_ns: None,
            kernels_ns: 0,
            copies: Duration::ZERO,
            copied_ns: 0,
        };
        self.seats.insert(spec.vgpu, seat);
        Ok(theirs.into())
    }

    fn order(&mut self, vgpu: VgpuId, order: &FromManager) -> Result<(), GpuError> {
        let seat = self.seats.get(&vgpu).ok_or(GpuError::NotFound("vGPU"))?;
        match seat.socket.try_send(&encode(order)?, &[]) {
            Ok(()) => Ok(()),
            // A worker that is gone, or that does not listen. What is to be done about it is not this call's to say.
            Err(error) => {
                log::warn!("The worker of vGPU {vgpu} takes no orders: {error}");
                Ok(())
            }
        }
    }

    /// Charges what workers tell of kernels, as far as it can be true.
    fn charge_kernels(&mut self) {
        let heard = self.seats.values_mut().filter(|seat| seat.missed == 0);
        let told: Vec<Told> = heard.map(Seat::tell).collect();
        let charged = self.believed.charge(Instant::now(), &told);
        let heard = self.seats.values_mut().filter(|seat| seat.missed == 0);
        for (seat, charged_ns) in heard.zip(charged) {
            seat.kernels_ns += charged_ns;
            seat.closed[1] = seat.closed[0];
        }
    }

    /// Charges the time since the last reading in which there was something to copy. Whoever had something shared the
    /// engine by its slice: the hardware keeps to those, and tells no more.
    fn charge_copies(&mut self) {
        let fresh = |seat: &Seat| {
            Duration::from_nanos(seat.report.copying_ns.saturating_sub(seat.copied_ns))
        };
        let longest = self.seats.values().map(fresh).max().unwrap_or_default();
        let weight = |seat: &Seat| fresh(seat).as_secs_f64() * seat.slice.as_secs_f64();
        let all: f64 = self.seats.values().map(weight).sum();
        for seat in self.seats.values_mut() {
            let part = if all > 0.0 { weight(seat) / all } else { 0.0 };
            seat.copies += longest.mul_f64(part).min(fresh(seat));
            seat.copied_ns = seat.copied_ns.max(seat.report.copying_ns);
        }
    }

    /// Takes what workers have said; true where one has answered the current question.
    fn listen(&mut self, vgpu: VgpuId) -> bool {
        let Some(seat) = self.seats.get_mut(&vgpu) else { return false };
        let mut answered = false;
        while let Ok(Some(packet)) = seat.socket.try_recv(&mut self.buffer) {
            match decode(&self.buffer[..packet.len]) {
                Ok(FromWorker::Ready) => seat.ready = true,
                Ok(FromWorker::Usage(number, report)) if number == self.questions => {
                    seat.report = report;
                    seat.missed = 0;
                    answered = true;
                }
                // A late answer is older than what is known, and nonsense is nothing.
                Ok(FromWorker::Usage(..)) | Err(_) => {}
            }
        }
        answered
    }
}

impl Gpu for NvidiaGpu {
    fn describe(&self) -> &GpuDescription {
        &self.description
    }

    fn admit(&mut self, spec: &ClientSpec) -> Result<Admission, GpuError> {
        self.check(spec)?;
        let fd = self.seat(spec, false)?;
        let grant = Grant {
            version: wire::VERSION,
            card: self.card.clone(),
            gpu: self.description.clone(),
            spec: spec.clone(),
            options: self.options,
        };
        let sent = self.order(spec.vgpu, &FromManager::Grant(Box::new(grant)));
        if let Err(error) = sent {
            self.seats.remove(&spec.vgpu);
            return Err(error);
        }
        Ok(Admission { backend: super::BACKEND, spec: spec.clone(), fd: Some(fd) })
    }

    fn readmit(&mut self, spec: &ClientSpec) -> Result<Option<OwnedFd>, GpuError> {
        self.seats.remove(&spec.vgpu);
        self.check(spec)?;
        self.seat(spec, true).map(Some)
    }

    fn evict(&mut self, vgpu: VgpuId) -> Result<(), GpuError> {
        self.order(vgpu, &FromManager::Evict)?;
        self.seats.remove(&vgpu);
        Ok(())
    }

    fn set_timeslice(&mut self, vgpu: VgpuId, slice: Duration) -> Result<(), GpuError> {
        if let Some(seat) = self.seats.get_mut(&vgpu) {
            seat.slice = slice;
        }
        self.order(vgpu, &FromManager::SetTimeslice(slice))
    }

    fn set_gate(&mut self, vgpu: VgpuId, open: bool) -> Result<(), GpuError> {
        if let Some(seat) = self.seats.get_mut(&vgpu) {
            seat.closed = [!open, false];
        }
        self.order(vgpu, &FromManager::SetGate(open))
    }

    fn reset_group(&mut self, vgpu: VgpuId) -> Result<(), GpuError> {
        self.order(vgpu, &FromManager::Reset)
    }

    fn usage(&mut self) -> Result<UsageReport, GpuError> {
        let all: Vec<VgpuId> = self.seats.keys().copied().collect();
        for vgpu in &all {
            self.listen(*vgpu);
        }
        self.questions += 1;
        let busy = self.seats.values().filter(|seat| seat.report.usage.runnable).count();
        let mut asked = Vec::new();
        for (vgpu, seat) in &mut self.seats {
            let others = busy - usize::from(seat.report.usage.runnable);
            let question = encode(&FromManager::Usage(self.questions, others > 0))?;
            if seat.ready && seat.socket.try_send(&question, &[]).is_ok() {
                seat.missed = seat.missed.saturating_add(1);
                if seat.missed <= DEAF {
                    asked.push(*vgpu);
                }
            }
        }
        let deadline = Instant::now() + PATIENCE;
        while !asked.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let sockets = asked.iter().filter_map(|vgpu| self.seats.get(vgpu));
            let mut fds: Vec<_> =
                sockets.map(|seat| PollFd::new(seat.socket.as_fd(), PollFlags::POLLIN)).collect();
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            if left.is_zero() || !matches!(poll(&mut fds, timeout), Ok(1..)) {
                break;
            }
            let gone: Vec<bool> = fds
                .iter()
                .map(|fd| fd.revents().is_some_and(|events| events.contains(PollFlags::POLLHUP)))
                .collect();
            drop(fds);
            let mut gone = gone.into_iter();
            asked.retain(|vgpu| !(self.listen(*vgpu) | gone.next().unwrap_or(true)));
        }
        let now = ClockId::CLOCK_MONOTONIC.now().map(Duration::from).unwrap_or_default();
        self.charge_kernels();
        self.charge_copies();
        Ok(UsageReport {
            now_ns: now.as_nanos() as u64,
            vgpus: self.seats.iter().map(|(vgpu, seat)| (*vgpu, seat.usage())).collect(),
        })
    }
}
