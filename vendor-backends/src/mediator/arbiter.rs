//! Arbiter: the GPU process of a GPU whose vGPUs have contexts ([`super::context_process`]).
//!
//! It divides the engine's time among the contexts by turns, and touches nothing of a tenant: of
//! each context it has a page of its own making, an eventfd and a socket.
//!
//! * [`delays`]: what the host ran instead of a context
//! * [`holds`]: contexts that hold the arbiter in their pages
//! * [`link`]: messages to a context
//! * [`rotation`]: the order of turns

mod delays;
mod holds;
pub mod link;
pub mod rotation;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use foreign_fds::ForeignFd;
use ipc::mem::SharedMemory;
use ipc::seqpacket::{self, SeqPacket};
use mdev_core::gpu::{ClientSpec, Quotas, Usage, UsageReport, Waits};
use mdev_core::ids::VgpuId;
use mdev_core::sched::Budget;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use nix::sys::timer::TimerSetTimeFlags;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags};

use self::delays::Delays;
use self::holds::Holds;
use self::link::Order;
use self::rotation::{Contexts, Rotation};
use super::emulation::clock::now_ns;
use super::emulation::vgpu::nanoseconds;
use super::hardware::{Hardware, Reservation};
use super::turn_page::{PAGE_BYTES, Seen, TurnPage};
use super::wire::{self, Refusal};

/// Events of the thread other than those of contexts.
const WAKE: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;
/// Events that the thread takes at once.
const MAX_EVENTS: usize = 64;

/// The contexts of a GPU, and the thread that gives turns to them.
#[derive(Debug)]
pub struct Arbiter {
    hardware: Arc<dyn Hardware>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    epoll: Epoll,
    /// Has the thread look.
    wake: EventFd,
    stop: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    members: Vec<Member>,
    rotation: Rotation,
    last_key: u64,
}

/// A context. Its seat in the rotation is its index in the list.
#[derive(Debug)]
struct Member {
    spec: ClientSpec,
    /// Number among the thread's events: twice this for the bell, one more for the link.
    key: u64,
    page: TurnPage,
    holds: Holds,
    delays: Delays,
    /// The context has a copy. Its close can wait for what the context does with that.
    bell: ForeignFd,
    link: SeqPacket,
    _reservation: Box<dyn Reservation>,
}

impl Member {
    /// Sends an order without waiting.
    fn order(&self, order: &Order) -> Result<(), Refusal> {
        let bytes = seqpacket::encode(order)?;
        // A context that takes no orders is held by its tenant.
        self.link.try_send(&bytes, &[]).map_err(|_| Refusal::Os(libc::EBUSY))
    }

    fn waits(&self) -> Waits {
        self.holds.access(|| self.page.waits()).unwrap_or_default()
    }

    fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.link.as_fd(), PollFlags::empty())];
        poll(&mut fds, PollTimeout::ZERO).is_ok() && fds[0].any() == Some(true)
    }
}

impl Contexts for Vec<Member> {
    fn page(&self, seat: usize) -> &TurnPage {
        &self[seat].page
    }

    fn seen(&self, seat: usize) -> Seen {
        let member = &self[seat];
        let was_cut_off = member.holds.is_cut_off();
        let seen = member.holds.access(|| member.page.seen());
        if member.holds.is_cut_off() && !was_cut_off {
            log::error!(
                "vGPU {}: its context holds the GPU process in their page, and gets no more turns: stop it",
                member.spec.vgpu
            );
        }
        seen.unwrap_or_default()
    }

    fn delayed_ns(&self, seat: usize) -> u64 {
        self[seat].delays.total_ns()
    }
}

impl State {
    fn seat(&self, id: VgpuId) -> Result<usize, Refusal> {
        let found = self.members.iter().position(|member| member.spec.vgpu == id);
        found.ok_or(Refusal::NoVgpu)
    }

