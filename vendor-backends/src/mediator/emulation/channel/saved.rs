//! Saved state of a channel between two steps of its work. A state is untrusted input: a guest must
//! be able to cause it.

use mdev_core::abi::host::{CLASS as HOST, MethodHeader, SUBCHANNEL_COPY, sem};
use mdev_core::abi::{compute, copy};
use mdev_core::gpu::{ChannelSpec, EngineKind};
use serde::{Deserialize, Serialize};

use super::{Active, Channel, Segment, Userd, WINDOW};
use crate::mediator::Hardware;
use crate::mediator::emulation::compute_class::ComputeClass;
use crate::mediator::emulation::copy_class::CopyClass;
use crate::mediator::emulation::host_class::HostClass;
use crate::mediator::emulation::pushbuffer::Decoder;
use crate::mediator::fault::Fault;

/// Version of the state. Incremented with every change of [`State`] and of the types in it.
const VERSION: u32 = 1;
/// End of the addresses of a pushbuffer segment: an entry has 40 bits, and a length of 23 bits.
const SEGMENT_END: u64 = 1 << 41;

/// State of a channel.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    version: u32,
    get: u32,
    /// Address of the next words of the pushbuffer, and their number.
    segment: Option<(u64, u32)>,
    /// Words that were fetched and not yet executed.
    words: Vec<u32>,
    header: Option<MethodHeader>,
    bound: [u32; 8],
    host: HostClass,
    copy: CopyClass,
    compute: ComputeClass,
    active: Option<Active>,
    error: Option<Fault>,
    engine_ns: u64,
    /// Engine time of the kernel or transfer in progress.
    working_ns: u64,
}

impl Channel {
    /// Returns the state.
    pub fn save(&self) -> postcard::Result<Vec<u8>> {
        let charged = self.charged.0 == self.launches;
        postcard::to_stdvec(&State {
            version: VERSION,
            get: self.get,
            segment: self.segment.as_ref().map(|segment| (segment.va, segment.left)),
            words: self.window[self.window_next..self.window_len].to_vec(),
            header: self.decoder.header(),
            bound: self.bound,
            host: self.host,
            copy: self.copy,
            compute: self.compute,
            active: self.active.clone(),
            error: self.error,
            engine_ns: self.engine_ns,
            working_ns: if charged { self.charged.1 } else { 0 },
        })
    }

    /// Returns the channel of a state. Writes no memory. `None` if no guest can cause the state.
    pub fn restore(
        spec: ChannelSpec,
        userd: Userd,
        state: &[u8],
        hardware: &dyn Hardware,
    ) -> Option<Self> {
        let state: State = postcard::from_bytes(state).ok()?;
        let bound = |(subchannel, class): (u8, u32)| is_bindable(&spec, subchannel, class);
        let segment = state.segment.map(|(va, left)| Segment { va, left });
        let inside = |segment: &Segment| {
            let end = segment.va.checked_add(4 * u64::from(segment.left));
            end.is_some_and(|end| end <= SEGMENT_END)
        };
        let valid = state.version == VERSION
            && state.get < spec.gpfifo_entries
            && segment.as_ref().is_none_or(inside)
            && state.words.len() <= WINDOW
            && (0..).zip(state.bound).all(bound)
            && state.active.as_ref().is_none_or(|active| is_valid(active, hardware))
            && (state.error.is_none() || state.active.is_none() && segment.is_none());
        if !valid {
            return None;
        }
        let mut channel = Self::idle(spec, state.error.is_none().then_some(userd), 0);
        channel.get = state.get;
        channel.seen_put = state.get;
        channel.segment = segment;
        channel.window[..state.words.len()].copy_from_slice(&state.words);
        channel.window_len = state.words.len();
        channel.decoder = Decoder::within(state.header)?;
        channel.bound = state.bound;
        channel.host = state.host;
        channel.copy = state.copy;
        channel.compute = state.compute;
        channel.active = state.active;
        channel.error = state.error;
        channel.engine_ns = state.engine_ns;
        channel.charged = (0, state.working_ns);
        Some(channel)
    }
}

/// Returns whether a class can be bound to a subchannel; 0 is none.
pub(super) fn is_bindable(spec: &ChannelSpec, subchannel: u8, class: u32) -> bool {
    // As on hardware, only one subchannel reaches the copy engine.
    let copies = subchannel == SUBCHANNEL_COPY;
    match class {
        0 | HOST => true,
        copy::CLASS => copies,
        compute::CLASS => !copies && spec.engine == EngineKind::Compute,
        _ => false,
    }
}

/// Returns whether a launch or an acquire can lead to the operation's state.
fn is_valid(active: &Active, hardware: &dyn Hardware) -> bool {
    match active {
        Active::Transfer(transfer) => transfer.is_valid(),
        Active::Grid(grid) => grid.is_valid(hardware),
        Active::Acquire(acquire) => sem::ACQUIRES.contains(&acquire.operation),
    }
}
