//! Engine time, measured: the GPU's own log of context switches.
//!
//! The driver shares that log with whoever asks: a record with a time stamp whenever a context of the same user gets the
//! graphics engine or gives it up. Records of other users say neither which process nor which context. Copy engines have
//! no such log.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use mdev_core::gpu::GpuError;
use mdev_core::units::PAGE_SIZE;
use zerocopy::IntoBytes;

use super::device::Device;
use super::rm::Node;
use super::session::Object;
use super::sys::abi;
use super::sys::numbers::{class, control, flag};
use crate::mem::Mapping;

/// `NV_EVENT_BUFFER_RECORD_HEADER` and `NV_EVENT_BUFFER_FECS_RECORD_V1`.
const RECORD_BYTES: u64 = 32;
/// Switches between two readings: at 20 us a turn, a quarter of a second.
const RECORDS: u32 = 16 * 1024;

/// Offset of `recordPut` in `NV_EVENT_BUFFER_HEADER`.
const PUT: u64 = 4;

/// `NVC661_TIME_0` and `NVC661_TIME_1`, in the usermode page.
const TIME_LOW: u64 = 0x80;
const TIME_HIGH: u64 = 0x84;

/// `NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_START`: a context has the engine.
pub(super) const START: u8 = 6;
/// `NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_END`: it gave it up.
pub(super) const END: u8 = 7;
/// `NV_EVENT_BUFFER_FECS_CTXSWTAG_ENGINE_RESET`.
const ENGINE_RESET: u8 = 0xfe;

/// One record of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch {
    /// What happened.
    pub tag: u8,
    /// A number that goes up, to notice what is missing.
    pub number: u16,
    /// The context: a handle.
    pub context: u32,
    /// Whose.
    pub process: u64,
    /// When, in nanoseconds of the GPU's clock.
    pub at_ns: u64,
}

impl Switch {
    fn read(bytes: &[u8; RECORD_BYTES as usize]) -> Self {
        let (payload, _) = bytes[8..].as_chunks::<8>();
        let word = |index: usize| payload.get(index).copied().map_or(0, u64::from_le_bytes);
        Self {
            tag: word(0) as u8,
            number: (word(0) >> 16) as u16,
            context: (word(0) >> 32) as u32,
            process: word(1),
            at_ns: word(2),
        }
    }
}

/// Engine time of one process, from its switches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turns {
    /// Engine time of turns that have ended, in nanoseconds.
    pub done_ns: u64,
    /// When the turn began that has not ended.
    pub since_ns: Option<u64>,
    /// Turns that have ended.
    pub ended: u64,
    /// Until when the turn counts: a context that has no work keeps the engine until somebody else wants it.
    pub counts_until_ns: u64,
    /// It has the engine, and its gate is closed.
    held: bool,
}

impl Turns {
    /// Its gate has closed: from now on it does not run, whatever is logged. Or it has opened.
    pub fn gate(&mut self, open: bool, now_ns: u64) {
        if !open {
            self.held |= self.since_ns.is_some();
            self.finish(now_ns);
        } else if std::mem::take(&mut self.held) && self.since_ns.is_none() {
            // Nobody has had the engine meanwhile, so nothing is logged when it goes on.
            self.since_ns = Some(now_ns);
        }
    }

    /// Takes in what happened to `process`.
    pub fn note(&mut self, switch: &Switch, process: u64) {
        self.held &= !matches!(switch.tag, START | ENGINE_RESET)
            && (switch.tag != END || switch.process != process);
        match switch.tag {
            START if switch.process == process => {
                self.finish(switch.at_ns);
                self.since_ns = Some(switch.at_ns);
            }
            END if switch.process == process => self.finish(switch.at_ns),
            // Somebody else has the engine, so we have not.
            START | ENGINE_RESET => self.finish(switch.at_ns),
            _ => {}
        }
    }

    fn finish(&mut self, at_ns: u64) {
        if let Some(since) = self.since_ns.take() {
            self.done_ns += at_ns.min(self.counts_until_ns).saturating_sub(since);
            self.ended += 1;
        }
    }

