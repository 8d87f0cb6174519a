//! Allocations of the fake driver: objects, guest memory and CPU mappings.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::abi;
use crate::numbers::{class, engine, flag, status};
use crate::rm::Node;
use crate::version::Layout;
use mdev_core::abi::{compute, copy, host};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::objects::{CLOCK, DEFAULT_BASE, Object, Refusal, denies_privileges, is_engine};
use super::params::{exact, padded};
use super::{FileId, OpenFile, State, VIDEO_MEMORY, file_of_number, id_of_number};

/// Allocates an object.
pub fn alloc(
    state: &mut State,
    layout: &Layout,
    alloc: &abi::Alloc,
    params: Option<&[u8]>,
) -> Result<(), Refusal> {
    let class = state.generation().class_of_hopper(alloc.class).ok_or(status::INVALID_CLASS)?;
    if state.no_memory.0 == class && state.no_memory.1 > 0 {
        state.no_memory.1 -= 1;
        return Err(status::NO_MEMORY);
    }
    let mut object =
        Object { client: alloc.root, parent: alloc.parent, class, ..Default::default() };
    match class {
        class::DEVICE => drop(exact::<abi::DeviceParams>(params)?),
        class::SUBDEVICE => drop(exact::<u32>(params)?),
        class::VA_SPACE => {
            let params: abi::VaSpaceParams = padded(params, layout.va_space)?;
            if params.flags != 0 {
                return Err(status::INVALID_ARGUMENT);
            }
            object.base = if params.base == 0 { DEFAULT_BASE } else { params.base };
        }
        class::VIRTUAL => object.uses = vec![exact::<abi::VirtualParams>(params)?.va_space],
        class::USERMODE => object.len = 0x1_0000,
        class::VIDEO_MEMORY | class::SYSTEM_MEMORY => {
            alloc_memory(state, &mut object, &exact(params)?)?;
        }
        class::OS_EVENT => {
            let params: abi::EventParams = exact(params)?;
            // Not a descriptor of the caller.
            let file = state.event_files.get(&(alloc.root, params.data as u32));
            object.event = Some((*file.ok_or(status::OBJECT_NOT_FOUND)?, params.index));
        }
        class::DEBUGGER => {
            let params: abi::DebuggerParams = exact(params)?;
            state.objects.of_class(params.client, params.object, compute::CLASS)?;
            object.uses = vec![params.object];
        }
        class::EVENT_BUFFER => alloc_event_buffer(state, &mut object, &exact(params)?)?,
        class::GROUP => {
            let params: abi::GroupParams = exact(params)?;
            if !is_engine(params.engine) {
                return Err(status::INVALID_ARGUMENT);
            }
            object.engine = params.engine;
            object.uses.extend((params.va_space != 0).then_some(params.va_space));
        }
        class::CONTEXT_SHARE => {
            let params: abi::ContextShareParams = exact(params)?;
            object.uses = vec![params.va_space];
        }
        host::CLASS => alloc_channel(state, &mut object, &padded(params, layout.channel)?)?,
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

fn alloc_memory(
    state: &State,
    object: &mut Object,
    params: &abi::MemoryParams,
) -> Result<(), Refusal> {
    if params.size == 0 || params.limit != params.size - 1 {
        return Err(status::INVALID_ARGUMENT);
    }
    object.len = params.size;
    if object.class == class::VIDEO_MEMORY
        && let Ok(contents) = memfd_create("vram", MFdFlags::MFD_CLOEXEC)
    {
        let contents = File::from(contents);
        contents.set_len(params.size).map_err(|_| status::NO_MEMORY)?;
        object.contents = Some(contents);
    }
    object.read_only = params.attr2 >> 22 & 1 != 0;
    if object.class == class::VIDEO_MEMORY
        && state.objects.video_memory() + params.size > VIDEO_MEMORY
    {
        return Err(status::NO_MEMORY);
    }
    Ok(())
}

fn alloc_event_buffer(
    state: &State,
    object: &mut Object,
    params: &abi::EventBufferParams,
) -> Result<(), Refusal> {
    object.uses = vec![params.header_memory, params.record_memory];
    for memory in &object.uses {
        let memory = state.objects.of_class(object.client, *memory, class::SYSTEM_MEMORY)?;
        if !memory.read_only {
            return Err(status::INVALID_ARGUMENT);
        }
    }
    Ok(())
}

fn alloc_channel(
    state: &mut State,
    object: &mut Object,
    params: &abi::ChannelParams,
) -> Result<(), Refusal> {
    if !params.gpfifo_entries.is_power_of_two() {
        return Err(status::INVALID_ARGUMENT);
    }
    if !denies_privileges(params.flags) {
        state.objects.violations.push("A channel may copy physical memory".into());
    }
    if !params.userd_offset[0].is_multiple_of(512) {
        state.objects.violations.push("A USERD is not aligned".into());
    }
    object.engine = params.engine;
    object.second_runqueue = params.flags & flag::SECOND_RUNQUEUE != 0;
    object.uses = vec![params.error, params.userd_memory[0]];
    let group = state.objects.of_class(object.client, object.parent, class::GROUP)?;
    match params.context_share {
        // One of the two says what the channel sees.
        0 if group.uses.is_empty() => return Err(status::INVALID_ARGUMENT),
        0 => {}
        share => {
            let found = state.objects.of_class(object.client, share, class::CONTEXT_SHARE)?;
            if found.parent != object.parent {
                return Err(status::INVALID_OBJECT_PARENT);
            }
            object.uses.push(share);
        }
    }
    object.gpfifo = (params.gpfifo, params.gpfifo_entries);
    object.userd_offset = params.userd_offset[0];
    Ok(())
}

/// Creates a memory object from pages of the caller.
pub fn register_memory(state: &mut State, alloc: &abi::AllocMemory) -> Result<(), Refusal> {
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
        address: alloc.memory,
        ..Default::default()
    };
    state.objects.insert(alloc.object, object)
}

/// Prepares a descriptor for `mmap` of a memory object: sets the length of the file.
pub fn prepare_mmap(
    state: &mut State,
    caller: FileId,
    map: &abi::MapMemory,
) -> io::Result<Result<(), Refusal>> {
    let file = id_of_number(map.fd)?;
    let OpenFile { node, registered, mapped, .. } = *state.open_file(file)?;
    let clock_ns = state.objects.clock_ns;
    // The one rule that is about processes.
    if !state.objects.is_made_by(map.client, state.process) {
        return Ok(Err(status::INVALID_CLIENT));
    }
    let memory = match state.objects.get_mut(map.client, map.memory) {
        Ok(memory) => memory,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let on_gpu = memory.class != class::SYSTEM_MEMORY;
    let fits = map.offset == 0 && map.length <= memory.len && map.length != 0;
    let writable = map.flags & 3 != 1;
    if !fits || mapped || registered || file == caller || on_gpu == (node == Node::Control) {
        return Ok(Err(status::INVALID_ARGUMENT));
    }
    if memory.read_only && writable {
        return Ok(Err(status::INSUFFICIENT_PERMISSIONS));
    }
    let target = file_of_number(map.fd)?;
    target.set_len(map.length)?;
    if memory.class == class::USERMODE {
        target.write_at(&clock_ns.to_le_bytes(), CLOCK)?;
    }
    memory.mapped_file = Some(target);
    state.open_file(file)?.mapped = true;
    Ok(Ok(()))
}
