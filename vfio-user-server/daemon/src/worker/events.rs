//! Event loop of a worker: the VM's session, the GPU's events and the manager's connections.
//!
//! * `program_events`: events of CUDA programs; `gpu_events`: of the GPU and the control queue;
//!   `control_events`: of the manager's connections; `handover`: another process of the VM
//!   attaches; `adoption`: adopting an earlier worker's

mod adoption;
mod control_events;
mod gpu_events;
mod handover;
mod program_events;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use foreign_fds::{ForeignFd, ForeignSocket};
use ipc::seqpacket::SeqPacketListener;
use log::Level;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{getsockopt, sockopt};
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, TimerSetTimeFlags};
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};

use super::End;
use super::control::ControlConnection;
use super::function::Function;
use super::programs::{Programs, Source};
use crate::log_limiter::LogLimiter;
use crate::worker_protocol::WorkerSpec;
use vfio_user_server::busy_poll::BusyPoll;
use vfio_user_server::session::{Closed, Interest, Session};
use vgpud_api::AttachedClient;

/// Pause after a failed accept. Without free descriptors, each accept fails until one is closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time after which finished messages of a VM leave its socket, up to twice that: a VM that makes
/// one access after the other costs one call for many. A timer of its own need not be set for each
/// wait.
const FINISHED_FOR: Duration = Duration::from_millis(2);

/// Sources of events, as epoll's user data.
mod source {
    pub const LISTENER: u32 = 0;
    pub const SESSION: u32 = 1;
    pub const GPU: u32 = 2;
    pub const UNMASK: u32 = 3;
    pub const CONTROL_LISTENER: u32 = 4;
    pub const ACCEPT_TIMER: u32 = 5;
    pub const PROGRAMS_LISTENER: u32 = 6;
    pub const QUEUE: u32 = 7;
    pub const PROGRAMS_TIMER: u32 = 8;
    pub const FINISHED_TIMER: u32 = 9;
    /// First number of control connections.
    pub const CONTROL: u32 = 16;
    /// First number of descriptors of programs.
    pub const PROGRAMS: u32 = 1 << 31;
}

/// Session of the attached VM.
#[derive(Debug)]
struct Attached {
    session: Session,
    client: AttachedClient,
    interest: Interest,
}

/// vGPU with its listeners and connections.
#[derive(Debug)]
pub struct Worker {
    spec: WorkerSpec,
    function: Function,
    listener: UnixListener,
    attached: Option<Attached>,
    /// Process that is attached until another one of its VM has taken over.
    outgoing: Option<Attached>,
    /// The new process has the vGPU, which is paused.
    adopted: bool,
    busy_poll: BusyPoll,
    /// Copy of the INTx unmask eventfd. epoll watches the copy, since the client can replace the
    /// original.
    unmask: Option<ForeignFd>,
    gpu_watched: bool,
    /// The thread of the control queue watches the GPU instead.
    queue_has_gpu: bool,
    control_listener: SeqPacketListener,
    control: BTreeMap<u32, ControlConnection>,
    next_control: u32,
    /// CUDA programs, if the vGPU is for them, too.
    programs: Option<Programs>,
    /// CPU time up to the end of the last event, if that was a program's.
    charged: Option<Duration>,
    /// Timer that ends a pause of the listeners.
    accept_timer: TimerFd,
    /// Timer for the removal of finished messages, and their number when it was set.
    finished_timer: (TimerFd, Option<u32>),
    end: Option<End>,
    /// Limiter for log lines that a client causes.
    log_limiter: LogLimiter,
}

