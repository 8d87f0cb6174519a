//! Sandbox of workers and GPU processes: no access to the filesystem, no new privileges, no signals
//! to other processes, and no system call that they do not need ([`system_calls`]).
//!
//! The processes receive everything they need as descriptors. A process that a guest has
//! compromised can open no file, make no socket, run no program, and neither trace, signal, limit
//! nor reschedule other processes.

pub mod system_calls;

use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, BitFlags, Ruleset, RulesetAttr, RulesetCreatedAttr, Scope,
    make_bitflags, path_beneath_rules,
};

use system_calls::Role;
use vendor_backends::backend::WorkerFiles;

/// Access to the files that stay accessible.
const OPEN: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | WriteFile});

/// Enters the sandbox with `files` that can still be opened, as far as the kernel supports Landlock
/// (landlock(7)) and filters of system calls (seccomp(2)).
pub fn enter(role: Role, files: &[PathBuf]) {
    restrict_files(files);
    if let Err(error) = system_calls::restrict(role) {
        log::warn!("Cannot restrict system calls: {error}");
    }
}

/// Enters the sandbox of an anchor, which can read and run what is in `programs`. Its workers open
/// `files`.
pub fn enter_anchor(programs: &[PathBuf], files: &WorkerFiles) {
    let access = make_bitflags!(AccessFs::{ReadFile | Execute});
    let device = make_bitflags!(AccessFs::{ReadFile | WriteFile | IoctlDev});
    // A new process has its standard output there.
    let null = [PathBuf::from("/dev/null")];
    let read = (&files.read[..], AccessFs::ReadFile.into());
    restrict([(programs, access), (&null, OPEN), (&files.devices, device), read]);
    let has_device = !files.devices.is_empty();
    if let Err(error) = system_calls::restrict(Role::Anchor { has_device }) {
        log::warn!("Cannot restrict system calls: {error}");
    }
}

/// Restricts this thread and its children to `files`, and prevents other processes from tracing
/// this one.
pub fn restrict_files(files: &[PathBuf]) {
    restrict([(files, OPEN)]);
}

fn restrict<const N: usize>(allowed: [(&[PathBuf], BitFlags<AccessFs>); N]) {
    if let Err(error) = nix::sys::prctl::set_no_new_privs() {
        log::warn!("Cannot set no_new_privs: {error}");
    }
    // The process holds guest memory, which other processes of its user must not read by ptrace.
    if let Err(error) = nix::sys::prctl::set_dumpable(false) {
        log::warn!("Cannot prevent other processes from tracing this one: {error}");
    }
    let restricted = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI::V5))
        .and_then(|rules| rules.scope(Scope::from_all(ABI::V6)))
        .and_then(Ruleset::create)
        .and_then(|rules| {
            let all = allowed.iter();
            rules.add_rules(all.flat_map(|(files, access)| path_beneath_rules(*files, *access)))
        })
        .and_then(landlock::RulesetCreated::restrict_self);
    match restricted {
        Ok(status) => log::debug!("Filesystem access is restricted: {:?}", status.ruleset),
        Err(error) => log::warn!("Cannot restrict access to the filesystem: {error}"),
    }
}
