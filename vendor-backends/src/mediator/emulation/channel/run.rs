//! Running a channel: fetching GPFIFO entries and pushbuffers, and executing methods.

use std::sync::atomic::Ordering;

use mdev_core::abi::host::{FIRST_CLASS_METHOD, GP_ENTRY_BYTES, GpEntry};
use mdev_core::abi::{compute, copy, notifier, userd};
use mdev_core::gpu::EngineKind;
use zerocopy::IntoBytes;

use super::saved::is_bindable;
use super::{Active, Channel, Segment, WINDOW};
use crate::mediator::emulation::context::{Context, Progress};
use crate::mediator::emulation::counters::Counters;
use crate::mediator::emulation::host_class::Action;
use crate::mediator::emulation::pushbuffer::{Call, Decoded};
use crate::mediator::emulation::token_bucket::TokenBucket;
use crate::mediator::fault::Fault;

impl Channel {
    /// Runs until the ring is empty, the run limit is reached, or the channel has to wait.
    pub fn run(
        &mut self,
        cx: Context<'_>,
        counters: &Counters,
        quota: &mut Option<TokenBucket>,
    ) -> Result<Progress, Fault> {
        self.blocked_since = None;
        loop {
            if let Some(active) = &mut self.active {
                let progress = match active {
                    Active::Transfer(transfer) => {
                        self.engine_time.switch_to(EngineKind::Copy);
                        transfer.run(cx)?
                    }
                    Active::Grid(grid) => {
                        self.engine_time.switch_to(EngineKind::Compute);
                        grid.run(cx)?
                    }
                    Active::Acquire(acquire) => acquire.run(cx.space)?,
                };
                if progress != Progress::Done {
                    return Ok(progress);
                }
                self.active = None;
                // A device with its own engine takes long for any operation.
                if !cx.hardware.pace().on_cpu && cx.limit.reached() {
                    return Ok(Progress::More);
                }
            } else if self.window_next < self.window_len {
                let word = self.window[self.window_next];
                self.window_next += 1;
                match self.decoder.decode(word)? {
                    Decoded::Header => {}
                    Decoded::Call(call) => {
                        if self.call(cx, call)? {
                            return Ok(Progress::More);
                        }
                    }
                    Decoded::EndSegment => {
                        self.window_next = self.window_len;
                        self.segment = Some(Segment::default());
                    }
                }
                // A method may be as expensive as a fetch: check the limit every 64 words.
                if self.window_next.is_multiple_of(64) && cx.limit.reached() {
                    return Ok(Progress::More);
                }
            } else if let Some(segment) = &mut self.segment {
                if segment.left == 0 {
                    self.segment = None;
                    self.retire(counters);
                    continue;
                }
                let words = (segment.left as usize).min(WINDOW);
                cx.space.read(segment.va, self.window[..words].as_mut_bytes())?;
                segment.va += 4 * words as u64;
                segment.left -= words as u32;
                (self.window_len, self.window_next) = (words, 0);
            } else if !self.fetch(cx, counters, quota)? {
                return Ok(Progress::Done);
            } else if cx.limit.reached() {
                return Ok(Progress::More);
            }
        }
    }

    /// Fetches the next entry of the ring. Returns false if there is none, or the quota delays it.
    fn fetch(
        &mut self,
        cx: Context<'_>,
        counters: &Counters,
        quota: &mut Option<TokenBucket>,
    ) -> Result<bool, Fault> {
        let put = self.put();
        if put == self.get {
            return Ok(false);
        }
        if put >= self.spec.gpfifo_entries {
            return Err(Fault::host(put));
        }
        if let Some(bucket) = quota {
            if !bucket.take() {
                self.throttled = true;
                return Ok(false);
            }
            Counters::add(&counters.throttled, std::mem::take(&mut self.throttled).into());
        }
        let at = self.spec.gpfifo.0.wrapping_add(u64::from(self.get) * GP_ENTRY_BYTES);
        let raw = cx.space.load_u64(at)?;
        match GpEntry::decode(raw) {
            GpEntry::Segment { va, dwords } => self.segment = Some(Segment { va, left: dwords }),
            GpEntry::Control { opcode: 0 } => self.retire(counters),
            GpEntry::Control { .. } => return Err(Fault::host(raw)),
        }
        Ok(true)
    }

    /// Retires an entry: advances GP_GET.
    fn retire(&mut self, counters: &Counters) {
        self.get = (self.get + 1) % self.spec.gpfifo_entries;
        if let Some(userd) = &self.userd {
            userd.store(userd::GP_GET, self.get);
        }
        counters.submissions.fetch_add(1, Ordering::Relaxed);
    }

    /// Executes a method. Returns true if the channel yields the engine.
    fn call(&mut self, cx: Context<'_>, call: Call) -> Result<bool, Fault> {
        let Call { subchannel, method, data } = call;
        let bound = &mut self.bound[usize::from(subchannel)];
        if method < FIRST_CLASS_METHOD {
            match self.host.method(cx, method, data)? {
                Action::None => {}
                Action::Yield => return Ok(true),
                Action::Acquire(acquire) => self.active = Some(Active::Acquire(acquire)),
                Action::Bind(class) => {
                    if class == 0 || !is_bindable(&self.spec, subchannel, class) {
                        return Err(Fault::host(class));
                    }
                    *bound = class;
                }
            }
            return Ok(false);
        }
        self.launches += 1;
        self.active = match *bound {
            copy::CLASS => self.copy.method(method, data)?.map(Box::new).map(Active::Transfer),
            compute::CLASS => {
                self.compute.method(cx, method, data)?.map(Box::new).map(Active::Grid)
            }
            _ => return Err(Fault { code: notifier::PBDMA_ERROR, info: method.into() }),
        };
        Ok(false)
    }
}