impl Worker {
    /// Creates a worker. Both listeners become non-blocking.
    pub fn new(
        spec: WorkerSpec,
        function: Function,
        listener: UnixListener,
        control_listener: SeqPacketListener,
        programs: Option<Programs>,
    ) -> Result<Self> {
        listener.set_nonblocking(true).context("Cannot use the VM's listener")?;
        fcntl(&control_listener, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .context("Cannot use the control listener")?;
        let timer = || {
            let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
            TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).context("Cannot create a timer")
        };
        Ok(Self {
            spec,
            function,
            listener,
            attached: None,
            outgoing: None,
            adopted: false,
            // With many vGPUs on few CPUs, busy polling costs more than it gains:
            // docs/performance.md.
            busy_poll: BusyPoll::new(false),
            unmask: None,
            gpu_watched: false,
            queue_has_gpu: false,
            control_listener,
            control: BTreeMap::new(),
            next_control: source::CONTROL,
            programs,
            charged: None,
            accept_timer: timer()?,
            finished_timer: (timer()?, None),
            end: None,
            log_limiter: LogLimiter::new(Instant::now()),
        })
    }

    /// Returns why the worker is to end, once the manager has told it to.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Returns true while a manager or a VM is connected.
    pub fn is_needed(&self) -> bool {
        let has_programs = self.programs.as_ref().is_some_and(Programs::are_present);
        self.attached.is_some()
            || self.outgoing.is_some()
            || has_programs
            || !self.control.is_empty()
    }

    /// Returns true while the loop should busy-poll for the next event.
    pub fn should_poll(&mut self) -> bool {
        self.attached.is_some()
            && self.busy_poll.is_enabled()
            && self.busy_poll.should_poll(Instant::now())
    }

    /// Returns the number of finished messages of the VM that are in its socket.
    fn finished(&self) -> u32 {
        self.attached.as_ref().map_or(0, |attached| attached.session.finished())
    }

    /// Sets the timer for the removal of finished messages, unless it is set.
    pub fn time_finished(&mut self) {
        let finished = self.finished();
        let (timer, timed) = &mut self.finished_timer;
        if finished == 0 || timed.is_some() {
            return;
        }
        *timed = Some(finished);
        let expiration = Expiration::OneShot(TimeSpec::from(FINISHED_FOR));
        if let Err(error) = timer.set(expiration, TimerSetTimeFlags::empty()) {
            log::error!("Cannot set a timer: {error}");
            *timed = None;
            self.remove_finished();
        }
    }

    /// Removes finished messages, unless the VM has sent others meanwhile.
    fn on_finished_timer(&mut self) {
        let _ = self.finished_timer.0.wait();
        if self.finished_timer.1.take() == Some(self.finished()) {
            self.remove_finished();
        }
    }

    /// Removes finished messages of the VM from its socket.
    pub fn remove_finished(&mut self) {
        if let Some(attached) = &mut self.attached {
            // An error is that of the next receive call, too.
            let _ = attached.session.remove_finished(&mut self.function);
        }
    }

    /// Returns the process that uses the vGPU: the VM's, or a program's.
    fn user(&self) -> Option<AttachedClient> {
        let vm = self.attached.as_ref().or(self.outgoing.as_ref()).map(|attached| attached.client);
        vm.or_else(|| self.programs.as_ref()?.user())
    }

    /// Logs a line that a client causes, within the limit.
    fn log_limited(&mut self, level: log::Level, line: fmt::Arguments<'_>) {
        if let Some(line) = self.log_limiter.line(line) {
            log::log!(level, "{line}");
        }
    }

    fn accept_vm(&mut self, ops: &mut EventOps) {
        // The end of the previous session may not have been handled yet.
        self.drive_session(ops);
        let stream = match self.listener.accept() {
            // A refused client may have sent descriptors.
            Ok((stream, _)) => ForeignSocket::from(OwnedFd::from(stream)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                self.log_limited(Level::Warn, format_args!("Cannot accept a VM: {error}"));
                self.pause_listeners(ops);
                return;
            }
        };
        let client = peer(&stream);
        if let Some(reason) = self.refusal(client) {
            stream.end();
            let line = format_args!("Process {} is refused: {reason}", client.pid);
            self.log_limited(Level::Warn, line);
            return;
        }
        let session = match Session::new(stream.into_fd()) {
            Ok(session) => session,
            Err(error) => {
                log::warn!("Cannot serve process {}: {error}", client.pid);
                return;
            }
        };
        let interest = Interest::READ;
        if !watch(ops, &session, source::SESSION, event_set(interest)) {
            return;
        }
        let AttachedClient { pid, uid } = client;
        self.log_limited(Level::Info, format_args!("Process {pid} (uid {uid}) attaches"));
        if let Err(error) = self.function.attach() {
            log::error!("Cannot serve process {pid}: {error:#}");
            unwatch(ops, &session);
            return;
        }
        let attached = Attached { session, client, interest };
        self.begin_session(&attached);
        self.attached = Some(attached);
    }

