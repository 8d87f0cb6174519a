//! Ioctls of the fake driver.

use std::collections::btree_map::Entry;
use std::io;
use std::mem::{offset_of, size_of};

use zerocopy::IntoBytes;

use super::allocations::{alloc, prepare_mmap, register_memory};
use super::controls::control;
use super::objects::{Mapping, Refusal};
use super::{FileId, State, id_of_number};
use crate::nvidia::rm::{Node, Request};
use crate::nvidia::sys::abi::{self, Call, MapDmaForm};
use crate::nvidia::sys::numbers::{class, flag, status};
use crate::nvidia::version::Layout;

/// Describes a request for the log, without addresses and descriptors.
pub fn describe(request: &Request<'_>) -> String {
    let word = |at: usize| {
        let bytes = request.argument.get(at..at + 4).and_then(|b| b.try_into().ok());
        bytes.map_or(0, u32::from_le_bytes)
    };
    let params = request.params.as_ref().map_or(0, |(_, params)| params.len());
    match request.number {
        abi::Alloc::NUMBER => format!("class {:#x} params {params}", word(12)),
        abi::Control::NUMBER => {
            let first = request.params.as_ref().and_then(|(_, params)| params.first());
            format!("{:#x} params {params} first {}", word(8), first.copied().unwrap_or_default())
        }
        abi::MapDma::NUMBER => format!("{} bytes", request.argument.len()),
        abi::Free::NUMBER => format!("{:#x}", word(8)),
        _ => String::new(),
    }
}

/// Executes a request on a file. A refusal sets the status in the argument, as the driver does.
pub fn execute(
    state: &mut State,
    layout: &Layout,
    file: FileId,
    request: &mut Request<'_>,
) -> io::Result<()> {
    let node = state.open_file(file)?.node;
    let argument = &mut *request.argument;
    match request.number {
        abi::CardInfos::NUMBER => with(argument, |infos: &mut abi::CardInfos| {
            infos.cards[0] =
                abi::CardInfo { valid: 1, pci_bus: 0x3b, gpu_id: 0x3b00, ..Default::default() };
            Ok(())
        }),
        abi::RegisterFd::NUMBER => with(argument, |register: &mut abi::RegisterFd| {
            let control = id_of_number(register.control)?;
            if state.open_file(control)?.node != Node::Control {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            state.open_file(file)?.registered = true;
            Ok(())
        }),
        abi::AllocOsEvent::NUMBER => with(argument, |event: &mut abi::AllocOsEvent| {
            event.status = match state.event_files.entry((event.client, event.fd)) {
                _ if node != Node::Event => status::INVALID_ARGUMENT,
                Entry::Occupied(_) => status::INSUFFICIENT_RESOURCES,
                Entry::Vacant(place) => {
                    place.insert(file);
                    status::OK
                }
            };
            Ok(())
        }),
        abi::GetEventData::NUMBER => {
            let data = state.take_event(file);
            let params = request.params.as_mut().map(|(_, params)| &mut **params);
            if let (Some(data), Some(params)) = (data, params) {
                params.copy_from_slice(data.as_bytes());
            }
            with(argument, |get: &mut abi::GetEventData| {
                get.status = if data.is_some() { status::OK } else { status::OBJECT_NOT_FOUND };
                Ok(())
            })
        }
        abi::AllocMemory::NUMBER => with(argument, |alloc: &mut abi::AllocMemory| {
            if node == Node::Control || !state.open_file(file)?.registered {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            alloc.status = status_of(register_memory(state, alloc));
            Ok(())
        }),
        _ if node != Node::Control => Err(io::ErrorKind::InvalidInput.into()),
        _ => execute_on_control(state, layout, file, request),
    }
}

/// Executes a request that needs a control file.
fn execute_on_control(
    state: &mut State,
    layout: &Layout,
    file: FileId,
    request: &mut Request<'_>,
) -> io::Result<()> {
    let params = request.params.as_mut().map(|(_, params)| &mut **params);
    let argument = &mut *request.argument;
    match request.number {
        abi::Free::NUMBER => with(argument, |free: &mut abi::Free| {
            let owned = state.objects.check_file(free.root, file);
            let done = owned.and_then(|()| state.objects.free(free.root, free.object));
            free.status = status_of(done);
            Ok(())
        }),
        abi::Alloc::NUMBER => with(argument, |call: &mut abi::Alloc| {
            if call.class == class::CLIENT {
                call.object = state.objects.new_client(file, state.process);
                return Ok(());
            }
            let owned = state.objects.check_file(call.root, file);
            let done = owned.and_then(|()| alloc(state, layout, call, params.as_deref()));
            call.status = status_of(done);
            Ok(())
        }),
        abi::Control::NUMBER => with(argument, |call: &mut abi::Control| {
            let owned = state.objects.check_file(call.client, file);
            let params = params.unwrap_or_default();
            call.status = status_of(owned.and_then(|()| control(state, layout, call, params)));
            Ok(())
        }),
        abi::MapMemory::NUMBER => with(argument, |map: &mut abi::MapMemory| {
            map.status = match state.objects.check_file(map.client, file) {
                Ok(()) => status_of(prepare_mmap(state, file, map)?),
                Err(refusal) => refusal,
            };
            Ok(())
        }),
        abi::MapDma::NUMBER if argument.len() != layout.map_dma => {
            Err(io::ErrorKind::InvalidInput.into())
        }
        abi::MapDma::NUMBER if argument.len() == size_of::<abi::MapDma570>() => {
            map_dma::<abi::MapDma570>(state, argument)
        }
        abi::MapDma::NUMBER => map_dma::<abi::MapDma>(state, argument),
        abi::UnmapDma::NUMBER => with(argument, |map: &mut abi::UnmapDma| {
            let done = state.objects.unmap(map.client, map.dma, map.memory, map.va, map.size);
            map.status = status_of(done);
            Ok(())
        }),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn map_dma<P: MapDmaForm>(state: &mut State, argument: &mut [u8]) -> io::Result<()> {
    with(argument, |map: &mut P| {
        let abi::DmaMapping { client, dma, memory, va, offset, length, flags, .. } = map.mapping();
        let gpu_caches = flags & flag::GPU_CACHES != 0;
        let (space, len) = (dma, length);
        let mapping = Mapping { client, space, memory, va, len, offset, gpu_caches };
        map.set_status(status_of(state.objects.map(mapping)));
        Ok(())
    })
}

fn status_of(result: Result<(), Refusal>) -> u32 {
    result.err().unwrap_or(status::OK)
}

/// Calls `body` with the argument. Refuses an argument of another size, as the driver does.
fn with<C: Call>(
    argument: &mut [u8],
    body: impl FnOnce(&mut C) -> io::Result<()>,
) -> io::Result<()> {
    let mut value = C::read_from_bytes(argument).map_err(|_| io::ErrorKind::InvalidInput)?;
    body(&mut value)?;
    argument.copy_from_slice(value.as_bytes());
    Ok(())
}

// Offsets that `describe` reads.
const _: () = {
    assert!(offset_of!(abi::Alloc, class) == 12 && offset_of!(abi::Control, command) == 8);
    assert!(offset_of!(abi::Free, object) == 8);
};
