//! Life cycle of a started vGPU: an enum with the data of each state, changed by one function.
//!
//! ```text
//! Starting ─► Active ◄─► InUse        Active, InUse, Foreign ─► Restarting ─► Starting
//!                                     any but Stopping       ─► Failed
//! (adopted) ─► Active, InUse, Foreign any with a worker      ─► Stopping ─► Killed ─► Stuck
//! ```
//!
//! A vGPU without a worker is not stopped but removed, as is one in state Stopping, Killed
//! or Stuck whose worker has exited.

use std::time::Instant;

use vgpud_api::AttachedClient;
use vgpud_api::VgpuState;

/// State of a started vGPU with worker `W`.
#[derive(Debug, PartialEq, Eq)]
pub enum State<W> {
    /// The vGPU holds a partition; its worker is not running yet.
    Starting,
    /// The worker serves its socket; no client is attached.
    Active { worker: W },
    /// A client is attached, as the worker last reported.
    InUse { worker: W, client: AttachedClient },
    /// The worker is of an unsupported version. Whether a client is attached is unknown.
    Foreign { worker: W },
    /// The worker died; it is started again at `at`.
    Restarting { at: Instant, reason: String },
    /// The GPU is lost, or the worker cannot be kept running. A remaining worker reports the error
    /// to its VM.
    Failed { reason: String, worker: Option<W> },
    /// The worker was told to exit. It is killed at `kill_at`.
    Stopping { worker: W, kill_at: Instant },
    /// The worker was killed. Its end is not awaited after `give_up_at`.
    Killed { worker: W, give_up_at: Instant },
    /// The worker was killed and does not end. The vGPU is removed when the worker ends.
    Stuck { worker: W, reason: String },
}

/// Event that changes a vGPU's state.
#[derive(Debug)]
pub enum Event<W> {
    /// The worker was started.
    Launched(W),
    /// The worker reported its client.
    ClientReported(Option<AttachedClient>),
    /// The worker exited; it is started again at `restart_at`, or not at all.
    WorkerDied { reason: String, restart_at: Option<Instant> },
    /// The time of the restart has come.
    RestartDue,
    /// The vGPU cannot work any more.
    Failed { reason: String },
    /// The worker was told to exit.
    Stop { kill_at: Instant },
    /// The worker did not exit in time.
    KillDue { give_up_at: Instant },
    /// The killed worker did not end in time.
    GiveUp { reason: String },
    /// The worker cannot be started for want of resources of the host.
    Postponed { at: Instant, reason: String },
}

/// Event that a state does not accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("A vGPU that is {state} does not accept the event {event:?}")]
pub struct TransitionError {
    /// State of the vGPU.
    pub state: &'static str,
    /// Refused event.
    pub event: &'static str,
}

/// Life cycle of one vGPU.
#[derive(Debug, PartialEq, Eq)]
pub struct Lifecycle<W> {
    state: State<W>,
}

impl<W> Lifecycle<W> {
    /// Creates the life cycle of a vGPU that is being started.
    pub fn starting() -> Self {
        Self { state: State::Starting }
    }

    /// Creates the life cycle of a vGPU whose worker an earlier manager started.
    pub fn adopted(worker: W, client: Option<AttachedClient>) -> Self {
        let state = match client {
            Some(client) => State::InUse { worker, client },
            None => State::Active { worker },
        };
        Self { state }
    }

    /// Creates the life cycle of a vGPU whose running worker is of an unsupported version.
    pub fn foreign(worker: W) -> Self {
        Self { state: State::Foreign { worker } }
    }

    /// Returns the state.
    pub fn state(&self) -> &State<W> {
        &self.state
    }

    /// Applies an event. A refused event is an error and leaves the state unchanged.
    pub fn apply(&mut self, event: Event<W>) -> Result<(), TransitionError> {
        let state = std::mem::replace(&mut self.state, State::Starting);
        let (state, done) = match state.next(event) {
            Ok(state) => (state, Ok(())),
            Err((state, error)) => (state, Err(error)),
        };
        self.state = state;
        done
    }

