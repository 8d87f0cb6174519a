//! What programs learn of the cause of a channel's error.

use crate::copies::Copies;
use crate::program::{CONTROL_FD, Context, GPU_FD, Program, word, words};
use crate::{NOT_SUPPORTED, PROGRAM_VA};

const READ_STATES: u32 = 0x83de_030c;
const CLEAR_STATES: u32 = 0x83de_0310;
const WATCH: u32 = 0x83de_0309;
const DEBUGGER: u32 = 0x83de;

/// Handles of the object for copies, and of another group's channel and its object for kernels.
const COPIES: u32 = 0x33;
const CHANNEL_FOR_KERNELS: u32 = 0x72;
const KERNELS: u32 = 0x73;

/// Creates another group with a channel, and events of both groups' channels.
pub fn with_events(program: &mut Program, copies: &Copies) {
    let Context { root, device, space, .. } = copies.context;
    let group = program.new_object(root, device, 0x71, 0xa06c, &words(&[0, 0, space, 1, 0]));
    let mut params = vec![0; 368];
    for (at, value) in [(16, 1024), (32, 0x20), (64, 0x3000)] {
        params[at..at + 4].copy_from_slice(&u32::to_le_bytes(value));
    }
    params[8..16].copy_from_slice(&(PROGRAM_VA + 0x1_0000).to_le_bytes());
    program.new_object(root, group, CHANNEL_FOR_KERNELS, 0xc86f, &params);
    program.new_object(root, CHANNEL_FOR_KERNELS, KERNELS, 0xcbc0, &[]);
    for (parent, handle, fd) in [(COPIES, 0x74, CONTROL_FD), (KERNELS, 0x75, GPU_FD)] {
        let event = words(&[root, 0, 0x79, 0x3000_0001, fd, 0]);
        program.new_object(root, parent, handle, 0x79, &event);
    }
}

/// Checks what a program reads after a fault of one of its channels.
pub fn the_cause_is_told(program: &mut Program, context: Context, channel: u32) {
    const FAULT_VALID: usize = 4812 / 4;
    let (root, device) = (context.root, context.device);
    for object in [0, COPIES, device] {
        let refused = program.alloc(root, device, 0x70, DEBUGGER, &words(&[0, root, object])).0;
        assert_ne!(refused, 0, "{object:#x} executes no kernels");
    }
    let of_kernels = words(&[0, root, KERNELS]);
    let debugger = program.new_object(root, device, 0x70, DEBUGGER, &of_kernels);
    assert_eq!(program.control(root, debugger, WATCH, &words(&[0x3a])).0, 0);
    assert_ne!(program.control(root, device, WATCH, &words(&[0x3a])).0, 0);
    let mut params = vec![0xff; 4824];
    params[..4].copy_from_slice(&channel.to_le_bytes());
    let (status, states) = program.control(root, debugger, READ_STATES, &params);
    assert_eq!((status, word(&states, FAULT_VALID)), (0, 1));
    // No multiprocessor has an error of its own.
    assert!(states[8..4808].iter().all(|byte| *byte == 0));
    assert_eq!(program.control(root, debugger, CLEAR_STATES, &words(&[channel, 132])).0, 0);
    params[..4].copy_from_slice(&CHANNEL_FOR_KERNELS.to_le_bytes());
    assert_ne!(program.control(root, debugger, READ_STATES, &params).0, 0, "it has no error");

    // Another length, and what is no channel.
    assert_ne!(program.control(root, debugger, READ_STATES, &params[..4816]).0, 0);
    params[..4].copy_from_slice(&debugger.to_le_bytes());
    assert_ne!(program.control(root, debugger, READ_STATES, &params).0, 0);
}

#[test]
fn sensors_are_not_supported_and_are_no_surprise() {
    const NVLINK_CAPS: u32 = 0x2080_3001;
    let mut program = Program::start();
    let context = program.context();
    let (root, subdevice) = (context.root, context.subdevice);
    let before = program.front_end.refused();
    for sensor in [0x2080_0513, 0x2080_852f, 0x2080_a613, 0x2080_a61f] {
        assert_eq!(program.control(root, subdevice, sensor, &[0; 16]).0, NOT_SUPPORTED);
    }
    // A vGPU has no links to other GPUs.
    let (status, caps) = program.control(root, subdevice, NVLINK_CAPS, &[0xff; 48]);
    assert_eq!((status, caps), (0, vec![0; 48]));
    assert_eq!(program.front_end.refused(), before);
}
