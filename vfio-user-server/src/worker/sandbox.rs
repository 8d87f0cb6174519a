//! What a worker and a software GPU give up before they serve anybody: the filesystem, new privileges, and a hold on
//! other processes of their user.
//!
//! All they need later comes as descriptors. One that a guest takes over can open no file and run no program; no other
//! process of its user can look into it, and it can signal none.

use landlock::{ABI, Access, AccessFs, Ruleset, RulesetAttr, Scope};

/// Enters the sandbox, as far as this kernel has it.
pub fn enter() {
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
        .and_then(landlock::RulesetCreated::restrict_self);
    match closed {
        Ok(status) => log::debug!("Filesystem closed: {:?}", status.ruleset),
        Err(error) => log::warn!("Cannot close the filesystem to this worker: {error}"),
    }
}