    /// Returns the running worker.
    pub fn worker_mut(&mut self) -> Option<&mut W> {
        match &mut self.state {
            State::Active { worker }
            | State::InUse { worker, .. }
            | State::Foreign { worker }
            | State::Stopping { worker, .. }
            | State::Killed { worker, .. }
            | State::Stuck { worker, .. } => Some(worker),
            State::Failed { worker, .. } => worker.as_mut(),
            State::Starting | State::Restarting { .. } => None,
        }
    }

    /// Takes the worker out.
    pub fn into_worker(self) -> Option<W> {
        self.state.into_worker()
    }
}

impl<W> State<W> {
    fn next(self, event: Event<W>) -> Result<Self, (Self, TransitionError)> {
        match (self, event) {
            (Self::Starting, Event::Launched(worker)) => Ok(Self::Active { worker }),
            (
                Self::Active { worker } | Self::InUse { worker, .. },
                Event::ClientReported(client),
            ) => Ok(Lifecycle::adopted(worker, client).state),
            (
                Self::Active { .. } | Self::InUse { .. } | Self::Foreign { .. },
                Event::WorkerDied { reason, restart_at },
            ) => Ok(match restart_at {
                Some(at) => Self::Restarting { at, reason },
                None => Self::Failed { reason, worker: None },
            }),
            // The reason of the failure is not the death that followed it.
            (Self::Failed { reason, worker: Some(_) }, Event::WorkerDied { .. }) => {
                Ok(Self::Failed { reason, worker: None })
            }
            (Self::Restarting { .. }, Event::RestartDue) => Ok(Self::Starting),
            (
                state @ (Self::Starting
                | Self::Active { .. }
                | Self::InUse { .. }
                | Self::Foreign { .. }
                | Self::Restarting { .. }
                | Self::Failed { .. }),
                Event::Failed { reason },
            ) => Ok(Self::Failed { reason, worker: state.into_worker() }),
            (
                Self::Active { worker }
                | Self::InUse { worker, .. }
                | Self::Foreign { worker }
                | Self::Failed { worker: Some(worker), .. },
                Event::Stop { kill_at },
            ) => Ok(Self::Stopping { worker, kill_at }),
            (Self::Stopping { worker, .. }, Event::KillDue { give_up_at }) => {
                Ok(Self::Killed { worker, give_up_at })
            }
            (Self::Killed { worker, .. }, Event::GiveUp { reason }) => {
                Ok(Self::Stuck { worker, reason })
            }
            (Self::Starting, Event::Postponed { at, reason }) => {
                Ok(Self::Restarting { at, reason })
            }
            (state, event) => {
                let error = TransitionError { state: state.name(), event: event.name() };
                Err((state, error))
            }
        }
    }

    fn into_worker(self) -> Option<W> {
        match self {
            Self::Active { worker }
            | Self::InUse { worker, .. }
            | Self::Foreign { worker }
            | Self::Stopping { worker, .. }
            | Self::Killed { worker, .. }
            | Self::Stuck { worker, .. } => Some(worker),
            Self::Failed { worker, .. } => worker,
            Self::Starting | Self::Restarting { .. } => None,
        }
    }

    /// Returns the running worker.
    pub fn worker(&self) -> Option<&W> {
        match self {
            Self::Active { worker }
            | Self::InUse { worker, .. }
            | Self::Foreign { worker }
            | Self::Stopping { worker, .. }
            | Self::Killed { worker, .. }
            | Self::Stuck { worker, .. } => Some(worker),
            Self::Failed { worker, .. } => worker.as_ref(),
            Self::Starting | Self::Restarting { .. } => None,
        }
    }

    /// Returns the attached client, as last reported.
    pub fn client(&self) -> Option<AttachedClient> {
        match self {
            Self::InUse { client, .. } => Some(*client),
            _ => None,
        }
    }

