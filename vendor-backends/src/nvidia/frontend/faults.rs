//! What programs learn of errors of their channels: notifiers, events, and the cause.
//!
//! A kernel's exception, such as an illegal instruction, starts the trap handler that libcuda has
//! installed, and raises an event. libcuda then reads the errors of the multiprocessors through its
//! debugger object, and resets the channel. The errors come from the driver. If it has none, they
//! are made from the channel's error: whether the memory management unit refused an access.

use std::collections::BTreeSet;

use cuda_socket::FileId;
use mdev_core::abi::notifier;
use mdev_core::gpu::{Client, ErrorStates, Pending, Programs};
use mdev_core::ids::ChannelId;
use nvidia_rm::abi::{self, Notification, Pair};
use nvidia_rm::numbers::status;
use zerocopy::{FromBytes, IntoBytes};

use super::NvidiaFrontEnd;
use super::call::Stop;
use super::control::{Control, WRONG_LENGTH};
use super::objects::{EventSource, Kind};

/// Groups with new errors, by their clients and handles.
type Failed = BTreeSet<(u32, u32)>;

impl NvidiaFrontEnd {
    /// Passes conditions of the GPU to programs: writes the notifiers of channels that have failed,
    /// and returns the files of the events that are due.
    pub(super) fn pass_gpu_event(&mut self, gpu: &mut dyn Client, pending: Pending) -> Vec<FileId> {
        let is_lost = pending.contains(Pending::DEVICE_LOST);
        let (mut failed, mut exceptions) = (Failed::new(), Vec::new());
        if is_lost || pending.contains(Pending::CHANNEL_ERROR) {
            failed = self.note_errors(gpu);
            exceptions = gpu.programs().map(Programs::take_exceptions).unwrap_or_default();
        }
        let is_due = |root: u32, parent: u32, notifier: u32| {
            let Some((channel, group)) = self.clients.channel_of_object(root, parent) else {
                return false;
            };
            let mut exceptions = exceptions.iter();
            is_lost
                || failed.contains(&(root, group))
                || exceptions.any(|raised| (raised.channel, raised.notifier) == (channel, notifier))
        };
        let due = self.clients.with_roots().filter_map(|(root, object)| match object.kind {
            Kind::Event { file, source: EventSource::Interrupts } => Some(file),
            Kind::Event { file, source: EventSource::Exceptions { notifier } } => {
                is_due(root, object.parent, notifier).then_some(file)
            }
            _ => None,
        });
        let due: BTreeSet<_> = due.collect();
        due.into_iter().collect()
    }

    /// Writes the notifiers of channels that have failed. Returns their groups.
    fn note_errors(&mut self, gpu: &mut dyn Client) -> Failed {
        let (mut groups, mut channels) = (Failed::new(), Vec::new());
        for (root, object) in self.clients.with_roots() {
            let Kind::Channel { handle, notifier, failed: false, ended: false, .. } = &object.kind
            else {
                continue;
            };
            let Ok(found) = gpu.query_channel(handle.id) else { continue };
            if found.error == 0 {
                continue;
            }
            channels.push(handle.id);
            groups.insert((root, object.parent));
            if let Some(store) = notifier {
                self.memories.write(*store, 0, notification(found.error).as_bytes());
            }
        }
        for channel in channels {
            self.clients.fail_channel(channel);
        }
        groups
    }

    /// Returns the channel with a handle, unless it has ended.
    fn live_channel(&self, control: &Control, handle: u32) -> Result<ChannelId, Stop> {
        match self.clients.object(control.file, control.root, handle)?.kind {
            Kind::Channel { handle, ended: false, .. } => Ok(handle.id),
            Kind::Channel { .. } => Err(Stop::Status(status::NOT_SUPPORTED)),
            _ => Err(Stop::Status(status::INVALID_OBJECT_HANDLE)),
        }
    }

    /// `NV83DE_CTRL_CMD_DEBUG_SET_EXCEPTION_MASK`.
    pub(super) fn watch_exceptions(
        &self,
        gpu: &mut dyn Client,
        control: &Control,
    ) -> Result<(), Stop> {
        let debugger = self.clients.object(control.file, control.root, control.object)?;
        let Kind::Debugger { channel } = debugger.kind else {
            return Err(Stop::Status(status::INVALID_OBJECT_HANDLE));
        };
        let channel = self.live_channel(control, channel)?;
        match gpu.programs() {
            Some(programs) => Ok(programs.watch_exceptions(channel, control.read())?),
            None => Ok(()),
        }
    }

    /// `NV83DE_CTRL_CMD_DEBUG_READ_ALL_SM_ERROR_STATES`.
    pub(super) fn error_states(
        &self,
        gpu: &mut dyn Client,
        control: &mut Control,
    ) -> Result<(), Stop> {
        let read = abi::ErrorStates::read_from_bytes(&control.params);
        let mut params = read.map_err(|_| WRONG_LENGTH)?;
        let channel = self.live_channel(control, params.channel)?;
        let (first, count) = (params.first, params.count);
        let found = gpu.require_programs().and_then(|gpu| gpu.error_states(channel, first, count));
        let found = match found {
            Ok(found) => found,
            // The kind, 0, is that of an address without a mapping.
            Err(_) if gpu.query_channel(channel)?.error == notifier::MMU_FAULT => {
                ErrorStates { states: Vec::new(), fault: Some(0) }
            }
            Err(_) => return Err(Stop::Status(status::NOT_SUPPORTED)),
        };
        let states = params.states.as_mut_bytes();
        states.fill(0);
        states.iter_mut().zip(found.states).for_each(|(to, from)| *to = from);
        params.old_fault_info = found.fault.unwrap_or(0);
        params.fault_valid = u32::from(found.fault.is_some());
        params.fault_info = params.old_fault_info;
        control.params.copy_from_slice(params.as_bytes());
        Ok(())
    }

    /// `NV83DE_CTRL_CMD_DEBUG_CLEAR_ALL_SM_ERROR_STATES`.
    pub(super) fn clear_error_states(
        &self,
        gpu: &mut dyn Client,
        control: &Control,
    ) -> Result<(), Stop> {
        let Pair { first: channel, second: count } = control.read();
        let channel = self.live_channel(control, channel)?;
        // A group without a debugger has nothing to clear.
        let _ = gpu.programs().map(|gpu| gpu.clear_error_states(channel, count));
        Ok(())
    }
}

/// Returns an `NvNotification` with the error of a channel.
fn notification(error: u32) -> Notification {
    Notification { info32: error, status: 0xffff, ..Default::default() }
}