    fn member(&self, id: VgpuId) -> Result<&Member, Refusal> {
        Ok(&self.members[self.seat(id)?])
    }

    /// Gives turns. Returns when to look again.
    fn step(&mut self) -> Option<u64> {
        self.rotation.step(now_ns(), &self.members)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the settings, and has the thread look.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state());
        let _ = self.wake.write(1);
        result
    }

    fn watch(&self, member: &Member) -> io::Result<()> {
        let bell = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 2 * member.key);
        self.epoll.add(&member.bell, bell)?;
        let ends =
            EpollEvent::new(EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET, 2 * member.key + 1);
        Ok(self.epoll.add(&member.link, ends)?)
    }

    /// Removes a context. The context has a copy of its bell.
    fn remove(&self, state: &mut State, seat: usize) {
        let member = state.members.remove(seat);
        state.rotation.remove(seat);
        let _ = self.epoll.delete(&member.bell);
    }

    /// Gives turns until the arbiter ends.
    fn run(&self, timer: &TimerFd) {
        let mut events = [EpollEvent::empty(); MAX_EVENTS];
        while !self.stop.load(Ordering::Acquire) {
            let count = self.epoll.wait(&mut events, EpollTimeout::NONE).unwrap_or_default();
            let keys: Vec<u64> = events[..count].iter().map(EpollEvent::data).collect();
            for key in &keys {
                match *key {
                    WAKE => drop(self.wake.read()),
                    TIMER => drop(timer.wait()),
                    _ => {}
                }
            }
            let mut state = self.state();
            for key in keys.iter().filter(|key| **key < TIMER && **key % 2 == 1) {
                let ended = state.members.iter().position(|member| 2 * member.key + 1 == *key);
                if let Some(seat) = ended {
                    log::info!("vGPU {}: its context has ended", state.members[seat].spec.vgpu);
                    self.remove(&mut state, seat);
                }
            }
            let next = state.step();
            drop(state);
            let set = match next {
                Some(at) => {
                    let at = Expiration::OneShot(TimeSpec::from_duration(Duration::from_nanos(at)));
                    timer.set(at, TimerSetTimeFlags::TFD_TIMER_ABSTIME)
                }
                None => timer.unset(),
            };
            if let Err(error) = set {
                log::error!("The arbiter cannot set its timer: {error}");
            }
        }
    }
}

