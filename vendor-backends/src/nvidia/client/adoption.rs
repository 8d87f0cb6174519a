//! Recording a vGPU's state, and adopting the vGPU of an earlier process.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ipc::seqpacket::SeqPacket;
use mdev_core::abi::control::VECTORS;
use mdev_core::gpu::{Aperture, Apertures, Exception, GpuError, Pending};
use mdev_core::ids::SpaceId;
use mdev_core::units::PAGE_SIZE;
use nvidia_rm::rm::Rm;
use nvidia_rm::rm_client::AdoptedClient;
use nvidia_rm::version::Layout;

use super::open::DOORBELL_BYTES;
use super::{NvidiaClient, ThreadInputs};
use crate::nvidia::activity::{Activity, LiveAccounting};
use crate::nvidia::adoption::DAMAGED;
use crate::nvidia::adoption::descriptors::{self, Descriptors};
use crate::nvidia::adoption::journal::{Journal, Live};
use crate::nvidia::adoption::state::{ClientState, FixedObjects, ProgramsState};
use crate::nvidia::channels::{self, Channels, LiveChannels, Recorded};
use crate::nvidia::device::Device;
use crate::nvidia::doorbell_poller::DoorbellPoller;
use crate::nvidia::error_notifier::Notifier;
use crate::nvidia::memory::Memory;
use crate::nvidia::observers::ctxsw_log::CtxswLog;
use crate::nvidia::observers::switch_probe::SwitchProbe;
use crate::nvidia::privilege;
use crate::nvidia::vgpu_state::VgpuState;
use crate::nvidia::wire::MAX_CHANNELS;

/// Limit of objects that a process makes for one message of its VM. Most are for guest memory.
const MAX_UNRECORDED: u32 = 65_536;

/// Number of the state in force, and whether there is a newer one.
///
/// A state comes into force when the caller has recorded its number ([`Self::confirm`]). Until then
/// the one before stays in its slot.
#[derive(Debug, Default)]
pub(super) struct Position {
    /// Number of the state in force, with the number of changes in it.
    recorded: (u64, Option<u64>),
    /// Number of requests that may have changed the state.
    changes: u64,
    /// Number of changes in the state that is written and not in force yet.
    written: Cell<Option<u64>>,
}

impl Position {
    /// Continues after the state with a number.
    fn after(number: u64) -> Self {
        Self { recorded: (number, None), ..Self::default() }
    }

    /// Notes that the state may change.
    pub(super) fn touch(&mut self) {
        self.changes += 1;
    }

    /// Returns the number of the current state. `write` writes it if it is new.
    fn number(&self, write: impl FnOnce(u64) -> bool) -> Option<u64> {
        let (number, changes) = self.recorded;
        if changes == Some(self.changes) {
            return Some(number);
        }
        if self.written.get() != Some(self.changes) {
            self.written.set(None);
            if !write(number + 1) {
                return None;
            }
            self.written.set(Some(self.changes));
        }
        Some(number + 1)
    }

    /// Notes that the number that was returned last is recorded.
    pub(super) fn confirm(&mut self) {
        if let Some(changes) = self.written.take() {
            self.recorded = (self.recorded.0 + 1, Some(changes));
        }
    }
}

impl NvidiaClient {
    /// Adopts the vGPU of an earlier process from the state with the number `position`.
    /// `connection` is that of the manager which has started the vGPU.
    pub fn adopt(
        rm: Arc<dyn Rm>,
        connection: OwnedFd,
        position: u64,
        mut files: Descriptors<'_>,
    ) -> Result<Self, GpuError> {
        let journal = Journal::open(files.take(descriptors::JOURNAL)?.as_fd())?.ok_or(DAMAGED)?;
        let (state, programs): (ClientState, ProgramsState) =
            journal.state(position).ok_or(DAMAGED)?;
        state.check(&programs)?;
        privilege::refuse_sys_admin(state.grant.options.allow_sys_admin)?;
        let layout = Layout::of(&state.driver).map_err(|_| DAMAGED)?;
        let journal = Arc::new(journal);
        let device = adopt_device(rm, layout, &state, &journal, &mut files)?;
        let FixedObjects { usermode, events, .. } = &state.fixed;
        let usermode = device.rm_client.adopt_object(Some(&device.subdevice), *usermode);
        let events =
            events.map(|handle| device.rm_client.adopt_object(Some(&device.subdevice), handle));
        let (of_memory, spec) = (&state.memory, &state.grant.spec);
        let mut memory = Memory::adopt(device.clone(), of_memory, &programs, spec, &mut files)?;
        let space = memory.space(SpaceId::DEFAULT)?.space().clone();
        let exception_event = Arc::new(files.take(descriptors::EXCEPTION_EVENT)?);
        let accounting: LiveAccounting = journal.live(Live::Accounting).unwrap_or_default();
        let guest_doorbell = files.take(descriptors::GUEST_DOORBELL)?;
        let shared = adopt_state(
            &device,
            (&state, &programs),
            &accounting,
            journal,
            &exception_event,
            (&mut memory, &mut files),
        )?;
        if let Some(poller) = &shared.poller {
            poller.set_program_page(descriptors::map(&guest_doorbell, DOORBELL_BYTES, true)?);
        }
        let manager = files.find(descriptors::MANAGER).unwrap_or(connection);
        let event = |vector| Some((vector, files.find(descriptors::vector(vector))?));
        let vectors = (0..VECTORS).filter_map(event).collect();
        let thread_inputs = ThreadInputs {
            manager: SeqPacket::from(manager),
            fault_event: files.take(descriptors::FAULT_EVENT)?,
            interrupt_event: files.take(descriptors::INTERRUPT_EVENT)?,
            exception_event,
            vectors,
            closing: accounting.closing,
        };
        let client = Self {
            apertures: Apertures {
                vram: None,
                doorbell: Some(Aperture { fd: guest_doorbell, offset: 0, len: DOORBELL_BYTES }),
                framebuffer: None,
            },
            grant: state.grant,
            driver: state.driver,
            process: state.process,
            memory,
            state: Arc::new(shared),
            threads: Vec::new(),
            thread_inputs: Some(thread_inputs),
            position: Position::after(position),
            took_exceptions: false,
            copier: None,
            fixed: state.fixed,
            _events: events,
            _usermode: usermode,
            _space: space,
            device,
        };
        client.publish_imported_bytes();
        client.device.rm_client.own();
        client.state.channels().free_left_over();
        Ok(client)
    }