    /// Returns why the vGPU does not work, in one line.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Restarting { reason, .. }
            | Self::Failed { reason, .. }
            | Self::Stuck { reason, .. } => Some(reason),
            _ => None,
        }
    }

    /// Returns when the next timed event is due: [`Event::RestartDue`], [`Event::KillDue`] or
    /// [`Event::GiveUp`].
    pub fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Restarting { at, .. } => Some(*at),
            Self::Stopping { kill_at, .. } => Some(*kill_at),
            Self::Killed { give_up_at, .. } => Some(*give_up_at),
            _ => None,
        }
    }

    /// Returns the state as the control API reports it.
    pub fn reported(&self) -> VgpuState {
        match self {
            Self::Starting
            | Self::Active { .. }
            | Self::InUse { .. }
            | Self::Foreign { .. }
            | Self::Stopping { .. }
            | Self::Killed { .. } => VgpuState::Running,
            Self::Restarting { .. } => VgpuState::Restarting,
            Self::Failed { .. } | Self::Stuck { .. } => VgpuState::Failed,
        }
    }

    /// Returns true from the request to stop until the vGPU is removed.
    pub fn is_ending(&self) -> bool {
        matches!(self, Self::Stopping { .. } | Self::Killed { .. } | Self::Stuck { .. })
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Active { .. } => "active",
            Self::InUse { .. } => "in use",
            Self::Foreign { .. } => "of another version",
            Self::Restarting { .. } => "restarting",
            Self::Failed { .. } => "failed",
            Self::Stopping { .. } | Self::Killed { .. } => "stopping",
            Self::Stuck { .. } => "stuck",
        }
    }
}

