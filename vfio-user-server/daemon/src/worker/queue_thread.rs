//! Thread of the control queue, through which CUDA programs in a VM use the vGPU.
//!
//! A request can take milliseconds in the GPU's driver. The event loop, which answers the guest's
//! accesses to registers, therefore only notes what the guest wants. This thread holds the client
//! during a request, and the event loop does not wait for it, except to reset the device.
//!
//! * `signals`: what both use; `gate`: exclusion of both
//! * `records`: what is recorded of the queue; `adoption`: adopting an earlier worker's queue
//! * `programs_in_vm`: statistics

mod adoption;
mod gate;
mod programs_in_vm;
mod records;
mod signals;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, thread};

use anyhow::{Context, Result};
use foreign_fds::ForeignFd;
use mdev_core::abi::queue::{self, Failure, State};
use mdev_core::device;
use mdev_core::gpu::{Client, DoorbellWatch, Pending, SharedClient};
use mdev_core::ids::{GuestPa, Token};
use mdev_core::mem::SharedGuestMemory;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use programs::control_queue::ControlQueue;
use programs::front_end::FrontEndSpec;

use self::gate::Gate;
pub use self::programs_in_vm::ProgramsInVm;
use self::programs_in_vm::Updates;
pub use self::records::QueueRecords;
pub use self::signals::Orders;
use self::signals::{Order, Signals};
use super::doorbell::Doorbell;
use super::front_end;
use super::journal::QueueRecorder;
use super::request_budget;
use crate::cpu_budget::{Budget, thread_cpu_time};
use crate::log_limiter::LogLimiter;

/// Time without a ring after which the guest is asked to withdraw the doorbell page.
const QUIET: Duration = Duration::from_secs(2);
/// Interval of looks at the doorbell.
const DOORBELL_LOOK: Duration = Duration::from_millis(500);
/// Interval of looks for room in the guest's ring of completions.
const ROOM_LOOK: Duration = Duration::from_millis(1);

/// Control queue of a worker, with its thread.
#[derive(Debug)]
pub struct QueueThread {
    signals: Arc<Signals>,
    served: Arc<Mutex<Served>>,
    client: SharedClient,
    programs: ProgramsInVm,
    records: QueueRecords,
    thread: Option<JoinHandle<()>>,
}

/// What the thread serves. Held during a request.
#[derive(Debug, Default)]
struct Served {
    queue: Option<ControlQueue>,
    /// The worker's watch of the doorbell page.
    doorbell: Option<Doorbell>,
    /// The worker's watch, or the backend's.
    watch: Option<Arc<dyn DoorbellWatch>>,
    /// Recorder of what is served, if another worker can continue.
    recorder: Option<QueueRecorder>,
    /// Number of the last order that is done.
    done: u64,
    /// The queue is an earlier worker's, and serves its first request. That worker may have begun
    /// the request, so it comes before all else that the GPU is asked.
    repeats: bool,
}

/// The thread's parts.
#[derive(Debug)]
struct Server {
    signals: Arc<Signals>,
    served: Arc<Mutex<Served>>,
    gate: Arc<Gate>,
    client: SharedClient,
    memory: SharedGuestMemory,
    gpu_event: OwnedFd,
    front_end: FrontEndSpec,
    statistics: Updates,
    /// CPU time that requests may take.
    budget: Budget,
    /// Requests wait for the budget.
    waits: bool,
    log_limiter: LogLimiter,
}

fn lock(served: &Mutex<Served>) -> MutexGuard<'_, Served> {
    served.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Served {
    /// Starts the watch of the doorbell page.
    fn start_watch(&mut self, signals: &Signals, client: &mut dyn Client) {
        self.doorbell = Doorbell::start(client).unwrap_or_else(|error| {
            log::warn!("The doorbell cannot be watched: {error:#}");
            None
        });
        let own = self.doorbell.as_ref().map(Doorbell::watch);
        self.watch = own.or_else(|| client.doorbell_watch());
        signals.set_doorbell(self.watch.clone());
    }

    /// Records the state with the value of `QUEUE_STATUS`.
    fn record(&mut self, client: &SharedClient, memory: &SharedGuestMemory, status: u32) {
        let Self { queue, recorder: Some(recorder), done, .. } = self else { return };
        let mut client = client.lock();
        recorder.commit(&mut **client, &memory.lock(), queue.as_mut(), (*done, status));
    }

    /// Ends all use of the vGPU.
    fn end(&mut self, signals: &Signals, client: &SharedClient) {
        signals.set_doorbell(None);
        // The backend's watch goes on: the guest may use the mailbox.
        if let Some(watch) = self.watch.take() {
            watch.resume();
        }
        self.doorbell = None;
        self.repeats = false;
        if let Some(recorder) = &mut self.recorder {
            recorder.end_queue();
        }
        if let Some(queue) = self.queue.take() {
            let mut client = client.lock();
            queue.stop(&mut **client);
            if let Err(error) = client.reset() {
                log::debug!("The GPU refused a reset: {error}");
            }
        }
    }
}

