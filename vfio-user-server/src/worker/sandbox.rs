//! What a worker and a software GPU give up before they serve anybody: the filesystem, new privileges, and a hold on
//! other processes of their user.
//!
//! All they need later comes as descriptors. One that a guest takes over can open no file and run no program; no other
//! process of its user can look into it, and it can signal none.

use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, BitFlags, Ruleset, RulesetAttr, RulesetCreatedAttr, Scope,
    make_bitflags, path_beneath_rules,
};

/// How such a file is opened.
const OPEN: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | WriteFile});

/// Enters the sandbox, as far as this kernel has it.
pub fn enter() {
    enter_with(&[]);
}

/// The same, with files that may still be opened.
pub fn enter_with(files: &[PathBuf]) {
    if let Err(error) = nix::sys::prctl::set_no_new_privs() {
        log::warn!("Cannot give up new privileges: {error}");
    }
    // It holds guest memory: no process of the same user may trace it.
    if let Err(error) = nix::sys::prctl::set_dumpable(false) {
        log::warn!("Cannot keep other processes from looking into this one: {error}");
    }
    let closed = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI::V5))
        .and_then(|rules| rules.scope(Scope::from_all(ABI::V6)))
        .and_then(Ruleset::create)
        .and_then(|rules| rules.add_rules(path_beneath_rules(files, OPEN)))
        .and_then(landlock::RulesetCreated::restrict_self);
    match closed {
        Ok(status) => log::debug!("Filesystem closed: {:?}", status.ruleset),
        Err(error) => log::warn!("Cannot close the filesystem to this worker: {error}"),
    }
}
