//! Engines of the fake GPU: they execute rings with a USERD in guest memory.
//!
//! The host class has semaphores. The copy class copies lines and releases semaphores. A kernel
//! adds one to the word whose address is at the start of its launch descriptor. As on the real GPU,
//! classes have to be bound and memory windows set before, and entries are fetched ahead of their
//! execution.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::numbers::{class, engine};
use mdev_core::abi::compute::{
    self, SEND_PCAS_A, SEND_SIGNALING_PCAS2_B, SET_SHADER_LOCAL_MEMORY_WINDOW_A,
    SET_SHADER_SHARED_MEMORY_WINDOW_A,
};
use mdev_core::abi::copy::{
    self, LAUNCH_DMA, LINE_LENGTH_IN, OFFSET_IN_LOWER, OFFSET_IN_UPPER, OFFSET_OUT_LOWER,
    OFFSET_OUT_UPPER, SET_SEMAPHORE_A, SET_SEMAPHORE_B, SET_SEMAPHORE_PAYLOAD, launch,
};
use mdev_core::abi::host::{
    self, GP_ENTRY_BYTES, GpEntry, MethodHeader, SEM_ADDR_HI, SEM_ADDR_LO, SEM_EXECUTE,
    SEM_PAYLOAD_LO, SET_OBJECT, SUBCHANNEL_COMPUTE, SUBCHANNEL_COPY, SecOp, sem,
};
use mdev_core::abi::{notifier, userd};

use super::FakeRm;
use super::objects::{Object, Objects};

/// Entries that are fetched ahead.
const AHEAD: usize = 3;
/// Interval between two steps.
const INTERVAL: Duration = Duration::from_micros(50);

/// Work of a channel.
#[derive(Debug, Default)]
pub struct Ring {
    get: u32,
    /// `GP_PUT` as the GPU knows it. None after a rewind.
    put: Option<u32>,
    /// Fetched entries.
    fetched: VecDeque<u64>,
    /// Words of the first fetched entry that are executed.
    executed: usize,
    /// When the kernel that runs ends.
    kernel_ends: Option<Instant>,
    /// What methods have set, by subchannel and method.
    set: BTreeMap<(u8, u32), u32>,
}

impl Ring {
    /// Forgets `GP_PUT`.
    pub fn rewind(&mut self) {
        self.put = None;
    }
}