impl QueueThread {
    /// Starts the thread for a client and guest memory.
    pub fn start(
        (client, memory): (SharedClient, SharedGuestMemory),
        gpu_event: OwnedFd,
        front_end: FrontEndSpec,
    ) -> Result<Self> {
        let signals = Arc::new(Signals::new().context("Cannot create the queue's events")?);
        let served = Arc::<Mutex<Served>>::default();
        let gate = Arc::<Gate>::default();
        let programs = ProgramsInVm::default();
        let records = QueueRecords::new(signals.clone(), served.clone(), gate.clone());
        let mut server = Server {
            signals: Arc::clone(&signals),
            served: Arc::clone(&served),
            gate,
            client: client.clone(),
            memory,
            gpu_event,
            front_end,
            statistics: Updates::new(programs.clone()),
            budget: Budget::new(request_budget::VGPU, Instant::now()),
            waits: false,
            log_limiter: LogLimiter::new(Instant::now()),
        };
        let thread = thread::Builder::new().name("queue".into());
        let thread = thread.spawn(move || server.run()).context("Cannot start a thread")?;
        Ok(Self { signals, served, client, programs, records, thread: Some(thread) })
    }

    /// Returns the queue's records, for those of the event loop.
    pub fn records(&self) -> QueueRecords {
        self.records.clone()
    }

    /// Returns the statistics of the VM's programs.
    pub fn programs(&self) -> ProgramsInVm {
        self.programs.clone()
    }
}

impl device::ControlQueue for QueueThread {
    fn start(&mut self, base: GuestPa, slots: u32) {
        if self.signals.status().0 == State::Off {
            self.signals.order(Order::Start(base, slots));
        }
    }

    fn stop(&mut self) {
        if self.signals.status().0 != State::Off {
            self.signals.order(Order::Stop);
        }
    }

    fn notify(&mut self) {
        self.signals.notify();
    }

    fn woken(&mut self, deferred: bool) {
        self.signals.wake(deferred);
    }

    fn status(&self) -> (State, u32) {
        self.signals.status()
    }

    fn reset(&mut self) {
        let mut served = lock(&self.served);
        self.signals.reset();
        served.end(&self.signals, &self.client);
        self.programs.clear();
    }

    fn set_interrupt(&mut self, event: Option<ForeignFd>) {
        self.signals.set_interrupt(event);
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.signals.event().as_fd()
    }

    fn take_pending(&mut self) -> (Pending, Pending) {
        self.signals.take_pending()
    }
}

impl Drop for QueueThread {
    fn drop(&mut self) {
        self.signals.stopped.store(true, Ordering::SeqCst);
        self.signals.notify();
        if let Some(thread) = self.thread.take() {
            // A panic was logged already.
            let _ = thread.join();
        }
    }
}

impl Server {
    fn run(&mut self) {
        let gate = Arc::clone(&self.gate);
        while !self.signals.stopped.load(Ordering::SeqCst) {
            let before = thread_cpu_time();
            let entered = gate.enter();
            let timeout = self.step();
            drop(entered);
            self.budget.charge(thread_cpu_time().saturating_sub(before), Instant::now());
            if timeout != Some(Duration::ZERO)
                && let Err(error) = self.wait(timeout)
            {
                log::error!("The queue's thread cannot wait: {error}");
                return;
            }
        }
    }

