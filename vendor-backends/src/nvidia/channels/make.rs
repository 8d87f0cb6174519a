//! How a channel comes to be, and the group that it is in.

use std::sync::Arc;
use std::time::Instant;

use mdev_core::abi::mailbox::{MAX_GPFIFO_ENTRIES, VA_END, VA_START};
use mdev_core::abi::{compute, control::VECTORS, copy, host};
use mdev_core::gpu::{ChannelHandle, ChannelSpec, EngineKind, GpuError};
use mdev_core::ids::{ChannelId, GpuVa, Token};
use mdev_core::units::is_aligned;
use zerocopy::IntoBytes;

use super::channel::{Channel, Notifier};
use super::{Channels, Group, schedule};
use crate::nvidia::memory::Place;
use crate::nvidia::session::Object;
use crate::nvidia::sys::abi;
use crate::nvidia::sys::numbers::{class, control, flag};
use crate::nvidia::trace;

impl Channels {
    fn check(&self, spec: &ChannelSpec) -> Result<(), GpuError> {
        let GpuVa(ring) = spec.gpfifo;
        let entries = spec.gpfifo_entries;
        if !entries.is_power_of_two() || !(2..=MAX_GPFIFO_ENTRIES).contains(&entries) {
            return Err(GpuError::Invalid("a GPFIFO has 2 to 65536 entries, a power of two"));
        }
        if !is_aligned(ring, host::GP_ENTRY_BYTES) {
            return Err(GpuError::Invalid("a GPFIFO is 8-byte aligned"));
        }
        if spec.vector >= VECTORS {
            return Err(GpuError::Invalid("no such interrupt vector"));
        }
        let end = ring.checked_add(u64::from(entries) * host::GP_ENTRY_BYTES);
        if ring < VA_START || end.is_none_or(|end| end > VA_END) {
            return Err(GpuError::OutOfRange("GPFIFO"));
        }
        if self.count() >= self.most {
            return Err(GpuError::Limit("channels"));
        }
        Ok(())
    }

    /// Makes a channel and schedules it.
    pub fn create(&mut self, spec: &ChannelSpec, userd: Place) -> Result<ChannelHandle, GpuError> {
        self.check(spec)?;
        self.note_errors();
        let id = ChannelId(self.next);
        let next = self.next.checked_add(1).ok_or(GpuError::Limit("channels"))?;
        let notifier = self.notifiers.pop().ok_or(GpuError::Limit("channels"))?;
        notifier.clear();
        let made = self.make(spec, userd, notifier.clone());
        let channel = match made {
            Ok(channel) => channel,
            Err(error) => {
                self.notifiers.push(notifier);
                self.drop_empty_groups();
                return Err(error);
            }
        };
        let token = channel.token;
        self.all.insert(id, channel);
        self.next = next;
        if let Err(error) = self.settle() {
            self.destroy(id, [false; 2])?;
            return Err(error);
        }
        Ok(ChannelHandle { id, token })
    }

    fn make(
        &mut self,
        spec: &ChannelSpec,
        userd: Place,
        notifier: Arc<Notifier>,
    ) -> Result<Channel, GpuError> {
        let (group, number) = self.group(spec.engine)?;
        let session = &self.device.session;
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
        let bytes = session.layout().channel;
        let params = &mut params.as_mut_bytes()[..bytes];
        let object = session.alloc(Some(&group), host::CLASS, Some(params), "channel")?;
        let mut objects = vec![object.clone()];
        match spec.engine {
            EngineKind::Compute => {
                objects.push(session.alloc(
                    Some(&object),
                    compute::CLASS,
                    None,
                    "compute class",
                )?);
                objects.push(session.alloc(Some(&object), copy::CLASS, None, "copy class")?);
            }
            EngineKind::Copy => {
                let mut which = abi::CopyParams { version: 1, engine };
                let which = Some(which.as_mut_bytes());
                objects.push(session.alloc(Some(&object), copy::CLASS, which, "copy class")?);
            }
        }
        // The group has something to preempt only once it has a class that computes.
        let first = !self.all.values().any(|channel| channel.group == number);
        if spec.engine == EngineKind::Compute && self.preempt_blocks && first {
            let mut mode = abi::PreemptionMode {
                flags: 1,
                object: group.handle(),
                compute: 1,
                ..Default::default()
            };
            self.device.subdevice.control(control::PREEMPTION_MODE, &mut mode)?;
        }
        let mut token = u32::MAX;
        object.control(control::TOKEN, &mut token)?;
        let watched = match (&self.bells, &userd.view) {
            (None, _) => None,
            (Some(bells), Some(view)) => {
                Some(bells.add(Token(token), Arc::clone(view), userd.offset))
            }
            (Some(_), None) => {
                return Err(GpuError::Unsupported("a USERD outside of guest memory"));
            }
        };
        schedule(&self.device, &group)?;
        Ok(Channel {
            watched,
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

    /// The group of an engine, a new one where there is none.
    fn group(&mut self, kind: EngineKind) -> Result<(Arc<Object>, u32), GpuError> {
        if let Some(group) = self.groups.iter().find(|group| group.engine == kind) {
            return Ok((group.object.clone(), group.number));
        }
        if self.backoff[kind as usize].wait(Instant::now()) {
            return Err(GpuError::Limit("channels made again after faults; wait"));
        }
        let mut params = abi::GroupParams {
            va_space: self.space.space.handle(),
            engine: self.engine_number(kind),
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        let device = &self.device;
        let object =
            device.session.alloc(Some(&device.device), class::GROUP, params, "channel group")?;
        // It is made to be used.
        self.idle[kind as usize] = false;
        self.group_number += 1;
        let number = self.group_number;
        let made_ns = trace::clock_ns(&self.doorbell).unwrap_or_default();
        let group = Group { object: object.clone(), engine: kind, number, made_ns };
        self.reslice(&group)?;
        self.groups.push(group);
        Ok((object, number))
    }
}