/// Thread that executes the work of a fake GPU until it is dropped.
#[derive(Debug)]
pub struct Engines {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Engines {
    /// Starts the engines. Each kernel takes `kernel_time`.
    pub fn start(rm: &Arc<FakeRm>, kernel_time: Duration) -> Self {
        rm.state().objects.kernel_time = kernel_time;
        let stop = Arc::new(AtomicBool::new(false));
        let (rm, stopped) = (rm.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                rm.state().objects.step();
                std::thread::sleep(INTERVAL);
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Name of a channel.
type Name = (u32, u32);

impl Objects {
    /// Executes at most one entry of each channel.
    fn step(&mut self) {
        let runs = |object: &Object| {
            object.class == host::CLASS
                && object.scheduled
                && object.disabled == 0
                && !object.faulted
                && self.userd(object).is_some()
        };
        let names: Vec<Name> =
            self.all.iter().filter(|(_, object)| runs(object)).map(|(name, _)| *name).collect();
        for name in names {
            if self.fetch(name).is_none() {
                let token = self.all.get(&name).map_or(0, |channel| channel.token);
                self.fault(token, notifier::PBDMA_ERROR);
                continue;
            }
            let Some(channel) = self.all.get(&name) else { continue };
            let held = self.engine_held && channel.engine == engine::GRAPHICS;
            let waits = channel.ring.kernel_ends.is_some_and(|ends| Instant::now() < ends);
            if !held && !waits && !channel.ring.fetched.is_empty() {
                self.execute(name);
            }
        }
    }

    /// Ends the kernel of a channel that is disabled, as the driver waits for it.
    pub(super) fn end_kernel(&mut self, client: u32, handle: u32) {
        let name = (client, handle);
        let Some(channel) = self.all.get_mut(&name) else { return };
        if channel.engine != engine::GRAPHICS || channel.ring.fetched.is_empty() {
            return;
        }
        if self.engine_held {
            self.violations.push("A channel was disabled under an endless kernel".into());
        } else if channel.ring.kernel_ends.take().is_some() {
            channel.ring.kernel_ends = Some(Instant::now());
            self.execute(name);
        }
    }

    /// Returns the memory of a channel's USERD.
    fn userd(&self, channel: &Object) -> Option<&Object> {
        let memory = self.get(channel.client, *channel.uses.get(1)?).ok()?;
        (memory.class == class::OS_DESCRIPTOR).then_some(memory)
    }

    /// Fetches entries. None if one cannot be read.
    fn fetch(&mut self, name: Name) -> Option<()> {
        let channel = self.all.get(&name)?;
        let (ring, entries) = channel.gpfifo;
        let at = self.userd(channel)?.address + channel.userd_offset;
        let put = u32::from_le_bytes(read_process(at + userd::GP_PUT)?) % entries;
        let Ring { mut get, put: known, .. } = channel.ring;
        let distance = |to: u32| to.wrapping_sub(get) & (entries - 1);
        let backwards = known.is_some_and(|known| distance(put) < distance(known));
        let mut fetched = Vec::new();
        while get != put && channel.ring.fetched.len() + fetched.len() < AHEAD {
            let entry = self.read_word(name, ring + u64::from(get) * GP_ENTRY_BYTES)?;
            let high = self.read_word(name, ring + u64::from(get) * GP_ENTRY_BYTES + 4)?;
            fetched.push(u64::from(high) << 32 | u64::from(entry));
            get = (get + 1) % entries;
        }
        if !fetched.is_empty() {
            write_process(at + userd::GP_GET, &get.to_le_bytes())?;
        }
        if backwards {
            self.violations.push(format!("GP_PUT of {name:x?} went back without a rewind"));
        }
        let ring = &mut self.all.get_mut(&name)?.ring;
        ring.fetched.extend(fetched);
        (ring.get, ring.put) = (get, Some(put));
        Some(())
    }

    /// Executes the first fetched entry as far as semaphores and kernels allow.
    fn execute(&mut self, name: Name) {
        let Some(first) = self.all.get(&name).and_then(|c| c.ring.fetched.front().copied()) else {
            return;
        };
        let words = match GpEntry::decode(first) {
            GpEntry::Segment { va, dwords } => {
                let word = |number: u32| self.read_word(name, va + u64::from(number) * 4);
                (0..dwords).map(word).collect::<Option<Vec<u32>>>()
            }
            GpEntry::Control { .. } => Some(Vec::new()),
        };
        let done = words.map_or(Err(notifier::MMU_FAULT), |words| self.execute_words(name, &words));
        let Some(channel) = self.all.get_mut(&name) else { return };
        match done {
            Ok(true) => {
                channel.ring.fetched.pop_front();
                channel.ring.executed = 0;
            }
            Ok(false) => {}
            Err(code) => {
                let token = channel.token;
                self.fault(token, code);
            }
        }
    }

    /// Executes the words of an entry. Returns false if it has to go on later.
    fn execute_words(&mut self, name: Name, words: &[u32]) -> Result<bool, u32> {
        loop {
            let at = self.all.get(&name).ok_or(notifier::PBDMA_ERROR)?.ring.executed;
            let Some(header) = words.get(at) else { return Ok(true) };
            let header = MethodHeader::decode(*header).ok_or(notifier::PBDMA_ERROR)?;
            let count = if header.op == SecOp::Immediate { 0 } else { header.count as usize };
            let data = words.get(at + 1..at + 1 + count).ok_or(notifier::PBDMA_ERROR)?;
            for (number, word) in data.iter().enumerate() {
                let method =
                    header.method + if header.op == SecOp::Inc { number as u32 * 4 } else { 0 };
                if !self.method(name, header.subchannel, method, *word)? {
                    return Ok(false);
                }
            }
            let channel = self.all.get_mut(&name).ok_or(notifier::PBDMA_ERROR)?;
            channel.ring.executed += 1 + count;
        }
    }

    /// Executes a method. Returns false if it has to be executed again later.
    fn method(&mut self, name: Name, sub: u8, method: u32, value: u32) -> Result<bool, u32> {
        let now = Instant::now();
        let kernel_time = self.kernel_time;
        let channel = self.all.get_mut(&name).ok_or(notifier::PBDMA_ERROR)?;
        let ring = &mut channel.ring;
        let sub = if method < host::FIRST_CLASS_METHOD && method != SET_OBJECT { 0 } else { sub };
        ring.set.insert((sub, method), value);
        let set = |sub: u8, method: u32| ring.set.get(&(sub, method)).copied().unwrap_or_default();
        let address =
            |sub: u8, hi: u32, lo: u32| u64::from(set(sub, hi)) << 32 | u64::from(set(sub, lo));
        match (sub, method) {
            (_, SEM_EXECUTE) => {
                let (va, payload) = (address(0, SEM_ADDR_HI, SEM_ADDR_LO), set(0, SEM_PAYLOAD_LO));
                if value & sem::OPERATION_MASK == sem::RELEASE {
                    return self.write_va(name, va, &payload.to_le_bytes()).map(|()| true);
                }
                let word = self.read_word(name, va).ok_or(notifier::MMU_FAULT)?;
                Ok(word.wrapping_sub(payload).cast_signed() >= 0)
            }
            (SUBCHANNEL_COPY, LAUNCH_DMA) => {
                if set(SUBCHANNEL_COPY, SET_OBJECT) != copy::CLASS {
                    return Err(notifier::GR_ERROR);
                }
                let c = SUBCHANNEL_COPY;
                let from = address(c, OFFSET_IN_UPPER, OFFSET_IN_LOWER);
                let to = address(c, OFFSET_OUT_UPPER, OFFSET_OUT_LOWER);
                let done = address(c, SET_SEMAPHORE_A, SET_SEMAPHORE_B);
                let (len, payload) = (set(c, LINE_LENGTH_IN), set(c, SET_SEMAPHORE_PAYLOAD));
                if value & launch::TRANSFER_MASK != 0 {
                    let mut data = vec![0; len as usize];
                    self.read_va(name, from, &mut data)?;
                    self.write_va(name, to, &data)?;
                }
                if value & launch::SEMAPHORE_MASK != 0 {
                    self.write_va(name, done, &payload.to_le_bytes())?;
                }
                Ok(true)
            }
            (SUBCHANNEL_COMPUTE, SEND_SIGNALING_PCAS2_B) => {
                let c = SUBCHANNEL_COMPUTE;
                let windows = [SET_SHADER_SHARED_MEMORY_WINDOW_A, SET_SHADER_LOCAL_MEMORY_WINDOW_A];
                if set(c, SET_OBJECT) != compute::CLASS
                    || windows.iter().any(|window| set(c, *window) == 0)
                {
                    return Err(notifier::GR_ERROR);
                }
                let descriptor = u64::from(set(c, SEND_PCAS_A)) << 8;
                match channel.ring.kernel_ends {
                    None => {
                        channel.ring.kernel_ends = Some(now + kernel_time);
                        return Ok(false);
                    }
                    Some(ends) if now < ends => return Ok(false),
                    Some(_) => channel.ring.kernel_ends = None,
                }
                let mut counter = [0; 8];
                self.read_va(name, descriptor, &mut counter)?;
                let counter = u64::from_le_bytes(counter);
                let count = self.read_word(name, counter).ok_or(notifier::MMU_FAULT)?;
                self.write_va(name, counter, &(count + 1).to_le_bytes()).map(|()| true)
            }
            _ => Ok(true),
        }
    }

    fn read_word(&self, name: Name, va: u64) -> Option<u32> {
        let mut bytes = [0; 4];
        self.read_va(name, va, &mut bytes).ok()?;
        Some(u32::from_le_bytes(bytes))
    }

    fn read_va(&self, name: Name, va: u64, data: &mut [u8]) -> Result<(), u32> {
        let mut done = 0;
        while done < data.len() {
            let (memory, at, len) =
                self.locate(name, va + done as u64).ok_or(notifier::MMU_FAULT)?;
            let part = (len as usize).min(data.len() - done);
            let read = memory.read(at, &mut data[done..done + part]);
            read.map_err(|_| notifier::MMU_FAULT)?;
            done += part;
        }
        Ok(())
    }

    fn write_va(&self, name: Name, va: u64, data: &[u8]) -> Result<(), u32> {
        let mut done = 0;
        while done < data.len() {
            let (memory, at, len) =
                self.locate(name, va + done as u64).ok_or(notifier::MMU_FAULT)?;
            let part = (len as usize).min(data.len() - done);
            memory.write(at, &data[done..done + part]).map_err(|_| notifier::MMU_FAULT)?;
            done += part;
        }
        Ok(())
    }

    /// Returns the memory at an address of a channel, the offset in it, and how much follows.
    fn locate(&self, (client, channel): Name, va: u64) -> Option<(&Object, u64, u64)> {
        let group = self.get(client, self.get(client, channel).ok()?.parent).ok()?;
        let space = *group.uses.first()?;
        let of_space = |object: &&Object| {
            object.class == class::VIRTUAL && object.client == client && object.uses == [space]
        };
        let (range, _) = self.all.iter().find(|(_, object)| of_space(object))?;
        let before = self.mappings.range((client, range.1, 0)..=(client, range.1, va));
        let (_, mapping) = before.last()?;
        let within = va.checked_sub(mapping.va).filter(|within| *within < mapping.len)?;
        let memory = self.get(client, mapping.memory).ok()?;
        Some((memory, mapping.offset + within, mapping.len - within))
    }
}

impl Object {
    fn read(&self, at: u64, data: &mut [u8]) -> io::Result<()> {
        match &self.contents {
            Some(contents) => contents.read_exact_at(data, at),
            None => process_memory(false)?.read_exact_at(data, self.address + at),
        }
    }

    fn write(&self, at: u64, data: &[u8]) -> io::Result<()> {
        match &self.contents {
            Some(contents) => contents.write_all_at(data, at),
            None => process_memory(true)?.write_all_at(data, self.address + at),
        }
    }
}

/// Opens the memory of this process, in which guest memory is.
fn process_memory(writable: bool) -> io::Result<File> {
    File::options().read(true).write(writable).open("/proc/self/mem")
}

fn read_process<const N: usize>(at: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    process_memory(false).ok()?.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

fn write_process(at: u64, bytes: &[u8]) -> Option<()> {
    process_memory(true).ok()?.write_all_at(bytes, at).ok()
}
