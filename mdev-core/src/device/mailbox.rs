//! Mailbox: checks and executes requests of a guest's driver.
//!
//! The page is copied once, so that a guest that changes the page meanwhile affects only itself.

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, IntoBytes};

use super::VirtualFunction;
use crate::abi::control::{Features, VECTORS};
use crate::abi::mailbox::{
    ChannelCreate, ChannelCreated, ChannelName, ChannelState, Header, Info, MAP_READ_ONLY,
    MAX_GPFIFO_ENTRIES, MAX_SCATTER, MapGuest, MapVram, Opcode, PAGE_BYTES, PAYLOAD, Scatter,
    Status, USERD_GUEST, USERD_VRAM, Unmap, VA_END, VA_START,
};
use crate::abi::{compute, copy, host, userd};
use crate::gpu::{
    Backing, ChannelRequest, ChannelSpec, ChannelSpecError, Client, EngineKind, GpuError,
    MapRequest, Preamble,
};
use crate::ids::{ChannelId, GpuVa, GuestPa, SpaceId};
use crate::mem::{DmaAccess, GuestMemory};
use crate::units::{PAGE_SIZE, is_aligned};

/// Resources for requests.
#[derive(Debug)]
pub(super) struct Environment<'a> {
    pub client: &'a mut dyn Client,
    pub memory: &'a mut GuestMemory,
    pub features: Features,
}

/// Result of a mailbox doorbell.
#[derive(Debug)]
pub(super) struct Outcome {
    pub status: Status,
    /// True if the GPU is lost.
    pub lost: bool,
    /// What is to be written to guest memory.
    pub answer: Option<Answer>,
}

/// Reply to a request, for its page in guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Answer {
    pub address: GuestPa,
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

/// Reason of a failed request.
#[derive(Debug)]
enum Refusal {
    Status(Status),
    Gpu(GpuError),
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl From<GpuError> for Refusal {
    fn from(error: GpuError) -> Self {
        Self::Gpu(error)
    }
}

impl From<ChannelSpecError> for Refusal {
    fn from(error: ChannelSpecError) -> Self {
        Self::Gpu(error.into())
    }
}

/// Maximum number of ranges of guest memory per request. A vCPU waits for each mapping.
const MAX_PIECES: usize = 1024;

/// Payload of a reply, at most the size of [`Info`].
type Reply = Vec<u8>;

/// Executes the request at `address`. The caller writes the answer, which overwrites the request.
pub(super) fn serve(env: &mut Environment<'_>, address: GuestPa, lost: bool) -> Outcome {
    let mut page = [0; PAGE_BYTES];
    let both = DmaAccess::READ | DmaAccess::WRITE;
    // Check that the reply can be written before executing the request.
    if env.memory.check(address, PAGE_BYTES as u64, both).is_err()
        || env.memory.read(address, &mut page).is_err()
    {
        return Outcome { status: Status::BadMailbox, lost, answer: None };
    }
    let Ok((mut header, _)) = Header::read_from_prefix(&page) else {
        return Outcome { status: Status::Internal, lost, answer: None };
    };
    let result = if lost { Err(Status::DeviceLost.into()) } else { execute(env, &header, &page) };
    let (status, reply) = match result {
        Ok(reply) => (Status::Ok, reply),
        Err(Refusal::Status(status)) => (status, Reply::new()),
        Err(Refusal::Gpu(error)) => {
            log::debug!("Mailbox request {}: {error}", header.opcode);
            (status_of(&error), Reply::new())
        }
    };
    header.status = status as u32;
    header.reply_bytes = reply.len() as u32;
    let mut answer = header.as_bytes().to_vec();
    answer.extend_from_slice(&reply);
    let answer = Some(Answer { address, bytes: answer });
    Outcome { status, lost: lost || status == Status::DeviceLost, answer }
}

impl VirtualFunction {
    /// Writes the answer to the last mailbox request to guest memory. Returns false if the memory
    /// is gone since the request was read.
    pub fn write_answer(&mut self) -> bool {
        let Some(Answer { address, bytes }) = self.answer.take() else { return true };
        self.memory.lock().write(address, &bytes).is_ok()
    }

    /// Drops the answer to a request whose page may have another request by now.
    pub fn drop_answer(&mut self) {
        self.answer = None;
    }