    /// All engine time until `now_ns` of the GPU's clock.
    pub fn total_ns(&self, now_ns: u64) -> u64 {
        let until = now_ns.min(self.counts_until_ns);
        self.done_ns + self.since_ns.map_or(0, |since| until.saturating_sub(since))
    }
}

/// The GPU's clock, in nanoseconds, by its usermode page.
pub fn clock_ns(usermode: &Mapping) -> Option<u64> {
    // The upper half is read before and after, in case the lower one went round.
    loop {
        let high = usermode.load_u32(TIME_HIGH)?;
        let low = usermode.load_u32(TIME_LOW)?;
        if high == usermode.load_u32(TIME_HIGH)? {
            return Some(u64::from(high) << 32 | u64::from(low));
        }
    }
}

/// The log, as this process may see it.
#[derive(Debug)]
pub struct Trace {
    buffer: Arc<Object>,
    /// What the log lies in. Freed after it: the driver takes a buffer away whose memory goes.
    _memory: [Arc<Object>; 2],
    header: Arc<Mapping>,
    records: Arc<Mapping>,
    /// The usermode page, where the GPU's clock can be read.
    clock: Arc<Mapping>,
    get: u32,
    process: u64,
    /// Switches that were logged so far, anybody's.
    pub switches: u64,
    /// What came of it so far.
    pub turns: Turns,
    /// What the others had meanwhile.
    pub others: Others,
}

/// Turns of other processes since this one had the last of its own.
#[derive(Clone, Debug, Default)]
pub struct Others(BTreeMap<u64, u32>);

/// More processes than that are not told apart.
const MOST_OTHERS: usize = 64;

impl Others {
    /// Takes in what happened to anybody but `process`.
    pub fn note(&mut self, switch: &Switch, process: u64) {
        if switch.tag != START {
            return;
        }
        if switch.process == process {
            self.0.clear();
        } else if self.0.len() < MOST_OTHERS || self.0.contains_key(&switch.process) {
            *self.0.entry(switch.process).or_default() += 1;
        }
    }

    /// Forgets them: from now on it could have a turn.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// How often one of the others has come round.
    pub fn rounds(&self) -> u32 {
        self.0.values().copied().max().unwrap_or_default()
    }
}

impl Trace {
    /// Begins to listen.
    pub fn open(device: &Device, clock: Arc<Mapping>) -> Result<Self, GpuError> {
        let session = &device.session;
        let memory = |bytes: u64| -> Result<(Arc<Object>, Arc<Mapping>), GpuError> {
            let object = device.system_memory(bytes, true)?;
            let flags = flag::CPU_READ_ONLY;
            let fd = session.aperture(&device.device, &object, Node::Control, bytes, flags)?;
            let view = Mapping::new(fd.as_fd(), 0, bytes, false)?;
            Ok((object, view))
        };
        let (header_memory, header) = memory(PAGE_SIZE)?;
        let (record_memory, records) = memory(u64::from(RECORDS) * RECORD_BYTES)?;
        let mut params = abi::EventBufferParams {
            record_bytes: RECORD_BYTES as u32,
            record_count: RECORDS,
            subdevice: device.subdevice.handle(),
            header_memory: header_memory.handle(),
            record_memory: record_memory.handle(),
            ..Default::default()
        };
        let buffer = session.alloc(
            None,
            class::EVENT_BUFFER,
            Some(params.as_mut_bytes()),
            "event buffer",
        )?;
        let mut bind = abi::BindTrace {
            buffer: buffer.handle(),
            record_bytes: RECORD_BYTES as u32,
            detail: 1,
            ..Default::default()
        };
        device.subdevice.control(control::BIND_TRACE, &mut bind)?;
        let mut enable = abi::Pair { first: 1, second: 1 };
        buffer.control(control::TRACE_ENABLE, &mut enable)?;
        Ok(Self {
            buffer,
            _memory: [header_memory, record_memory],
            header,
            records,
            clock,
            get: 0,
            process: u64::from(std::process::id()),
            switches: 0,
            turns: Turns::default(),
            others: Others::default(),
        })
    }

    /// The GPU's clock, in nanoseconds.
    pub fn now_ns(&self) -> Option<u64> {
        clock_ns(&self.clock)
    }

