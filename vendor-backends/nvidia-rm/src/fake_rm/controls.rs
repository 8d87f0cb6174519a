//! Controls of the fake driver.

use std::mem::size_of;

use crate::abi;
use crate::controls::params_bytes;
use crate::generation::CLASS_LIST;
use crate::numbers::{class, control, engine, fb, status};
use crate::version::Layout;
use mdev_core::abi::host;
use zerocopy::IntoBytes;

use super::objects::{Refusal, is_engine};
use super::params::{exact, expect_size, padded, write_exact};
use super::{State, VIDEO_MEMORY};

/// Number of the multiprocessor that has an error.
pub const FAILED_MULTIPROCESSOR: u32 = 131;

/// Executes a control of an object.
pub fn control(
    state: &mut State,
    layout: &Layout,
    call: &abi::Control,
    params: &mut [u8],
) -> Result<(), Refusal> {
    // As in the driver, the length is that of the series.
    if let Some(bytes) = params_bytes(call.command, layout) {
        expect_size(params, bytes)?;
    }
    match state.objects.get(call.client, call.object)?.class {
        class::CLIENT if call.command == control::ID_INFO => Ok(()),
        class::DEVICE if call.command == CLASS_LIST => {
            params.copy_from_slice(&state.generation().list()[..params.len()]);
            Ok(())
        }
        class::SUBDEVICE => control_subdevice(state, call, params),
        class::EVENT_BUFFER => control_event_buffer(state, call, params),
        class::GROUP => control_group(state, layout, call, params),
        class::DEBUGGER => control_debugger(state, call, params),
        host::CLASS => control_channel(state, call, params),
        _ => Err(status::NOT_SUPPORTED),
    }
}

fn control_subdevice(
    state: &mut State,
    call: &abi::Control,
    params: &mut [u8],
) -> Result<(), Refusal> {
    match call.command {
        control::NAME_STRING => {
            let mut name = abi::NameString::default();
            let text = b"NVIDIA H100 (fake)";
            name.text[..text.len()].copy_from_slice(text);
            params.copy_from_slice(&name.as_bytes()[..params.len()]);
            Ok(())
        }
        control::FB_INFO => {
            let mut info: abi::FbInfo = padded(Some(params), params.len())?;
            for [index, value] in info.list.iter_mut().take(info.count as usize) {
                *value = if *index == fb::HEAP_SIZE { (VIDEO_MEMORY >> 10) as u32 } else { 0 };
            }
            params.copy_from_slice(&info.as_bytes()[..params.len()]);
            Ok(())
        }
        control::PCE_MASK => {
            let mut pair: abi::Pair = exact(Some(params))?;
            if !is_engine(pair.first) {
                return Err(status::NOT_SUPPORTED);
            }
            pair.second = if pair.first == engine::COPY0 + 4 { 0xfff } else { 0x5 };
            write_exact(params, pair.as_bytes())
        }
        control::COPY_ENGINE_CAPS => {
            let mut pair: abi::Pair = exact(Some(params))?;
            if !is_engine(pair.first) {
                return Err(status::NOT_SUPPORTED);
            }
            // As on a Hopper GPU, the first two take turns with the compute engine.
            pair.second = u32::from(pair.first < engine::COPY0 + 2);
            write_exact(params, pair.as_bytes())
        }
        control::SET_NOTIFICATION => expect_size(params, size_of::<abi::SetNotification>()),
        control::PREEMPTION_MODE => {
            let mode: abi::PreemptionMode = exact(Some(params))?;
            if state.objects.computes(call.client, mode.object) {
                Ok(())
            } else {
                Err(status::INVALID_STATE)
            }
        }
        control::PERF_BOOST => expect_size(params, 8),
        control::BIND_CTXSW_LOG => expect_size(params, size_of::<abi::BindCtxswLog>()),
        control::UTILIZATION_SAMPLES if !state.utilization.is_empty() => {
            let mut all: Box<abi::UtilizationSamples> = Box::new(exact(Some(params))?);
            if (all.kind, all.bytes)
                != (abi::UtilizationSamples::PERFMON, size_of_val(&all.samples) as u32)
            {
                return Err(status::INVALID_ARGUMENT);
            }
            let kept = state.utilization.iter().rev().take(all.samples.len());
            for (slot, sample) in all.samples.iter_mut().zip(kept) {
                *slot = *sample;
            }
            write_exact(params, all.as_bytes())
        }
        control::DISABLE_CHANNELS => {
            let list: abi::DisableChannels = exact(Some(params))?;
            for index in 0..(list.count as usize).min(list.channels.len()) {
                let (client, channel) = (list.clients[index], list.channels[index]);
                let how = (list.disable != 0, list.rewind != 0);
                state.objects.disable(client, channel, how, state.process)?;
            }
            Ok(())
        }
        _ => Err(status::NOT_SUPPORTED),
    }
}

