//! What a worker gives up before it serves anybody: the filesystem, and new privileges.
//!
//! All it needs later comes as descriptors. A worker that a guest takes over can open no file and run no program.

use landlock::{ABI, Access, AccessFs, Ruleset, RulesetAttr};

/// Enters the sandbox, as far as this kernel has it.
pub fn enter() {
    if let Err(error) = nix::sys::prctl::set_no_new_privs() {
        log::warn!("Cannot give up new privileges: {error}");
    }
    let closed = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI::V5))
        .and_then(Ruleset::create)
        .and_then(landlock::RulesetCreated::restrict_self);
    match closed {
        Ok(status) => log::debug!("Filesystem closed: {:?}", status.ruleset),
        Err(error) => log::warn!("Cannot close the filesystem to this worker: {error}"),
    }
}
