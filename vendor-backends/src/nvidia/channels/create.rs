//! Creation of channels and of the groups that contain them.

use std::sync::Arc;
use std::time::Instant;

use mdev_core::abi::{compute, copy, host};
use mdev_core::gpu::{ChannelHandle, ChannelSpec, EngineKind, GpuError};
use mdev_core::ids::{ChannelId, Token};
use zerocopy::IntoBytes;

use super::channel::{Channel, Notifier};
use super::{Channels, Group, Running};
use crate::nvidia::ctxsw_log;
use crate::nvidia::memory::MemoryLocation;
use crate::nvidia::rm_client::Object;
use crate::nvidia::sys::abi;
use crate::nvidia::sys::numbers::{class, control, flag};

impl Channels {
    /// Creates a channel and schedules it. The caller has checked `spec`.
    pub fn create(
        &mut self,
        spec: &ChannelSpec,
        userd: MemoryLocation,
    ) -> Result<ChannelHandle, GpuError> {
        if self.count() >= self.limit {
            return Err(GpuError::Limit("channels"));
        }
        self.note_errors();
        let id = ChannelId(self.next_id);
        let next_id = self.next_id.checked_add(1).ok_or(GpuError::Limit("channels"))?;
        let notifier = self.free_notifiers.pop().ok_or(GpuError::Limit("channels"))?;
        notifier.clear();
        let channel = match self.new_channel(spec, userd, notifier.clone()) {
            Ok(channel) => channel,
            Err(error) => {
                self.free_notifiers.push(notifier);
                self.drop_empty_groups();
                return Err(error);
            }
        };
        let (token, number) = (channel.token, channel.group);
        self.by_id.insert(id, channel);
        self.next_id = next_id;
        // Behind a closed gate the channel is disabled, and its group is scheduled when the gate
        // opens: the channel must not run for a moment.
        let started = self.apply_gate().and_then(|()| self.schedule_or_defer(number));
        if let Err(error) = started {
            self.destroy(id, Running::default())?;
            return Err(error);
        }
        Ok(ChannelHandle { id, token })
    }

    fn new_channel(
        &mut self,
        spec: &ChannelSpec,
        userd: MemoryLocation,
        notifier: Arc<Notifier>,
    ) -> Result<Channel, GpuError> {
        let (group, number) = self.group_of_engine(spec.engine)?;
        let objects = self.alloc_channel(spec, &group, &userd, &notifier)?;
        // The driver sets a preemption mode only in a group that has a compute class.
        let first = !self.by_id.values().any(|channel| channel.group == number);
        if spec.engine == EngineKind::Compute && self.preempt_blocks && first {
            self.preempt_at_blocks(&group)?;
        }
        let mut token = u32::MAX;
        objects[0].control(control::TOKEN, &mut token)?;
        let registration = match (&self.poller, &userd.mapping) {
            (None, _) => None,
            (Some(poller), Some(mapping)) => {
                Some(poller.add(Token(token), Arc::clone(mapping), userd.offset))
            }
            (Some(_), None) => {
                return Err(GpuError::Unsupported("a USERD outside of guest memory"));
            }
        };
        Ok(Channel {
            registration,
            objects,
            engine: spec.engine,
            group: number,
            token: Token(token),
            vector: spec.vector,
            userd: Some(userd),
            notifier,
            error: 0,
            error_info: 0,
            disabled: false,
        })
    }

    /// Allocates a channel and the classes of its engine. The channel is the first object.
    fn alloc_channel(
        &self,
        spec: &ChannelSpec,
        group: &Arc<Object>,
        userd: &MemoryLocation,
        notifier: &Notifier,
    ) -> Result<Vec<Arc<Object>>, GpuError> {
        let rm_client = &self.device.rm_client;
        let engine = self.engine_number(spec.engine);
        let mut params = abi::ChannelParams {
            error: notifier.memory.handle(),
            gpfifo: spec.gpfifo.0,
            gpfifo_entries: spec.gpfifo_entries,
            flags: flag::CHANNEL,
            engine,
            ..Default::default()
        };
        params.userd_memory[0] = userd.object.handle();
        params.userd_offset[0] = userd.offset;
        let bytes = rm_client.layout().channel;
        let params = &mut params.as_mut_bytes()[..bytes];
        let channel = rm_client.alloc(Some(group), host::CLASS, Some(params), "channel")?;
        let class = |class: u32, params: Option<&mut [u8]>, name: &str| {
            rm_client.alloc(Some(&channel), class, params, name)
        };
        let mut objects = vec![channel.clone()];
        match spec.engine {
            EngineKind::Compute => {
                objects.push(class(compute::CLASS, None, "compute class")?);
                objects.push(class(copy::CLASS, None, "copy class")?);
            }
            EngineKind::Copy => {
                let mut params = abi::CopyParams { version: 1, engine };
                objects.push(class(copy::CLASS, Some(params.as_mut_bytes()), "copy class")?);
            }
        }
        Ok(objects)
    }

    /// Lets the GPU preempt the group's kernels at thread-block boundaries.
    fn preempt_at_blocks(&self, group: &Object) -> Result<(), GpuError> {
        let mut mode = abi::PreemptionMode {
            flags: 1,
            object: group.handle(),
            compute: 1,
            ..Default::default()
        };
        Ok(self.device.subdevice.control(control::PREEMPTION_MODE, &mut mode)?)
    }

    /// Returns the group of an engine and its number. Creates the group if there is none.
    fn group_of_engine(&mut self, engine: EngineKind) -> Result<(Arc<Object>, u32), GpuError> {
        if let Some(group) = self.groups.iter().find(|group| group.engine == engine) {
            return Ok((group.object.clone(), group.number));
        }
        let now = Instant::now();
        if self.backoff[engine as usize].must_wait(now) {
            return Err(GpuError::Limit("channels made again after faults; wait"));
        }
        if self.teardown_backoff[engine as usize].must_wait(now) {
            return Err(GpuError::Limit("channels made again after working ones; wait"));
        }
        let mut params = abi::GroupParams {
            va_space: self.space.space.handle(),
            engine: self.engine_number(engine),
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        let device = &self.device;
        let object =
            device.rm_client.alloc(Some(&device.device), class::GROUP, params, "channel group")?;
        // A new group is about to get work.
        self.idle[engine as usize] = false;
        self.last_group_number += 1;
        let number = self.last_group_number;
        let created_ns = ctxsw_log::clock_ns(&self.doorbell).unwrap_or_default();
        let group =
            Group { object: object.clone(), engine, number, created_ns, must_schedule: false };
        self.apply_timeslice(&group)?;
        self.groups.push(group);
        Ok((object, number))
    }
}
