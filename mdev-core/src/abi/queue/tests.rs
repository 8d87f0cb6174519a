//! The structures against the C header of the guest driver.

use super::*;
use crate::abi::control;

/// Sizes that a C compiler gives the structures of the header.
#[test]
fn structures_have_the_sizes_of_the_header() {
    let sizes = [
        (size_of::<Submission>(), 32),
        (size_of::<Completion>(), 32),
        (size_of::<Request>(), 16),
        (size_of::<Welcome>(), 48),
        (size_of::<Call>(), 32),
        (size_of::<ProcFile>(), 16),
        (size_of::<Open>(), 32),
        (size_of::<Opened>(), 16),
        (size_of::<Memory>(), 40),
        (size_of::<List>(), PAGE_BYTES),
        (size_of::<Ioctl>(), 1520),
        (size_of::<Fetch>(), 728),
        (size_of::<Place>(), 32),
        (size_of::<Done>(), 792),
        (size_of::<Map>(), 40),
        (size_of::<Mapped>(), 32),
        (size_of::<Withdrawn>(), 24),
    ];
    assert!(sizes.iter().all(|(rust, c)| rust == c), "{sizes:?}");
}

#[test]
fn constants_are_those_of_the_header() {
    let header = include_str!("../../../../qemu-integration/guest-driver/tessera_queue.h");
    let value = |name: &str| {
        let line = header.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            let defines = words.next() == Some("#define") && words.next() == Some(name);
            defines.then(|| words.next().unwrap_or_default().trim_end_matches('u'))
        });
        let text = line.unwrap_or_else(|| panic!("{name} is missing"));
        match text.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).unwrap(),
            None => text.parse().unwrap(),
        }
    };
    let constants = [
        ("TSQ_VERSION", VERSION.into()),
        ("TSQ_SUBMISSIONS", SUBMISSIONS),
        ("TSQ_COMPLETIONS_PER_SLOT", COMPLETIONS_PER_SLOT.into()),
        ("TSQ_PAGE_BYTES", PAGE_BYTES as u64),
        ("TSQ_MAX_PAGES", MAX_PAGES as u64),
        ("TSQ_MAX_BLOCKS", MAX_BLOCKS as u64),
        ("TSQ_MAX_FILES", MAX_FILES as u64),
        ("TSQ_MAX_MEMORIES", MAX_MEMORIES as u64),
        ("TSQ_MAX_FETCHES", MAX_FETCHES as u64),
        ("TSQ_LIST_RANGES", LIST_RANGES as u64),
        ("TSQ_STATE_RUNNING", State::Running as u64),
        ("TSQ_STATE_FAILED", State::Failed as u64),
        ("TSQ_ERROR_HOST", Failure::Host as u64),
        ("TSQ_OP_HELLO", op::HELLO.into()),
        ("TSQ_OP_WITHDRAWN", op::WITHDRAWN.into()),
        ("TSQ_COMPLETION_WITHDRAW", completion::WITHDRAW.into()),
        ("TSQ_MAPPED_MEMORY", mapped::MEMORY.into()),
        ("TSQ_MEMORY_PINNED", PINNED.into()),
        ("TSQ_NODE_UVM", node::UVM.into()),
        ("TSQ_REG_CHECKPOINT_REQUEST", control::reg::CHECKPOINT_REQUEST),
        ("TSQ_REG_CHECKPOINT_STATE", control::reg::CHECKPOINT_STATE),
        ("TSQ_REG_CHECKPOINT_REASON", control::reg::CHECKPOINT_REASON),
        ("TSQ_MINOR_CHECKPOINT", control::MINOR_CHECKPOINT.into()),
        ("TSQ_CHECKPOINT_WANTED", control::CHECKPOINT_WANTED.into()),
        ("TSQ_CHECKPOINT_STATE_REFUSED", control::CheckpointState::Refused as u64),
        ("TSQ_CHECKPOINT_REASON_BYTES", control::CHECKPOINT_REASON_BYTES as u64),
    ];
    for (name, expected) in constants {
        assert_eq!(value(name), expected, "{name}");
    }
}