impl<W> Event<W> {
    fn name(&self) -> &'static str {
        match self {
            Self::Launched(_) => "launched",
            Self::ClientReported(_) => "client reported",
            Self::WorkerDied { .. } => "worker died",
            Self::RestartDue => "restart due",
            Self::Failed { .. } => "failed",
            Self::Stop { .. } => "stop",
            Self::KillDue { .. } => "kill due",
            Self::GiveUp { .. } => "give up",
            Self::Postponed { .. } => "postponed",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const CLIENT: AttachedClient = AttachedClient { pid: 8, uid: 9 };

    fn stop() -> Event<u32> {
        Event::Stop { kill_at: Instant::now() }
    }

    fn died(restart_at: Option<Instant>) -> Event<u32> {
        Event::WorkerDied { reason: "killed".into(), restart_at }
    }

    fn fail() -> Event<u32> {
        Event::Failed { reason: "lost".into() }
    }

    #[test]
    fn state_follows_the_client() {
        let mut vgpu = Lifecycle::starting();
        vgpu.apply(Event::Launched(1)).unwrap();
        assert_eq!(vgpu.state(), &State::Active { worker: 1 });
        for client in [Some(CLIENT), None, Some(CLIENT)] {
            vgpu.apply(Event::ClientReported(client)).unwrap();
            assert_eq!(vgpu.state().client(), client);
        }
        vgpu.apply(stop()).unwrap();
        assert_eq!(vgpu.state().client(), None);
    }

    #[test]
    fn late_events_are_refused_while_stopping() {
        let mut vgpu = Lifecycle::adopted(1, Some(CLIENT));
        vgpu.apply(stop()).unwrap();
        let error = vgpu.apply(Event::ClientReported(Some(CLIENT))).unwrap_err();
        let text = "A vGPU that is stopping does not accept the event \"client reported\"";
        assert_eq!(error.to_string(), text);
        vgpu.apply(fail()).unwrap_err();
        vgpu.apply(stop()).unwrap_err();
        assert_eq!(vgpu.state().worker(), Some(&1));
        let give_up_at = Instant::now();
        vgpu.apply(Event::KillDue { give_up_at }).unwrap();
        assert_eq!(vgpu.state().deadline(), Some(give_up_at));
        vgpu.apply(Event::KillDue { give_up_at }).unwrap_err();
    }

    #[test]
    fn vgpu_whose_killed_worker_does_not_end_keeps_it_and_says_so() {
        let mut vgpu = Lifecycle::adopted(1, None);
        vgpu.apply(stop()).unwrap();
        vgpu.apply(Event::KillDue { give_up_at: Instant::now() }).unwrap();
        vgpu.apply(Event::GiveUp { reason: "stuck".into() }).unwrap();
        assert_eq!(vgpu.state(), &State::Stuck { worker: 1, reason: "stuck".into() });
        assert_eq!(vgpu.state().reported(), VgpuState::Failed);
        assert!(vgpu.state().is_ending() && vgpu.state().deadline().is_none());
        vgpu.apply(stop()).unwrap_err();
    }

    #[test]
    fn dead_worker_is_restarted_or_the_vgpu_fails() {
        let at = Instant::now();
        let mut vgpu = Lifecycle::adopted(1, None);
        vgpu.apply(died(Some(at))).unwrap();
        assert_eq!(vgpu.state().reported(), VgpuState::Restarting);
        assert_eq!(vgpu.state().deadline(), Some(at));
        vgpu.apply(Event::RestartDue).unwrap();
        vgpu.apply(Event::Launched(2)).unwrap();
        vgpu.apply(died(None)).unwrap();
        assert_eq!(vgpu.state(), &State::Failed { reason: "killed".into(), worker: None });
        vgpu.apply(stop()).unwrap_err();
    }

    #[test]
    fn worker_of_a_failed_vgpu_stays_until_it_exits() {
        let mut vgpu = Lifecycle::foreign(1);
        vgpu.apply(Event::ClientReported(None)).unwrap_err();
        vgpu.apply(fail()).unwrap();
        assert_eq!(vgpu.state(), &State::Failed { reason: "lost".into(), worker: Some(1) });
        vgpu.apply(died(Some(Instant::now()))).unwrap();
        assert_eq!(vgpu.state(), &State::Failed { reason: "lost".into(), worker: None });
        vgpu.apply(died(None)).unwrap_err();
    }

    fn event(worker: u32) -> impl Strategy<Value = Event<u32>> {
        let later = Instant::now() + Duration::from_secs(1);
        (0..11_u32).prop_map(move |kind| match kind {
            0 => Event::Launched(worker),
            1 => Event::ClientReported(Some(CLIENT)),
            2 => Event::ClientReported(None),
            3 => died(Some(later)),
            4 => died(None),
            5 => Event::RestartDue,
            6 => fail(),
            7 => Event::Stop { kill_at: later },
            8 => Event::GiveUp { reason: "stuck".into() },
            9 => Event::Postponed { at: later, reason: "none".into() },
            _ => Event::KillDue { give_up_at: later },
        })
    }

    proptest! {
        #[test]
        fn sequences_of_events_keep_the_invariants(
            events in (0..40_u32).prop_flat_map(|len| (0..len).map(|at| event(at + 1)).collect::<Vec<_>>())
        ) {
            let mut vgpu = Lifecycle::starting();
            for event in events {
                let before = vgpu.state().worker().copied();
                let was_stopping = vgpu.state().is_ending();
                let launched = match &event {
                    Event::Launched(worker) => Some(*worker),
                    _ => None,
                };
                let died = matches!(event, Event::WorkerDied { .. });
                let name = vgpu.state().name();
                let done = vgpu.apply(event);
                let state = vgpu.state();
                let worker = state.worker().copied();
                match done {
                    Err(error) => {
                        prop_assert_eq!(state.name(), name);
                        prop_assert_eq!(error.state, name);
                        prop_assert_eq!(worker, before);
                    }
                    // Only a launch brings a worker, and only its death takes it.
                    Ok(()) if launched.is_some() => prop_assert_eq!((before, worker), (None, launched)),
                    Ok(()) if died => prop_assert!(before.is_some() && worker.is_none()),
                    Ok(()) => prop_assert_eq!(worker, before),
                }
                // Stopping is final.
                let is_stopping = state.is_ending();
                prop_assert!(!was_stopping || is_stopping);
                let broken = state.reported() != VgpuState::Running;
                prop_assert_eq!(state.reason().is_some(), broken);
                prop_assert!(state.client().is_none() || worker.is_some());
            }
        }
    }
}