    /// Returns the number of the current state, which is written if it is new. `None` if no other
    /// process can continue.
    pub(super) fn recorded_position(&self) -> Option<u64> {
        // Another process cannot open an aperture of new video memory.
        if self.grant.options.direct_vram {
            return None;
        }
        self.position.number(|number| {
            let mut programs = ProgramsState::default();
            let Some(state) = self.client_state(&mut programs) else { return false };
            self.state.journal.write_state(number, &(state, programs))
        })
    }

    fn client_state(&self, programs: &mut ProgramsState) -> Option<ClientState> {
        let rm_client = &self.device.rm_client;
        let channels = self.state.channels().state(programs)?;
        Some(ClientState {
            grant: self.grant.clone(),
            driver: self.driver.clone(),
            process: self.process,
            root: rm_client.root(),
            next_handle: rm_client.next_handle(),
            fixed: self.fixed.clone(),
            memory: self.memory.state(programs)?,
            channels,
        })
    }
}

/// Takes up the driver's client of an earlier process, and frees what that had not recorded.
fn adopt_device(
    rm: Arc<dyn Rm>,
    layout: Layout,
    state: &ClientState,
    journal: &Arc<Journal>,
    files: &mut Descriptors<'_>,
) -> Result<Arc<Device>, GpuError> {
    let client = AdoptedClient {
        control: files.take(descriptors::CONTROL)?,
        gpu: files.take(descriptors::GPU)?,
        minor: state.grant.card.minor,
        root: state.root,
        next_handle: state.next_handle,
    };
    let fixed = [state.fixed.device, state.fixed.subdevice];
    let device = Arc::new(Device::adopt(rm, layout, client, fixed));
    let unrecorded = journal.last_handle();
    if unrecorded.saturating_sub(state.next_handle) > MAX_UNRECORDED {
        return Err(DAMAGED);
    }
    device.rm_client.record_handles(journal.clone());
    device.rm_client.free_unrecorded(unrecorded);
    Ok(device)
}

/// Adopts the state that the threads share.
fn adopt_state(
    device: &Arc<Device>,
    (state, programs): (&ClientState, &ProgramsState),
    accounting: &LiveAccounting,
    journal: Arc<Journal>,
    exception_event: &Arc<OwnedFd>,
    (memory, files): (&mut Memory, &mut Descriptors<'_>),
) -> Result<VgpuState, GpuError> {
    let options = state.grant.options;
    let doorbell = descriptors::map(&files.take(descriptors::DOORBELL)?, PAGE_SIZE, true)?;
    let (live, reported): (LiveChannels, Vec<Exception>) =
        journal.live(Live::Channels).ok_or(DAMAGED)?;
    if live.evicted {
        return Err(GpuError::Lost("the manager has evicted the vGPU".into()));
    }
    let adopt = |objects| {
        let clock = doorbell.clone();
        CtxswLog::adopt(device, clock, objects, state.process, accounting.log, files)
    };
    let mut ctxsw_log = state.fixed.log.as_ref().map(adopt).transpose()?;
    if let Some(log) = &mut ctxsw_log
        && accounting.was_busy
        && let Some(now_ns) = log.now_ns()
    {
        // Its work has gone on since then.
        log.engine_time.count_until(0, now_ns);
    }
    let adopt = |objects| SwitchProbe::adopt(device, doorbell.clone(), objects, files);
    let switch_probe = state.fixed.probe.as_ref().map(adopt).transpose()?;
    let poller = (!options.direct_doorbell).then(|| DoorbellPoller::new(doorbell.clone()));
    if let Some(poller) = &poller {
        let [polled, wakeups] = accounting.rings;
        poller.polled.store(polled, Ordering::Relaxed);
        poller.wakeups.store(wakeups, Ordering::Relaxed);
    }
    let notifiers = (0_u32..).zip(&state.fixed.notifiers).map(|(index, handle)| {
        Notifier::adopt(device, *handle, descriptors::notifier(index), files).map(Arc::new)
    });
    let notifiers: Vec<_> = notifiers.collect::<Result<_, _>>()?;
    let channel_options = channels::Options {
        copy_engines: state.fixed.copy_engines.clone(),
        preempt_blocks: options.preempt_blocks,
        max_channels: state.grant.spec.max_channels.min(MAX_CHANNELS),
        exception_event: exception_event.clone(),
        journal: journal.clone(),
    };
    let recorded = Recorded {
        state: &state.channels,
        programs,
        live: &live,
        reported: &reported,
        used: &accounting.used,
    };
    let channels = Channels::adopt(
        device.clone(),
        doorbell,
        poller.clone(),
        channel_options,
        &notifiers,
        recorded,
        memory,
    )?;
    let shared = VgpuState::new(channels, poller, ctxsw_log, switch_probe, journal)?;
    *shared.activity() = Activity::adopted(accounting);
    shared.record_accounting(accounting.closing);
    // What the process before had taken, and not passed on, is pending again.
    shared.signals.raise(Pending::NONSTALL | Pending::CHANNEL_ERROR);
    Ok(shared)
}