    /// Leaves it to the caller to [write](Self::write_answer) answers, once the state that includes
    /// their requests is recorded.
    pub fn answer_later(&mut self) {
        self.answers_later = true;
    }
}

/// Refuses the request at `address` while the control queue runs: it would wait for the queue.
pub(super) fn refuse(memory: &mut GuestMemory, address: GuestPa, lost: bool) -> Outcome {
    let mut header = [0; PAYLOAD];
    let refused = if lost { Status::DeviceLost } else { Status::Unsupported };
    let written = memory.read(address, &mut header).and_then(|()| {
        header[4..8].copy_from_slice(&(refused as u32).to_le_bytes());
        header[12..16].fill(0);
        memory.write(address, &header)
    });
    let status = if written.is_ok() { refused } else { Status::BadMailbox };
    Outcome { status, lost, answer: None }
}

/// Returns the guest's status for a GPU error.
fn status_of(error: &GpuError) -> Status {
    match error {
        GpuError::Invalid(_) => Status::Invalid,
        GpuError::OutOfRange(_) => Status::OutOfRange,
        GpuError::Overlap(_) => Status::Overlap,
        GpuError::NotFound(_) => Status::NotFound,
        GpuError::Limit(_) | GpuError::Later(_) | GpuError::Fragmented { .. } => Status::Limit,
        GpuError::Unsupported(_) => Status::Unsupported,
        GpuError::Lost(_) => Status::DeviceLost,
        GpuError::Io(error) => {
            log::warn!("Mailbox request failed on the host: {error}");
            Status::Internal
        }
    }
}

fn execute(
    env: &mut Environment<'_>,
    header: &Header,
    page: &[u8; PAGE_BYTES],
) -> Result<Reply, Refusal> {
    let opcode = Opcode::from_number(header.opcode).ok_or(Status::UnknownOpcode)?;
    let payload = usize::try_from(header.request_bytes)
        .ok()
        .and_then(|len| page[PAYLOAD..].get(..len))
        .filter(|_| header.reserved == 0)
        .ok_or(Status::Invalid)?;
    match opcode {
        Opcode::GetInfo => empty(payload).map(|()| info(env).as_bytes().to_vec()),
        Opcode::MapGuest => {
            let (request, list) =
                MapGuest::read_from_prefix(payload).map_err(|_| Status::Invalid)?;
            map_guest(env, &request, list).map(|()| Reply::new())
        }
        Opcode::MapVram => map_vram(env, &exact(payload)?).map(|()| Reply::new()),
        Opcode::Unmap => {
            let request: Unmap = exact(payload)?;
            let va = gpu_range(request.va, request.length)?;
            env.client.unmap(SpaceId::DEFAULT, va, request.length)?;
            Ok(Reply::new())
        }
        Opcode::ChannelCreate => {
            let mut request = ChannelCreate::default();
            let known = match payload.len() {
                ChannelCreate::SHORT_BYTES => &mut request.as_mut_bytes()[..payload.len()],
                _ => request.as_mut_bytes(),
            };
            if payload.len() != known.len() {
                return Err(Status::Invalid.into());
            }
            known.copy_from_slice(payload);
            create_channel(env, &request)
        }
        Opcode::ChannelQuery => {
            let state = env.client.query_channel(channel(payload)?)?;
            let state = ChannelState {
                error: state.error,
                gp_get: state.gp_get,
                error_info: state.error_info,
                engine_ns: state.engine_ns,
            };
            Ok(state.as_bytes().to_vec())
        }
        Opcode::ChannelDestroy => {
            env.client.destroy_channel(channel(payload)?)?;
            Ok(Reply::new())
        }
        Opcode::Reset => {
            empty(payload)?;
            env.client.reset()?;
            Ok(Reply::new())
        }
    }
}

fn empty(payload: &[u8]) -> Result<(), Refusal> {
    if payload.is_empty() { Ok(()) } else { Err(Status::Invalid.into()) }
}

fn exact<T: FromBytes>(payload: &[u8]) -> Result<T, Refusal> {
    T::read_from_bytes(payload).map_err(|_| Status::Invalid.into())
}

fn channel(payload: &[u8]) -> Result<ChannelId, Refusal> {
    let name: ChannelName = exact(payload)?;
    if name.reserved == 0 { Ok(ChannelId(name.channel)) } else { Err(Status::Invalid.into()) }
}

fn info(env: &Environment<'_>) -> Info {
    let class = |feature, class| if env.features.contains(feature) { class } else { 0 };
    Info {
        vram_bytes: env.client.spec().vram_bytes,
        va_start: VA_START,
        va_end: VA_END,
        timestamp_hz: 1_000_000_000,
        features: env.features.bits(),
        max_channels: env.client.spec().max_channels,
        vectors: VECTORS,
        max_gpfifo_entries: MAX_GPFIFO_ENTRIES,
        classes: [
            host::CLASS,
            class(Features::COPY, copy::CLASS),
            class(Features::COMPUTE, compute::CLASS),
        ],
        reserved: 0,
    }
}

/// Checks a range of GPU virtual addresses.
fn gpu_range(va: u64, len: u64) -> Result<GpuVa, Refusal> {
    if len == 0 || !is_aligned(va, PAGE_SIZE) || !is_aligned(len, PAGE_SIZE) {
        return Err(Status::Invalid.into());
    }
    let end = va.checked_add(len).filter(|end| va >= VA_START && *end <= VA_END);
    if end.is_some() { Ok(GpuVa(va)) } else { Err(Status::OutOfRange.into()) }
}

/// Checks a range of video memory.
fn vram_range(env: &Environment<'_>, offset: u64, len: u64) -> Result<Backing, Refusal> {
    let end = offset.checked_add(len).filter(|end| *end <= env.client.spec().vram_bytes);
    if end.is_some() { Ok(Backing::Vram { offset }) } else { Err(Status::OutOfRange.into()) }
}

fn writable(flags: u32) -> Result<bool, Refusal> {
    match flags {
        0 => Ok(true),
        MAP_READ_ONLY => Ok(false),
        _ => Err(Status::Invalid.into()),
    }
}

fn map_guest(env: &mut Environment<'_>, request: &MapGuest, list: &[u8]) -> Result<(), Refusal> {
    let count = request.count as usize;
    if count == 0 || count > MAX_SCATTER || list.len() != count * size_of::<Scatter>() {
        return Err(Status::Invalid.into());
    }
    let writable = writable(request.flags)?;
    let mut ranges = Vec::with_capacity(count);
    let mut total = 0u64;
    for bytes in list.chunks_exact(size_of::<Scatter>()) {
        let range: Scatter = exact(bytes)?;
        let aligned = is_aligned(range.address, PAGE_SIZE) && is_aligned(range.length, PAGE_SIZE);
        if !aligned || range.length == 0 {
            return Err(Status::Invalid.into());
        }
        total = total.checked_add(range.length).ok_or(Status::OutOfRange)?;
        ranges.push(range);
    }
    let GpuVa(start) = gpu_range(request.va, total)?;
    let access = if writable { DmaAccess::READ | DmaAccess::WRITE } else { DmaAccess::READ };
    // Locate the whole list before mapping any of it.
    let mut parts = Vec::new();
    for range in &ranges {
        let address = GuestPa(range.address);
        parts.extend(env.memory.import(env.client, address, range.length, access)?);
    }
    let pieces = merge(parts);
    if pieces.len() > MAX_PIECES {
        return Err(Status::Limit.into());
    }
    let mut va = start;
    for (backing, len) in pieces {
        let mapping = MapRequest { writable, ..MapRequest::new(GpuVa(va), len, backing) };
        if let Err(error) = env.client.map(&mapping) {
            // Undo a partial mapping.
            if va > start {
                env.client.unmap(SpaceId::DEFAULT, GpuVa(start), va - start)?;
            }
            return Err(error.into());
        }
        va += len;
    }
    Ok(())
}

/// Merges adjacent ranges: scatter lists often name consecutive pages.
fn merge(parts: Vec<(Backing, u64)>) -> Vec<(Backing, u64)> {
    let mut joined: Vec<(Backing, u64)> = Vec::with_capacity(parts.len());
    for (backing, len) in parts {
        match (joined.last_mut(), backing) {
            (
                Some((Backing::Guest { memory, offset }, before)),
                Backing::Guest { memory: other, offset: next },
            ) if *memory == other && *offset + *before == next => *before += len,
            _ => joined.push((backing, len)),
        }
    }
    joined
}

fn map_vram(env: &mut Environment<'_>, request: &MapVram) -> Result<(), Refusal> {
    let writable = writable(request.flags)?;
    if request.reserved != 0 || !is_aligned(request.offset, PAGE_SIZE) {
        return Err(Status::Invalid.into());
    }
    let va = gpu_range(request.va, request.length)?;
    let backing = vram_range(env, request.offset, request.length)?;
    Ok(env.client.map(&MapRequest { writable, ..MapRequest::new(va, request.length, backing) })?)
}

fn create_channel(env: &mut Environment<'_>, request: &ChannelCreate) -> Result<Reply, Refusal> {
    let channel = ChannelRequest {
        engine: EngineKind::from_number(request.engine).ok_or(Status::Invalid)?,
        gpfifo: GpuVa(request.gpfifo_va),
        gpfifo_entries: request.gpfifo_entries,
        userd: request.userd,
        vector: request.vector,
    };
    channel.check(env.client.gpu().capabilities)?;
    let userd = match request.userd_aperture {
        USERD_GUEST => {
            let both = DmaAccess::READ | DmaAccess::WRITE;
            let address = GuestPa(request.userd);
            let found = env.memory.import(env.client, address, userd::BYTES, both)?;
            found.first().ok_or(Status::OutOfRange)?.0
        }
        USERD_VRAM => vram_range(env, request.userd, userd::BYTES)?,
        _ => return Err(Status::Invalid.into()),
    };
    let preamble = match (request.preamble_dwords, request.reserved) {
        (0, 0) => None,
        (dwords, 0) => {
            let preamble = Preamble::new(GpuVa(request.preamble_va), dwords);
            Some(preamble.ok_or(Status::Invalid)?)
        }
        _ => return Err(Status::Invalid.into()),
    };
    let spec = ChannelSpec { preamble, ..channel.with_userd(userd) };
    let made = env.client.create_channel(&spec)?;
    let reply = ChannelCreated { channel: made.id.0, token: made.token.0 };
    Ok(reply.as_bytes().to_vec())
}
