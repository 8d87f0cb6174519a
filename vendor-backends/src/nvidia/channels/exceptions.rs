//! Exceptions of kernels: illegal instructions, misaligned addresses, and others.
//!
//! libcuda installs a trap handler, and gets to know exceptions through a debugger object and
//! events of the compute class. Here both are the worker's. All channels of a group share the
//! debugger of one of them.

use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::sync::Arc;

use mdev_core::gpu::{EngineKind, ErrorStates, Exception, GpuError};
use mdev_core::ids::ChannelId;
use nvidia_rm::abi;
use nvidia_rm::numbers::{class, control, event};
use nvidia_rm::rm::RmError;
use nvidia_rm::rm_client::{EXCEPTION_FILE, Object, RmClient};
use zerocopy::IntoBytes;

use super::Channels;
use super::channel::Channel;
use crate::nvidia::device::Device;

/// Exceptions that programs may watch (`NV83DE_CTRL_DEBUG_SET_EXCEPTION_MASK_*`): traps,
/// interrupts, and both of preemption. All others end the group, which the driver does by itself.
const WATCHABLE: u32 = 0x3a;

/// Notifiers of the compute class that are about exceptions.
const NOTIFIERS: RangeInclusive<u32> = 1..=4;

/// Maximum number of multiprocessors (`NV83DE_CTRL_DEBUG_MAX_SMS_PER_CALL`).
const MAX_STATES: u32 = 100;

/// Limit of the numbers of multiprocessors.
const MAX_NUMBER: u32 = 1024;

/// Watch of a group's exceptions.
#[derive(Debug)]
pub(super) struct ExceptionWatch {
    // Freed in this order.
    events: Vec<(Arc<Object>, u32)>,
    debugger: Arc<Object>,
    _compute: Arc<Object>,
}

impl ExceptionWatch {
    /// Starts to watch the group of a channel with the object `compute`.
    fn new(
        device: &Arc<Object>,
        rm_client: &Arc<RmClient>,
        compute: &Arc<Object>,
    ) -> Result<Self, RmError> {
        let mut params =
            abi::DebuggerParams { debugger: 0, client: rm_client.root(), object: compute.handle() };
        let params = Some(params.as_mut_bytes());
        let debugger = rm_client.alloc(Some(device), class::DEBUGGER, params, "debugger")?;
        let events = NOTIFIERS.map(|notifier| {
            let index = notifier | event::SUBDEVICE_SPECIFIC;
            Ok((rm_client.alloc_event(compute, index, EXCEPTION_FILE)?, notifier))
        });
        Ok(Self {
            events: events.collect::<Result<_, RmError>>()?,
            debugger,
            _compute: compute.clone(),
        })
    }

    /// Adopts the watch of an earlier process.
    pub(super) fn adopt(
        device: &Device,
        debugger: u32,
        events: &[(u32, u32)],
        compute: &Arc<Object>,
    ) -> Self {
        let Device { device, rm_client, .. } = device;
        let adopt = |(handle, notifier): &(u32, u32)| {
            (rm_client.adopt_object(Some(compute), *handle), *notifier)
        };
        Self {
            events: events.iter().map(adopt).collect(),
            debugger: rm_client.adopt_object(Some(device), debugger),
            _compute: compute.clone(),
        }
    }

    /// Returns the handles of the debugger and of the events, with their notifiers.
    pub(super) fn state(&self) -> (u32, Vec<(u32, u32)>) {
        let events = self.events.iter().map(|(event, notifier)| (event.handle(), *notifier));
        (self.debugger.handle(), events.collect())
    }
}

