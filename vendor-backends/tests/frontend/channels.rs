//! Channels that end before their objects.

use mdev_core::gpu::Client;
use mdev_core::units::{MIB, PAGE_SIZE};
use programs::FrontEnd;

use crate::program::{CONTROL, Context, Program, memory_params, word, words};
use crate::{PROGRAM_VA, warnings};

const RESET: u32 = 0x906f_0102;

/// A program with a channel in an address space of its own.
fn with_channel(program: &mut Program) -> Context {
    let context = program.context();
    let (root, device) = (context.root, context.device);
    let ring = program.new_object(root, device, 0x20, 0x40, &memory_params(2 * MIB, 2 * MIB));
    program.control(root, root, 0xd01, &words(&[ring, 0, 0]));
    program.map(root, ring, 2 * MIB);
    assert_eq!(program.map_for_gpu(root, ring, PROGRAM_VA, 2 * MIB), 0);
    let group = words(&[0, 0, context.space, 9, 0]);
    program.new_object(root, device, 0x30, 0xa06c, &group);
    add_channel(program, context, 0x32);
    context
}

/// Creates a channel in the address space.
fn add_channel(program: &mut Program, context: Context, handle: u32) {
    let mut params = vec![0; 368];
    for (at, value) in [(16, 1024), (32, 0x20), (64, 2 * PAGE_SIZE as u32)] {
        params[at..at + 4].copy_from_slice(&u32::to_le_bytes(value));
    }
    params[8..16].copy_from_slice(&PROGRAM_VA.to_le_bytes());
    program.new_object(context.root, 0x30, handle, 0xc86f, &params);
}

fn free(program: &mut Program, root: u32, handle: u32) {
    let argument = words(&[root, root, handle, 0xffff]);
    let done = program.ioctl_with(CONTROL, 0xc010_4629, argument, None, &[]);
    assert_eq!((done.errno, word(&done.argument, 3)), (0, 0));
}

#[test]
fn an_address_space_may_end_before_its_channels() {
    let mut program = Program::start();
    let context = with_channel(&mut program);
    let logged = warnings::of(|| {
        free(&mut program, context.root, context.space);
        free(&mut program, context.root, 0x32);
        program.front_end.close(&mut program.client, CONTROL);
    });
    assert!(logged.is_empty(), "{logged:?}");
}

#[test]
fn a_channel_that_was_reset_ends_once() {
    let mut program = Program::start();
    let context = with_channel(&mut program);
    assert_eq!(program.control(context.root, 0x32, RESET, &[0; 8]).0, 0);
    assert_eq!(program.control(context.root, 0x32, RESET, &[0; 8]).0, 0);
    // It may have the id of the first.
    add_channel(&mut program, context, 0x33);
    let logged = warnings::of(|| free(&mut program, context.root, 0x32));
    assert!(logged.is_empty(), "{logged:?}");
    assert_eq!(program.client.usage().unwrap().channels, 1);
}
