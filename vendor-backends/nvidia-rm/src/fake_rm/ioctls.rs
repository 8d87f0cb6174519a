//! Ioctls of the fake driver.

use std::collections::btree_map::Entry;
use std::io;
use std::mem::size_of;

use crate::abi::{self, Call};
use crate::numbers::{class, flag, status};
use crate::rm::{Node, Request};
use crate::version::Layout;
use zerocopy::IntoBytes;

use super::allocations::{alloc, prepare_mmap, register_memory};
use super::controls::control;
use super::objects::{Mapping, Refusal};
use super::{FileId, State, id_of_number};

/// Describes a request for the log, without addresses and descriptors.
pub fn describe(request: &Request<'_>) -> String {
    fn read<C: Call>(argument: &[u8]) -> C {
        C::read_from_bytes(argument).unwrap_or_else(|_| C::new_zeroed())
    }
    let params = request.params.as_ref().map_or(0, |(_, params)| params.len());
    match request.number {
        abi::Alloc::NUMBER => {
            let abi::Alloc { class, .. } = read(request.argument);
            format!("class {class:#x} params {params}")
        }
        abi::Control::NUMBER => {
            let first = request.params.as_ref().and_then(|(_, params)| params.first());
            let (abi::Control { command, .. }, first) =
                (read(request.argument), first.copied().unwrap_or_default());
            format!("{command:#x} params {params} first {first}")
        }
        abi::MapDma::NUMBER => format!("{} bytes", request.argument.len()),
        abi::Free::NUMBER => format!("{:#x}", read::<abi::Free>(request.argument).object),
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
            with(argument, |map: &mut abi::MapDma570| {
                map.status = map_dma(state, &(*map).into());
                Ok(())
            })
        }
        abi::MapDma::NUMBER => with(argument, |map: &mut abi::MapDma| {
            map.status = map_dma(state, map);
            Ok(())
        }),
        abi::UnmapDma::NUMBER => with(argument, |map: &mut abi::UnmapDma| {
            let done = state.objects.unmap(map.client, map.dma, map.memory, map.va, map.size);
            map.status = status_of(done);
            Ok(())
        }),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn map_dma(state: &mut State, map: &abi::MapDma) -> u32 {
    let &abi::MapDma { client, dma: space, memory, va, offset, length: len, flags, .. } = map;
    let gpu_caches = flags & flag::GPU_CACHES != 0;
    status_of(state.objects.map(Mapping { client, space, memory, va, len, offset, gpu_caches }))
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