    /// Stops watching the listeners for [`ACCEPT_PAUSE`]. They stay readable and would be reported
    /// all the time.
    fn pause_listeners(&mut self, ops: &mut EventOps) {
        let pause = Expiration::OneShot(TimeSpec::from(ACCEPT_PAUSE));
        if let Err(error) = self.accept_timer.set(pause, TimerSetTimeFlags::empty()) {
            log::error!("Cannot set a timer: {error}");
            return;
        }
        self.watch_listeners(ops, EventSet::empty());
    }

    fn adopt_listeners(&mut self, ops: &mut EventOps) {
        let _ = self.accept_timer.wait();
        self.watch_listeners(ops, EventSet::IN);
    }

    /// Sets the events for which the listeners are watched.
    fn watch_listeners(&self, ops: &mut EventOps, set: EventSet) {
        let programs = self.programs.as_ref();
        let listeners = [
            Some((self.listener.as_fd(), source::LISTENER)),
            Some((self.control_listener.as_fd(), source::CONTROL_LISTENER)),
            programs.map(|programs| (programs.listener().as_fd(), source::PROGRAMS_LISTENER)),
        ];
        for (listener, data) in listeners.into_iter().flatten() {
            let events = Events::with_data_raw(listener.as_raw_fd(), data, set);
            if let Err(error) = ops.modify(events) {
                log::error!("Cannot watch a listener: {error}");
            }
        }
    }

    /// Returns the reason why a VM is refused.
    fn refusal(&self, client: AttachedClient) -> Option<String> {
        let owner = self.spec.owner;
        if client.uid != 0 && client.uid != owner {
            return Some(format!(
                "its user is {}, and the vGPU belongs to user {owner}",
                client.uid
            ));
        }
        if let Some(attached) = &self.attached {
            return Some(format!("process {} uses the vGPU", attached.client.pid));
        }
        if let Some(user) = self.programs.as_ref().and_then(Programs::user) {
            return Some(format!("CUDA programs use the vGPU, such as process {}", user.pid));
        }
        foreign_fds::is_exhausted()
            .then(|| "files of an earlier client cannot be closed".to_owned())
    }

    fn drive_session(&mut self, ops: &mut EventOps) {
        let Some(attached) = &mut self.attached else { return };
        let before = attached.session.messages();
        let result = attached.session.on_ready(&mut self.function);
        if self.busy_poll.is_enabled() && attached.session.messages() > before {
            self.busy_poll.record_answer(Instant::now());
        }
        match result {
            Ok(interest) if interest == attached.interest => {}
            Ok(interest) => {
                attached.interest = interest;
                let (fd, set) = (attached.session.as_fd().as_raw_fd(), event_set(interest));
                let events = Events::with_data_raw(fd, source::SESSION, set);
                if let Err(error) = ops.modify(events) {
                    log::error!("Cannot watch the VM's socket: {error}");
                }
            }
            Err(closed) => {
                let pid = attached.client.pid;
                unwatch(ops, &attached.session);
                self.attached = None;
                match closed {
                    Closed::ByPeer => {
                        self.log_limited(Level::Info, format_args!("Process {pid} detaches"));
                    }
                    other => {
                        self.log_limited(
                            Level::Warn,
                            format_args!("Process {pid} is cut off: {other}"),
                        );
                    }
                }
            }
        }
        self.watch_unmask(ops);
        self.watch_gpu(ops);
    }