impl Channels {
    /// Sets which exceptions of a channel's group are watched.
    pub fn watch_exceptions(&mut self, id: ChannelId, mask: u32) -> Result<(), GpuError> {
        let channel = self.by_id.get_mut(&id).ok_or(GpuError::NotFound("channel"))?;
        let watch = match &mut channel.exceptions {
            Some(watch) => watch,
            none => {
                let compute =
                    channel.objects.get(1).filter(|_| channel.engine == EngineKind::Compute);
                let compute = compute.ok_or(GpuError::Invalid("exceptions without kernels"))?;
                let Device { device, rm_client, .. } = &*self.device;
                none.insert(ExceptionWatch::new(device, rm_client, compute)?)
            }
        };
        let mut mask = mask & WATCHABLE;
        Ok(watch.debugger.control(control::EXCEPTION_MASK, &mut mask)?)
    }

    /// Notes the exceptions that the driver has reported. Returns whether there are any.
    pub fn note_exceptions(&mut self) -> bool {
        let before = self.reported.len();
        while let Ok(event) = self.device.rm_client.take_event(self.exception_event.as_fd()) {
            let of = |(id, channel): (&ChannelId, &Channel)| {
                let mut events = channel.exceptions.iter().flat_map(|watch| &watch.events);
                let found = events.find(|(object, _)| object.handle() == event.object);
                found.map(|(_, notifier)| Exception { channel: *id, notifier: *notifier })
            };
            let exception = self.by_id.iter().find_map(of);
            let new = exception.filter(|exception| !self.reported.contains(exception));
            self.reported.extend(new);
        }
        if self.reported.len() > before {
            self.record_live(false);
        }
        !self.reported.is_empty()
    }

    /// Takes the exceptions that were noted. They are recorded until [`Self::forget_taken`].
    pub fn take_exceptions(&mut self) -> Vec<Exception> {
        let reported = std::mem::take(&mut self.reported);
        self.taken.extend(&reported);
        reported
    }

    /// Forgets the exceptions that were taken, which the caller has recorded.
    pub fn forget_taken(&mut self) {
        if !self.taken.is_empty() {
            self.taken.clear();
            self.record_live(false);
        }
    }

    fn debugger(&self, id: ChannelId) -> Result<(&Arc<Object>, u32), GpuError> {
        let channel = self.by_id.get(&id).ok_or(GpuError::NotFound("channel"))?;
        let object = channel.object().ok_or(GpuError::NotFound("channel"))?;
        let mut of_group = self.by_id.values().filter(|other| other.group == channel.group);
        let watch = of_group.find_map(|other| other.exceptions.as_ref());
        let watch = watch.ok_or(GpuError::Unsupported("exceptions that are not watched"))?;
        Ok((&watch.debugger, object.handle()))
    }

    /// Reads the errors of multiprocessors.
    pub fn error_states(
        &self,
        id: ChannelId,
        first: u32,
        count: u32,
    ) -> Result<ErrorStates, GpuError> {
        if count > MAX_STATES || first > MAX_NUMBER {
            return Err(GpuError::OutOfRange("number of a multiprocessor"));
        }
        let (debugger, channel) = self.debugger(id)?;
        let mut params = abi::ErrorStates { channel, count, first, ..Default::default() };
        debugger.control(control::ERROR_STATES, &mut params)?;
        // The driver may have kept the error of another vGPU, whose addresses stay unknown.
        for state in &mut params.states {
            (state.warp_pc, state.warp_pc64, state.address) = (0, 0, 0);
        }
        let states = &params.states[..count as usize];
        let fault = (params.fault_valid & 0xff != 0).then_some(params.fault_info);
        Ok(ErrorStates { states: states.as_bytes().to_vec(), fault })
    }

    /// Clears the errors of multiprocessors.
    pub fn clear_error_states(&self, id: ChannelId, count: u32) -> Result<(), GpuError> {
        if count > MAX_NUMBER {
            return Err(GpuError::OutOfRange("number of multiprocessors"));
        }
        let (debugger, channel) = self.debugger(id)?;
        let mut params = abi::Pair { first: channel, second: count };
        Ok(debugger.control(control::CLEAR_ERROR_STATES, &mut params)?)
    }
}
