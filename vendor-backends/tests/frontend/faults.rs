//! What programs learn of the cause of a channel's error.

use crate::NOT_SUPPORTED;
use crate::program::{Context, Program, word};

const READ_STATES: u32 = 0x83de_030c;
const CLEAR_STATES: u32 = 0x83de_0310;
const DEBUGGER: u32 = 0x83de;

/// Checks what a program reads after a fault of one of its channels.
pub fn the_cause_is_told(program: &mut Program, context: Context, channel: u32) {
    const FAULT_VALID: usize = 4812 / 4;
    let (root, device) = (context.root, context.device);
    let debugger = program.new_object(root, device, 0x70, DEBUGGER, &[0; 12]);
    let mut params = vec![0xff; 4824];
    params[..4].copy_from_slice(&channel.to_le_bytes());
    let (status, states) = program.control(root, debugger, READ_STATES, &params);
    assert_eq!((status, word(&states, FAULT_VALID)), (0, 1));
    // No multiprocessor has an error of its own.
    assert!(states[8..4808].iter().all(|byte| *byte == 0));
    assert_eq!(program.control(root, debugger, CLEAR_STATES, &channel.to_le_bytes()).0, 0);

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