    /// Watches the INTx unmask eventfd that the client has set.
    fn watch_unmask(&mut self, ops: &mut EventOps) {
        if !self.function.take_unmask_event_changed() {
            return;
        }
        if let Some(old) = self.unmask.take() {
            unwatch(ops, &old);
        }
        let copy = self.function.inner().intx_unmask_event().map(|fd| fd.try_clone_to_owned());
        match copy.transpose() {
            Ok(Some(new)) => {
                let new = ForeignFd::from(new);
                if watch(ops, &new, source::UNMASK, EventSet::IN) {
                    self.unmask = Some(new);
                }
            }
            Ok(None) => {}
            Err(error) => log::error!("Cannot watch INTx unmasking: {error}"),
        }
    }

    fn on_unmask(&mut self, ops: &mut EventOps) {
        let Some(event) = &self.unmask else { return };
        if let Err(error) = self.function.inner_mut().on_intx_unmask() {
            unwatch(ops, event);
            self.unmask = None;
            let line = format_args!("The VM's file to unmask INTx is not an eventfd: {error}");
            self.log_limited(Level::Warn, line);
        }
    }
}

impl MutEventSubscriber for Worker {
    fn init(&mut self, ops: &mut EventOps) {
        watch(ops, &self.listener, source::LISTENER, EventSet::IN);
        watch(ops, &self.control_listener, source::CONTROL_LISTENER, EventSet::IN);
        if let Some(programs) = &self.programs {
            watch(ops, programs.listener(), source::PROGRAMS_LISTENER, EventSet::IN);
            watch(ops, programs.timer(), source::PROGRAMS_TIMER, EventSet::IN);
        }
        watch(ops, &self.accept_timer, source::ACCEPT_TIMER, EventSet::IN);
        watch(ops, &self.finished_timer.0, source::FINISHED_TIMER, EventSet::IN);
        let gpu = self.function.inner().gpu_event();
        self.gpu_watched = watch(ops, &gpu, source::GPU, EventSet::IN);
        if let Some(event) = self.function.inner().queue_event() {
            watch(ops, &event, source::QUEUE, EventSet::IN);
        }
        self.watch_resumed(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let event = events.data();
        let of_program = event == source::PROGRAMS_LISTENER || event & source::PROGRAMS != 0;
        match event {
            source::PROGRAMS_LISTENER => self.on_programs(ops, None),
            id if of_program => self.on_programs(ops, Some(Source(id & !source::PROGRAMS))),
            source::LISTENER => self.accept_vm(ops),
            source::SESSION => self.drive_session(ops),
            source::GPU => self.on_gpu(ops),
            source::UNMASK => self.on_unmask(ops),
            source::QUEUE => self.on_queue(ops),
            source::CONTROL_LISTENER => self.accept_control(ops),
            source::ACCEPT_TIMER => self.adopt_listeners(ops),
            source::PROGRAMS_TIMER => self.on_programs_timer(ops),
            source::FINISHED_TIMER => self.on_finished_timer(),
            id => self.on_control(id, ops),
        }
        if !of_program {
            self.charged = None;
        }
        self.record(event);
    }
}

fn event_set(interest: Interest) -> EventSet {
    let mut set = EventSet::empty();
    set.set(EventSet::IN, interest.readable);
    set.set(EventSet::OUT, interest.writable);
    set.set(EventSet::EDGE_TRIGGERED, interest.edge);
    set
}

fn watch(ops: &mut EventOps, fd: &impl AsFd, data: u32, set: EventSet) -> bool {
    let added = ops.add(Events::with_data_raw(fd.as_fd().as_raw_fd(), data, set));
    if let Err(error) = &added {
        log::error!("Cannot watch a descriptor: {error}");
    }
    added.is_ok()
}

/// Stops watching a descriptor. Must precede its close: a new descriptor of the same number would
/// inherit the events.
fn unwatch(ops: &mut EventOps, fd: &impl AsFd) {
    if let Err(error) = ops.remove(Events::empty_raw(fd.as_fd().as_raw_fd())) {
        log::error!("Cannot stop watching a descriptor: {error}");
    }
}

fn peer(socket: &impl AsFd) -> AttachedClient {
    match getsockopt(socket, sockopt::PeerCredentials) {
        Ok(credentials) => AttachedClient { pid: credentials.pid(), uid: credentials.uid() },
        Err(_) => AttachedClient { pid: 0, uid: u32::MAX },
    }
}