impl Arbiter {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptors or threads.
    pub fn start(hardware: Arc<dyn Hardware>) -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            wake: EventFd::from_flags(flags)?,
            stop: AtomicBool::new(false),
        });
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        shared.epoll.add(&shared.wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        shared.epoll.add(&timer, EpollEvent::new(EpollFlags::EPOLLIN, TIMER))?;
        let of_thread = Arc::clone(&shared);
        let builder = thread::Builder::new().name("gpu-arbiter".into());
        let thread = builder.spawn(move || of_thread.run(&timer))?;
        Ok(Self { hardware, shared, thread: Some(thread) })
    }

    /// Admits a vGPU whose context is at the other end of `link`: a new one, or one that an arbiter
    /// before this one admitted. `schedstat` is `/proc/PID/schedstat` of the context, if the kernel
    /// has it.
    pub fn admit(
        &self,
        spec: &ClientSpec,
        link: OwnedFd,
        schedstat: Option<OwnedFd>,
    ) -> Result<(), Refusal> {
        let mut state = self.shared.state();
        if let Ok(seat) = state.seat(spec.vgpu) {
            if !state.members[seat].has_ended() {
                return Err(Refusal::VgpuExists);
            }
            self.shared.remove(&mut state, seat);
        }
        if state.members.len() >= self.hardware.describe().max_vgpus as usize {
            return Err(Refusal::VgpuLimit);
        }
        // The memory is the context's.
        let reservation = self.hardware.partition(spec)?.reservation;
        let SharedMemory { fd, mapping } = SharedMemory::new(c"vgpu-turns", PAGE_BYTES)?;
        let page = TurnPage::new(mapping).ok_or(Refusal::Backing)?;
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(io::Error::from)?;
        let bell = ForeignFd::from(OwnedFd::from(bell));
        // A context sends nothing, and no descriptor of its is received.
        let link = SeqPacket::from(link);
        let hello = seqpacket::encode(&Order::Hello { version: wire::VERSION })?;
        link.try_send(&hello, &[fd.as_fd(), bell.as_fd()])?;
        state.last_key += 1;
        let key = state.last_key;
        let (spec, holds, delays) = (spec.clone(), Holds::default(), Delays::new(schedstat));
        let member =
            Member { spec, key, page, holds, delays, bell, link, _reservation: reservation };
        self.shared.watch(&member)?;
        let slice = self.hardware.describe().default_timeslice;
        state.rotation.add(nanoseconds(slice), now_ns());
        state.members.push(member);
        drop(state);
        self.shared.change(|_| ());
        Ok(())
    }

    /// Returns whether there is no context.
    pub fn is_empty(&self) -> bool {
        self.shared.state().members.is_empty()
    }

    /// Ends a vGPU. Its context gets no more turns.
    pub fn evict(&self, id: VgpuId) -> Result<(), Refusal> {
        self.shared.change(|state| {
            let seat = state.seat(id)?;
            // One that does not take the order is killed by the manager.
            let _ = state.members[seat].order(&Order::End);
            self.shared.remove(state, seat);
            Ok(())
        })
    }

    /// Sets the time slice.
    pub fn set_timeslice(&self, id: VgpuId, slice: Duration) -> Result<(), Refusal> {
        self.shared.change(|state| {
            let seat = state.seat(id)?;
            state.rotation.set_slice(seat, nanoseconds(slice));
            Ok(())
        })
    }

    /// Sets or removes the budget of engine time.
    pub fn set_budget(&self, id: VgpuId, budget: Option<Budget>) -> Result<(), Refusal> {
        self.shared.change(|state| {
            let seat = state.seat(id)?;
            state.rotation.set_budget(seat, budget, now_ns());
            Ok(())
        })
    }

    /// Opens or closes the gate.
    pub fn set_gate(&self, id: VgpuId, is_open: bool) -> Result<(), Refusal> {
        self.shared.change(|state| {
            let seat = state.seat(id)?;
            state.rotation.set_gate(seat, is_open);
            Ok(())
        })
    }

    /// Sets the quotas.
    pub fn set_quotas(&self, id: VgpuId, quotas: &Quotas) -> Result<(), Refusal> {
        self.shared.state().member(id)?.order(&Order::SetQuotas(*quotas))
    }

    /// Faults all channels.
    pub fn reset(&self, id: VgpuId) -> Result<(), Refusal> {
        self.shared.state().member(id)?.order(&Order::Reset)
    }

    /// Returns the counters of all vGPUs.
    pub fn usage(&self) -> UsageReport {
        let state = self.shared.state();
        let now_ns = now_ns();
        let usage = |(seat, member): (usize, &Member)| {
            let counts = state.rotation.counts(seat, now_ns);
            let said = member.holds.access(|| member.page.usage(now_ns)).unwrap_or_default();
            let usage = Usage {
                engine_ns: state.rotation.engine_ns(seat, said.engine_ns, now_ns),
                gated_ns: counts.gated_ns,
                gate_closings: counts.gate_closings,
                gate_cost_ns: counts.gate_cost_ns,
                preemptions: counts.preemptions,
                waits: member.waits(),
                ..said
            };
            (member.spec.vgpu, usage)
        };
        UsageReport { now_ns, vgpus: state.members.iter().enumerate().map(usage).collect() }
    }

    /// Returns the waits of a vGPU.
    pub fn waits(&self, id: VgpuId) -> Result<Waits, Refusal> {
        Ok(self.shared.state().member(id)?.waits())
    }
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        let _ = self.shared.wake.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