fn control_event_buffer(
    state: &mut State,
    call: &abi::Control,
    params: &mut [u8],
) -> Result<(), Refusal> {
    match call.command {
        control::EVENT_BUFFER_ENABLE | control::EVENT_BUFFER_UPDATE_GET => expect_size(params, 8),
        control::EVENT_BUFFER_FLUSH => {
            state.objects.serve_probes();
            expect_size(params, 0)
        }
        _ => Err(status::NOT_SUPPORTED),
    }
}

fn control_group(
    state: &mut State,
    layout: &Layout,
    call: &abi::Control,
    params: &mut [u8],
) -> Result<(), Refusal> {
    let group = state.objects.get_mut(call.client, call.object)?;
    match call.command {
        control::SET_TIMESLICE => group.timeslice_us = exact(Some(params))?,
        control::SCHEDULE => {
            expect_size(params, layout.schedule)?;
            let scheduled = params[0] != 0;
            state.objects.schedule(call.client, call.object, scheduled)?;
        }
        _ => return Err(status::NOT_SUPPORTED),
    }
    Ok(())
}

fn control_debugger(
    state: &mut State,
    call: &abi::Control,
    params: &mut [u8],
) -> Result<(), Refusal> {
    match call.command {
        control::EXCEPTION_MASK => {
            state.objects.get_mut(call.client, call.object)?.exception_mask = exact(Some(params))?;
            Ok(())
        }
        control::ERROR_STATES => {
            let mut read: abi::ErrorStates = exact(Some(params))?;
            let channel = state.objects.of_class(call.client, read.channel, host::CLASS)?;
            let states = read.states.iter_mut().zip(read.first..);
            for (error, number) in states.take(read.count as usize) {
                // An error of one multiprocessor, and addresses of the last kernel that had one.
                error.warp_esr = if number == FAILED_MULTIPROCESSOR { 0x10 } else { 0 };
                (error.warp_pc, error.warp_pc64, error.address) = (0x100, 0x100, 0x7f00_0000);
            }
            read.fault_valid = channel.faulted.into();
            write_exact(params, read.as_bytes())
        }
        control::CLEAR_ERROR_STATES => {
            let clear: abi::Pair = exact(Some(params))?;
            state.objects.of_class(call.client, clear.first, host::CLASS).map(drop)
        }
        _ => Err(status::NOT_SUPPORTED),
    }
}

fn control_channel(
    state: &mut State,
    call: &abi::Control,
    params: &mut [u8],
) -> Result<(), Refusal> {
    let (client, object) = (call.client, call.object);
    match call.command {
        control::TOKEN => {
            let token = state.objects.token(client, object)?;
            write_exact(params, &token.to_le_bytes())
        }
        control::RESET_CHANNEL => {
            let reset: abi::ResetChannel = exact(Some(params))?;
            let token = state.objects.token(client, object)?;
            if reset.engine != state.objects.get(client, object)?.engine {
                return Err(status::INVALID_ARGUMENT);
            }
            state.objects.fault(token, mdev_core::abi::notifier::RESET_CHANNEL);
            Ok(())
        }
        control::MMU_FAULT => expect_size(params, size_of::<abi::MmuFault>()),
        _ => Err(status::NOT_SUPPORTED),
    }
}
