//! The calls, one by one.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::unix::fs::FileExt;

use mdev_core::abi::{compute, copy, host};
use zerocopy::{FromBytes, IntoBytes};

use super::objects::{CLOCK, Mapping, Object, Refusal, is_engine, is_harmless};
use super::{FileId, Opened, State, VIDEO_MEMORY, file_of_number, id_of_number};
use crate::nvidia::rm::{Node, Request};
use crate::nvidia::sys::abi::{self, Call};
use crate::nvidia::sys::numbers::{class, control, engine, fb, status};
use crate::nvidia::version::Layout;

/// What a request asks, for the log: what matters of it, without addresses and numbers of descriptors.
pub fn describe(request: &Request<'_>) -> String {
    let read = |at: usize| {
        let bytes = request.argument.get(at..at + 4).and_then(|b| b.try_into().ok());
        bytes.map_or(0, u32::from_le_bytes)
    };
    let params = request.params.as_ref().map_or(0, |(_, params)| params.len());
    match request.number {
        abi::Alloc::NUMBER => format!("class {:#x} params {params}", read(12)),
        abi::Control::NUMBER => {
            let first = request.params.as_ref().and_then(|(_, params)| params.first());
            format!("{:#x} params {params} first {}", read(8), first.copied().unwrap_or_default())
        }
        abi::MapDma::NUMBER => format!("{} bytes", request.argument.len()),
        abi::Free::NUMBER => format!("{:#x}", read(8)),
        _ => String::new(),
    }
}

