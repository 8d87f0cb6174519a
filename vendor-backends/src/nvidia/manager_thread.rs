//! Thread of a worker that executes the manager's messages and checks for faults and hangs.
//!
//! The messages must not wait for requests of the guest: pinning 4 GiB of guest memory takes 0.1 s,
//! and a gate must close at once.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::seqpacket::{MAX_PACKET, SeqPacket, decode, encode};
use mdev_core::gpu::{GpuError, Pending};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nvidia_rm::rm_client::RmClient;

use super::activity::REST_INTERVAL;
use super::hang_detector::HangDetector;
use super::observers::switch_probe::Request;
use super::vgpu_state::VgpuState;
use super::wire::{FromManager, FromWorker, Load};

/// Poll interval while the closing of a gate is delayed.
const CLOSING_INTERVAL: Duration = Duration::from_millis(1);

/// State of the thread.
#[derive(Debug)]
pub struct ManagerThread {
    state: Arc<VgpuState>,
    rm_client: Arc<RmClient>,
    /// Connection to the manager. None after the manager has exited, until the next one connects.
    manager: Option<SeqPacket>,
    /// Event of the GPU that reports faults.
    fault_event: OwnedFd,
    hang_detector: HangDetector,
    /// Time until the next check for a hang.
    next_hang_check: Option<Duration>,
    /// When the gate should have closed, while the closing is delayed.
    closing_since: Option<Instant>,
    /// Request to the probe for the delayed closing.
    closing_request: Option<Request>,
    buffer: Vec<u8>,
}

impl ManagerThread {
    /// Creates the state of the thread.
    pub fn new(
        state: Arc<VgpuState>,
        rm_client: Arc<RmClient>,
        manager: SeqPacket,
        fault_event: OwnedFd,
        hang_limit: Option<Duration>,
    ) -> Self {
        Self {
            state,
            rm_client,
            manager: Some(manager),
            fault_event,
            hang_detector: HangDetector::new(hang_limit),
            next_hang_check: None,
            closing_since: None,
            closing_request: None,
            buffer: vec![0; MAX_PACKET],
        }
    }

    /// Closes the gate as soon as that is possible, as the manager has told an earlier process.
    pub fn close_gate_later(&mut self) {
        self.closing_since = Some(Instant::now());
    }

    /// Runs until the vGPU's threads are stopped.
    pub fn run(&mut self) {
        while !self.state.signals.is_stopped() {
            let has_message = self.wait();
            self.check_vgpu();
            if let Ok(mut next) = self.state.next_manager.lock()
                && let Some(next) = next.take()
            {
                self.manager = Some(next);
                continue;
            }
            if has_message {
                self.receive();
            }
            self.record();
        }
    }

    /// Waits for an event or the next poll of the rings. Returns whether the manager's connection
    /// is readable.
    fn wait(&self) -> bool {
        let mut fds = vec![
            PollFd::new(self.state.signals.stop_event(), PollFlags::POLLIN),
            PollFd::new(self.fault_event.as_fd(), PollFlags::POLLIN | PollFlags::POLLPRI),
        ];
        fds.extend(self.manager.as_ref().map(|m| PollFd::new(m.as_fd(), PollFlags::POLLIN)));
        let interval = match self.closing_since {
            Some(_) => CLOSING_INTERVAL,
            None => self.state.poll_interval(),
        };
        let interval = interval.min(self.next_hang_check.unwrap_or(REST_INTERVAL));
        let _ = poll(&mut fds, PollTimeout::try_from(interval).unwrap_or(PollTimeout::MAX));
        fds.get(2).is_some_and(|fd| fd.any() == Some(true))
    }

    /// Checks for faults, work and hangs, and closes a gate whose closing is delayed.
    fn check_vgpu(&mut self) {
        let contended = self.hang_detector.is_contended();
        self.state.note_errors();
        self.state.activity().sample(&self.state.observed, contended);
        self.next_hang_check = self.state.check_hang(&mut self.hang_detector);
        if self.closing_since.is_some_and(|since| !self.must_delay_closing(since.elapsed())) {
            self.closing_since = None;
            if let Err(error) = self.state.observed.set_gate(false) {
                log::warn!("{error}");
            }
        }
    }

    fn must_delay_closing(&mut self, waited: Duration) -> bool {
        let contended = self.hang_detector.is_contended();
        self.state.must_delay_closing(waited, contended, &mut self.closing_request)
    }

    fn record(&self) {
        self.state.record_accounting(self.closing_since.is_some());
    }

    /// Executes a message of the manager, and then removes it from the socket. A process that
    /// continues executes it again if it is still there: that changes nothing.
    fn receive(&mut self) {
        let Some(socket) = &self.manager else { return };
        let message = match socket.try_peek(&mut self.buffer) {
            Ok(Some(packet)) => decode::<FromManager>(&self.buffer[..packet.len]),
            Ok(None) => Err(std::io::ErrorKind::BrokenPipe.into()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
            Err(error) => Err(error),
        };
        match message {
            Ok(message) => {
                self.handle(&message);
                self.record();
                if let Some(socket) = &self.manager {
                    // The message, which was there before.
                    let _ = socket.try_recv(&mut self.buffer);
                }
            }
            Err(error) => {
                log::debug!("Lost the connection to the manager: {error}");
                self.manager = None;
                self.closing_since = None;
                // No other process would open the gate, and the guest must continue.
                if let Err(error) = self.state.observed.set_gate(true) {
                    log::warn!("{error}");
                }
            }
        }
    }

    fn set_load(&mut self, load: Load) {
        self.hang_detector.set_contended(load.contended, Instant::now());
        self.state.channels().load = load;
    }

    fn handle(&mut self, message: &FromManager) {
        if let FromManager::Usage(_, load) = *message {
            self.set_load(load);
        }
        if let FromManager::SetGate(open) = *message {
            if self.closing_since.is_none() {
                self.closing_request = None;
            }
            let delay = !open && self.must_delay_closing(Duration::ZERO);
            self.closing_since = delay.then(|| self.closing_since.unwrap_or_else(Instant::now));
            if delay {
                return;
            }
        }
        if let Some(reply) = self.execute(message)
            && let Ok(bytes) = encode(&reply)
            && let Some(socket) = &self.manager
        {
            // A manager that does not read loses the reply.
            let _ = socket.try_send(&bytes, &[]);
        }
    }

    fn execute(&self, message: &FromManager) -> Option<FromWorker> {
        let state = &self.state;
        let done = match *message {
            FromManager::SetTimeslice(timeslice) => state.channels().set_timeslice(timeslice),
            FromManager::SetGate(open) => state.observed.set_gate(open),
            FromManager::Reset => {
                state.reset(None);
                Ok(())
            }
            FromManager::Usage(number, _) => {
                return Some(FromWorker::Usage(number, Box::new(state.report())));
            }
            FromManager::Evict => {
                self.rm_client.free_all();
                state.channels().record_live(false);
                state.signals.raise(Pending::DEVICE_LOST);
                Ok(())
            }
            FromManager::Grant(_) => Err(GpuError::Invalid("a second grant")),
        };
        if let Err(error) = done {
            log::warn!("Cannot execute the manager's message: {error}");
        }
        None
    }
}