    /// Takes in what was logged since the last time; returns it too.
    pub fn read(&mut self) -> Result<Vec<Switch>, GpuError> {
        self.buffer.control_bytes(control::TRACE_FLUSH, &mut [])?;
        let put = self.header.load_u32(PUT).unwrap_or(self.get) % RECORDS;
        let mut switches = Vec::new();
        while self.get != put {
            let mut bytes = [0; RECORD_BYTES as usize];
            if self.records.read(u64::from(self.get) * RECORD_BYTES, &mut bytes).is_none() {
                break;
            }
            let switch = Switch::read(&bytes);
            self.turns.note(&switch, self.process);
            self.others.note(&switch, self.process);
            self.switches += 1;
            switches.push(switch);
            self.get = (self.get + 1) % RECORDS;
        }
        if !switches.is_empty() {
            let mut get = abi::Pair { first: self.get, second: 0 };
            self.buffer.control(control::TRACE_UPDATE_GET, &mut get)?;
        }
        Ok(switches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(tag: u8, process: u64, at_ns: u64) -> Switch {
        Switch { tag, number: 0, context: 1, process, at_ns }
    }

    #[test]
    fn turns_are_added_up() {
        let mut turns = Turns { counts_until_ns: 1000, ..Turns::default() };
        for (tag, process, at) in [(START, 7, 100), (END, 7, 150), (START, 9, 160), (START, 7, 200)]
        {
            turns.note(&switch(tag, process, at), 7);
        }
        assert_eq!((turns.done_ns, turns.ended, turns.total_ns(260)), (50, 1, 110));
        turns.note(&switch(START, 0, 230), 7);
        assert_eq!(turns.total_ns(1000), 80, "somebody else has the engine");
        turns.note(&switch(END, 7, 5), 7);
        assert_eq!(turns.total_ns(1000), 80, "an end without a beginning");
        turns.note(&switch(START, 7, 990), 7);
        turns.note(&switch(END, 7, 1990), 7);
        assert_eq!(turns.total_ns(2000), 90, "it had no work after 1000");
    }

    #[test]
    fn no_turn_goes_on_behind_a_closed_gate() {
        let mut turns = Turns { counts_until_ns: 10_000, ..Turns::default() };
        turns.note(&switch(START, 7, 100), 7);
        turns.gate(false, 300);
        assert_eq!(turns.total_ns(5000), 200);
        // Nobody else wanted the engine.
        turns.gate(true, 5000);
        assert_eq!(turns.total_ns(5100), 300);
        // Somebody else had it when the gate opened, and its own next turn is logged.
        turns.gate(false, 5200);
        turns.note(&switch(START, 9, 5300), 7);
        turns.gate(true, 6000);
        assert_eq!(turns.total_ns(7000), 400);
        turns.note(&switch(START, 7, 7000), 7);
        assert_eq!(turns.total_ns(7050), 450);
        // The same, where the end of its turn was logged after all.
        turns.gate(false, 7100);
        turns.note(&switch(END, 7, 7099), 7);
        turns.gate(true, 8000);
        assert_eq!(turns.total_ns(9000), 500);
        // A gate that was open, or was closed between two turns, changes nothing.
        turns.gate(true, 9000);
        turns.gate(false, 9100);
        turns.gate(true, 9200);
        assert_eq!(turns.total_ns(9900), 500);
    }

    #[test]
    fn rounds_are_those_since_its_own_turn() {
        let mut others = Others::default();
        for process in [8, 9, 8, 9, 9] {
            others.note(&switch(START, process, 0), 7);
            others.note(&switch(END, process, 0), 7);
        }
        assert_eq!(others.rounds(), 3);
        others.note(&switch(END, 7, 0), 7);
        assert_eq!(others.rounds(), 3);
        others.note(&switch(START, 7, 0), 7);
        assert_eq!(others.rounds(), 0);
        (0..1000).for_each(|process| others.note(&switch(START, process + 10, 0), 7));
        assert_eq!((others.rounds(), others.0.len()), (1, MOST_OTHERS));
    }
}