/// Carries a request out on a file. What the driver refuses it says in the argument's status.
pub fn carry_out(
    state: &mut State,
    layout: &Layout,
    file: FileId,
    request: &mut Request<'_>,
) -> io::Result<()> {
    let node = state.opened(file)?.node;
    let params = request.params.as_mut().map(|(_, params)| &mut **params);
    let argument = &mut *request.argument;
    match request.number {
        abi::CardInfos::NUMBER => with(argument, |infos: &mut abi::CardInfos| {
            infos.cards[0] =
                abi::CardInfo { valid: 1, pci_bus: 0x3b, gpu_id: 0x3b00, ..Default::default() };
            Ok(())
        }),
        abi::RegisterFd::NUMBER => with(argument, |register: &mut abi::RegisterFd| {
            let control = id_of_number(register.control)?;
            if state.opened(control)?.node != Node::Control {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            state.opened(file)?.registered = true;
            Ok(())
        }),
        abi::AllocOsEvent::NUMBER => with(argument, |event: &mut abi::AllocOsEvent| {
            let of = id_of_number(event.fd.cast_signed())?;
            event.status = if of == file { status::OK } else { status::INVALID_ARGUMENT };
            Ok(())
        }),
        _ if node != Node::Control && request.number != abi::AllocMemory::NUMBER => {
            Err(io::ErrorKind::InvalidInput.into())
        }
        abi::Free::NUMBER => with(argument, |free: &mut abi::Free| {
            free.status = code(state.objects.free(free.root, free.object));
            Ok(())
        }),
        abi::Alloc::NUMBER => with(argument, |alloc: &mut abi::Alloc| {
            if alloc.class == class::CLIENT {
                alloc.object = state.objects.new_client();
                return Ok(());
            }
            alloc.status = code(make(state, layout, alloc, params.as_deref()));
            Ok(())
        }),
        abi::Control::NUMBER => with(argument, |ask: &mut abi::Control| {
            ask.status = code(answer(state, layout, ask, params.unwrap_or_default()));
            Ok(())
        }),
        abi::AllocMemory::NUMBER => with(argument, |alloc: &mut abi::AllocMemory| {
            if node == Node::Control || !state.opened(file)?.registered {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            alloc.status = code(register(state, alloc));
            Ok(())
        }),
        abi::MapMemory::NUMBER => with(argument, |map: &mut abi::MapMemory| {
            map.status = code(prepare(state, file, map)?);
            Ok(())
        }),
        abi::MapDma::NUMBER => {
            if argument.len() != layout.map_dma {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            if argument.len() == size_of::<abi::MapDma570>() {
                return with(argument, |map: &mut abi::MapDma570| {
                    let (client, space, memory) = (map.client, map.dma, map.memory);
                    let mapping = Mapping { client, space, memory, va: map.va, len: map.length };
                    map.status = code(state.objects.map(mapping));
                    Ok(())
                });
            }
            with(argument, |map: &mut abi::MapDma| {
                let (client, space, memory) = (map.client, map.dma, map.memory);
                let mapping = Mapping { client, space, memory, va: map.va, len: map.length };
                map.status = code(state.objects.map(mapping));
                Ok(())
            })
        }
        abi::UnmapDma::NUMBER => with(argument, |map: &mut abi::UnmapDma| {
            let done = state.objects.unmap(map.client, map.dma, map.memory, map.va, map.size);
            map.status = code(done);
            Ok(())
        }),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn code(result: Result<(), Refusal>) -> u32 {
    result.err().unwrap_or(status::OK)
}

/// The argument as what it is; one of another length is refused, as the driver does.
fn with<C: Call>(
    argument: &mut [u8],
    body: impl FnOnce(&mut C) -> io::Result<()>,
) -> io::Result<()> {
    let mut value = C::read_from_bytes(argument).map_err(|_| io::ErrorKind::InvalidInput)?;
    body(&mut value)?;
    argument.copy_from_slice(value.as_bytes());
    Ok(())
}

fn exact<T: FromBytes>(params: Option<&[u8]>) -> Result<T, Refusal> {
    T::read_from_bytes(params.unwrap_or_default()).map_err(|_| status::INVALID_PARAM_STRUCT)
}

/// `params` with zeros up to the longest form there is, where they have this driver's length.
fn padded<T: FromBytes>(params: Option<&[u8]>, len: usize) -> Result<T, Refusal> {
    let params = params.filter(|params| params.len() == len);
    let mut bytes = params.ok_or(status::INVALID_PARAM_STRUCT)?.to_vec();
    bytes.resize(size_of::<T>(), 0);
    T::read_from_bytes(&bytes).map_err(|_| status::INVALID_PARAM_STRUCT)
}

fn make(
    state: &mut State,
    layout: &Layout,
    alloc: &abi::Alloc,
    params: Option<&[u8]>,
) -> Result<(), Refusal> {
    let mut object = Object {
        client: alloc.root,
        parent: alloc.parent,
        class: alloc.class,
        ..Default::default()
    };
    match alloc.class {
        class::DEVICE => drop(exact::<abi::DeviceParams>(params)?),
        class::SUBDEVICE => drop(exact::<u32>(params)?),
        class::VA_SPACE => {
            let params: abi::VaSpaceParams = padded(params, layout.va_space)?;
            if params.flags != 0 {
                return Err(status::INVALID_ARGUMENT);
            }
        }
        class::VIRTUAL => object.uses = vec![exact::<abi::VirtualParams>(params)?.va_space],
        class::USERMODE => object.len = 0x1_0000,
        class::VIDEO_MEMORY | class::SYSTEM_MEMORY => {
            let params: abi::MemoryParams = exact(params)?;
            if params.size == 0 || params.limit != params.size - 1 {
                return Err(status::INVALID_ARGUMENT);
            }
            object.len = params.size;
            object.read_only = params.attr2 >> 22 & 1 != 0;
            if alloc.class == class::VIDEO_MEMORY
                && state.objects.video_memory() + params.size > VIDEO_MEMORY
            {
                return Err(status::NO_MEMORY);
            }
        }
        class::OS_EVENT => drop(exact::<abi::EventParams>(params)?),
        class::EVENT_BUFFER => {
            let params: abi::EventBufferParams = exact(params)?;
            object.uses = vec![params.header_memory, params.record_memory];
            for memory in &object.uses {
                let memory = state.objects.of_class(alloc.root, *memory, class::SYSTEM_MEMORY)?;
                if !memory.read_only {
                    return Err(status::INVALID_ARGUMENT);
                }
            }
        }
        class::GROUP => {
            let params: abi::GroupParams = exact(params)?;
            if !is_engine(params.engine) {
                return Err(status::INVALID_ARGUMENT);
            }
            object.engine = params.engine;
            object.uses = vec![params.va_space];
        }
        host::CLASS => {
            let params: abi::ChannelParams = padded(params, layout.channel)?;
            if !params.gpfifo_entries.is_power_of_two() {
                return Err(status::INVALID_ARGUMENT);
            }
            if !is_harmless(params.flags) {
                state.objects.violations.push("A channel may copy physical memory".into());
            }
            if !params.userd_offset[0].is_multiple_of(512) {
                state.objects.violations.push("A USERD is not aligned".into());
            }
            object.engine = params.engine;
            object.uses = vec![params.error, params.userd_memory[0]];
        }
        compute::CLASS => {}
        copy::CLASS => {
            let channel = state.objects.of_class(alloc.root, alloc.parent, host::CLASS)?;
            if channel.engine != engine::GRAPHICS {
                let params: abi::CopyParams = exact(params)?;
                if params.version != 1 || params.engine != channel.engine {
                    return Err(status::INVALID_ARGUMENT);
                }
            }
        }
        _ => return Err(status::INVALID_CLASS),
    }
    state.objects.insert(alloc.object, object)
}

fn register(state: &mut State, alloc: &abi::AllocMemory) -> Result<(), Refusal> {
    if alloc.class != class::OS_DESCRIPTOR
        || !alloc.memory.is_multiple_of(4096)
        || !(alloc.limit + 1).is_multiple_of(4096)
    {
        return Err(status::INVALID_ARGUMENT);
    }
    let object = Object {
        client: alloc.root,
        parent: alloc.parent,
        class: alloc.class,
        len: alloc.limit + 1,
        ..Default::default()
    };
    state.objects.insert(alloc.object, object)
}

/// Gives a fresh descriptor its memory: a file of that length.
fn prepare(
    state: &mut State,
    asking: FileId,
    map: &abi::MapMemory,
) -> io::Result<Result<(), Refusal>> {
    let file = id_of_number(map.fd)?;
    let Opened { node, registered, mapped, .. } = *state.opened(file)?;
    let clock_ns = state.objects.clock_ns;
    let memory = match state.objects.get_mut(map.client, map.memory) {
        Ok(memory) => memory,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let of_the_gpu = memory.class != class::SYSTEM_MEMORY;
    let fits = map.offset == 0 && map.length <= memory.len && map.length != 0;
    let writes = map.flags & 3 != 1;
    if !fits || mapped || registered || file == asking || of_the_gpu == (node == Node::Control) {
        return Ok(Err(status::INVALID_ARGUMENT));
    }
    if memory.read_only && writes {
        return Ok(Err(status::INSUFFICIENT_PERMISSIONS));
    }
    let target = file_of_number(map.fd)?;
    target.set_len(map.length)?;
    if memory.class == class::USERMODE {
        target.write_at(&clock_ns.to_le_bytes(), CLOCK)?;
    }
    memory.view = Some(target);
    state.opened(file)?.mapped = true;
    Ok(Ok(()))
}

fn answer(
    state: &mut State,
    layout: &Layout,
    ask: &abi::Control,
    params: &mut [u8],
) -> Result<(), Refusal> {
    let (client, object) = (ask.client, ask.object);
    let of = state.objects.get(client, object)?.class;
    let write = |params: &mut [u8], bytes: &[u8]| -> Result<(), Refusal> {
        if params.len() != bytes.len() {
            return Err(status::INVALID_PARAM_STRUCT);
        }
        params.copy_from_slice(bytes);
        Ok(())
    };
    let expect = |params: &[u8], len: usize| {
        if params.len() == len { Ok(()) } else { Err(status::INVALID_PARAM_STRUCT) }
    };
    match (of, ask.command) {
        (class::CLIENT, control::ID_INFO) => expect(params, size_of::<abi::IdInfo>()),
        (class::SUBDEVICE, control::NAME_STRING) => {
            let mut name = abi::NameString::default();
            let text = b"NVIDIA H100 (fake)";
            name.text[..text.len()].copy_from_slice(text);
            write(params, name.as_bytes())
        }
        (class::SUBDEVICE, control::FB_INFO) => {
            let mut info: abi::FbInfo = exact(Some(params))?;
            for [index, value] in info.list.iter_mut().take(info.count as usize) {
                *value = if *index == fb::HEAP_SIZE { (VIDEO_MEMORY >> 10) as u32 } else { 0 };
            }
            write(params, info.as_bytes())
        }
        (class::SUBDEVICE, control::PCE_MASK) => {
            let mut pair: abi::Pair = exact(Some(params))?;
            if !is_engine(pair.first) {
                return Err(status::NOT_SUPPORTED);
            }
            pair.second = if pair.first == engine::COPY0 + 4 { 0xfff } else { 0x5 };
            write(params, pair.as_bytes())
        }
        (class::SUBDEVICE, control::SET_NOTIFICATION) => {
            expect(params, size_of::<abi::SetNotification>())
        }
        (class::SUBDEVICE, control::PREEMPTION_MODE) => {
            let mode: abi::PreemptionMode = exact(Some(params))?;
            if state.objects.computes(client, mode.object) {
                Ok(())
            } else {
                Err(status::INVALID_STATE)
            }
        }
        (class::SUBDEVICE, control::PERF_BOOST)
        | (class::EVENT_BUFFER, control::TRACE_ENABLE | control::TRACE_UPDATE_GET) => {
            expect(params, 8)
        }
        (class::GROUP, control::SET_TIMESLICE) => {
            state.objects.get_mut(client, object)?.slice_us = exact(Some(params))?;
            Ok(())
        }
        (class::SUBDEVICE, control::BIND_TRACE) => expect(params, size_of::<abi::BindTrace>()),
        (class::EVENT_BUFFER, control::TRACE_FLUSH) => expect(params, 0),
        (class::SUBDEVICE, control::DISABLE_CHANNELS) => {
            let list: abi::DisableChannels = exact(Some(params))?;
            for index in 0..(list.count as usize).min(list.channels.len()) {
                let (client, channel) = (list.clients[index], list.channels[index]);
                state.objects.disable(client, channel, list.disable != 0)?;
            }
            Ok(())
        }
        (class::GROUP, control::SCHEDULE) => {
            expect(params, layout.schedule)?;
            state.objects.get_mut(client, object)?.scheduled = params[0] != 0;
            Ok(())
        }
        (host::CLASS, control::TOKEN) => {
            let token = state.objects.token(client, object)?;
            write(params, &token.to_le_bytes())
        }
        (host::CLASS, control::RESET_CHANNEL) => {
            let reset: abi::ResetChannel = exact(Some(params))?;
            let token = state.objects.token(client, object)?;
            if reset.engine != state.objects.get(client, object)?.engine {
                return Err(status::INVALID_ARGUMENT);
            }
            state.objects.fault(token, mdev_core::abi::notifier::RESET_CHANNEL);
            Ok(())
        }
        (host::CLASS, control::MMU_FAULT) => expect(params, size_of::<abi::MmuFault>()),
        _ => Err(status::NOT_SUPPORTED),
    }
}

// The places that `describe` reads.
const _: () = {
    assert!(offset_of!(abi::Alloc, class) == 12 && offset_of!(abi::Control, command) == 8);
    assert!(offset_of!(abi::Free, object) == 8);
};