    /// Waits for something to do.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = match timeout {
            Some(timeout) => PollTimeout::try_from(timeout).map_err(io::Error::other)?,
            None => PollTimeout::NONE,
        };
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = [readable(self.signals.work().as_fd()), readable(self.gpu_event.as_fd())];
        // The client's events are for the event loop while the queue is off.
        let count = if self.signals.status().0 == State::Off { 1 } else { 2 };
        match poll(&mut fds[..count], timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Does what there is to do, up to one request. Returns the time after which there may be more;
    /// zero if there is more.
    fn step(&mut self) -> Option<Duration> {
        self.signals.take_work();
        if self.signals.take_wake_client()
            && let Err(error) = self.client.lock().wake(Token(0))
        {
            log::debug!("The GPU refused a wake-up: {error}");
        }
        let shared = Arc::clone(&self.served);
        let mut served = lock(&shared);
        match self.signals.next_order() {
            Some((number, order)) => self.carry_out(&mut served, number, order),
            None if self.signals.status().0 == State::Off => {
                self.statistics.clear();
                return None;
            }
            None => {}
        }
        let pending =
            if served.repeats { Pending::empty() } else { self.client.lock().take_pending() };
        self.signals.add(pending);
        if self.signals.status().0 != State::Running {
            if self.signals.status().0 == State::Failed {
                self.record(&mut served);
            }
            return None;
        }
        match self.serve(&mut served, pending) {
            Ok(timeout) => timeout,
            Err(failure) => {
                self.fail(&mut served, failure);
                None
            }
        }
    }

    fn carry_out(&mut self, served: &mut Served, number: u64, order: Order) {
        served.done = number;
        match order {
            Order::Start(base, slots) => match self.try_start(served, base, slots) {
                Ok(()) => self.reach(served, State::Running, None),
                Err(failure) => self.fail(served, failure),
            },
            Order::Stop => {
                served.end(&self.signals, &self.client);
                self.statistics.clear();
                self.reach(served, State::Off, None);
            }
        }
        // Another worker finds the order, or the record that it is done.
        self.signals.remove_order(number);
    }

    /// Records a state, and then shows it.
    fn reach(&self, served: &mut Served, state: State, failure: Option<Failure>) {
        served.record(&self.client, &self.memory, queue::status(state, failure));
        self.signals.set_state(state, failure);
    }

    /// Records what has changed.
    fn record(&self, served: &mut Served) {
        served.record(&self.client, &self.memory, self.signals.status().1);
    }

    fn try_start(&mut self, served: &mut Served, base: GuestPa, slots: u32) -> Result<(), Failure> {
        let front_end = front_end::create(&self.front_end).map_err(|error| {
            log::error!("{error:#}");
            Failure::Host
        })?;
        let mut client = self.client.lock();
        // Ends what the mailbox has made.
        client.reset().map_err(|_| Failure::Lost)?;
        let queue = ControlQueue::start(front_end, self.memory.clone(), base, slots)?;
        served.start_watch(&self.signals, &mut **client);
        served.queue = Some(queue);
        Ok(())
    }

    fn fail(&mut self, served: &mut Served, failure: Failure) {
        if let Some(suppressed) = self.log_limiter.pass(Instant::now()) {
            let more = if suppressed > 0 { " (lines were suppressed before)" } else { "" };
            log::warn!("The VM's control queue stops: {failure}{more}");
        }
        self.reach(served, State::Failed, Some(failure));
    }

    /// Serves a request. Returns the time after which there may be more.
    fn serve(
        &mut self,
        served: &mut Served,
        pending: Pending,
    ) -> Result<Option<Duration>, Failure> {
        let wait = self.wait_for_budget();
        let more = self.serve_request(served, pending, wait.is_none())?;
        let Served { queue: Some(queue), watch, .. } = &mut *served else { return Ok(None) };
        if more {
            self.statistics.note_request();
        }
        let update = self.statistics.update(queue, Instant::now());
        let quiet = self.watch_doorbell(queue, watch.as_deref());
        // Before the guest learns of it.
        self.record(served);
        let Some(queue) = &mut served.queue else { return Ok(None) };
        if queue.flush()? {
            self.signals.interrupt();
        }
        Ok(match (queue.is_blocked(), more) {
            (true, _) => Some(ROOM_LOOK),
            (false, true) => Some(Duration::ZERO),
            (false, false) => [quiet, update, wait].into_iter().flatten().min(),
        })
    }

    /// Passes conditions of the GPU on, and carries out a request if there is one and it may be
    /// served. Returns whether there was one.
    ///
    /// An adopting worker repeats a request with the same calls of the GPU. Therefore the
    /// position of the client is recorded before each request, and first of all that worker carries
    /// the request out that may have been begun.
    fn serve_request(
        &self,
        served: &mut Served,
        pending: Pending,
        may_serve: bool,
    ) -> Result<bool, Failure> {
        let repeats = std::mem::take(&mut served.repeats);
        let Some(queue) = &mut served.queue else { return Ok(false) };
        let may_serve = may_serve && !queue.is_blocked() && queue.has_work()?;
        if !repeats {
            let mut client = self.client.lock();
            if !pending.is_empty() {
                queue.on_gpu_event(&mut **client, pending)?;
            }
            if may_serve {
                queue.update_utilization(&mut **client);
            }
            drop(client);
            self.record(served);
        }
        let Some(queue) = &mut served.queue else { return Ok(false) };
        let mut client = self.client.lock();
        let more = may_serve && queue.serve(&mut **client)?;
        if repeats {
            queue.repeat_gpu_events(&mut **client)?;
        }
        Ok(more)
    }

    /// Returns how long requests have to wait, if at all. A VM that has used up its CPU time waits
    /// until there is some for several requests.
    fn wait_for_budget(&mut self) -> Option<Duration> {
        if !self.waits && self.budget.is_exhausted() {
            self.waits = true;
            if self.log_limiter.pass(Instant::now()).is_some() {
                log::debug!("Requests of the VM wait: it sends too many");
            }
        }
        let wait = self.budget.wait(Instant::now()).filter(|_| self.waits);
        self.waits = wait.is_some();
        wait
    }

    /// Lets the watch of the doorbell page sleep while no program has the page. Returns the time
    /// after which it may do so.
    fn watch_doorbell(
        &self,
        queue: &mut ControlQueue,
        watch: Option<&dyn DoorbellWatch>,
    ) -> Option<Duration> {
        let watch = watch?;
        if !queue.is_doorbell_given() {
            watch.pause();
        } else if watch.quiet_for() >= QUIET {
            queue.withdraw_doorbell();
        }
        // Last: a wake-up in between ends the sleep.
        if self.signals.take_woken() {
            queue.on_woken();
        }
        if !queue.is_doorbell_given() {
            return None;
        }
        watch.resume();
        Some(DOORBELL_LOOK)
    }
}
