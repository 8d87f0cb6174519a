//! Check of KVM: a machine may have `/dev/kvm` and still fail to run a real guest.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use crate::Lab;
use crate::cache::cache_folder;
use crate::cleanup::Scratch;
use crate::progress::Progress;
use crate::qemu::{Vm, VmSpec};

const BOOT_LIMIT: Duration = Duration::from_secs(20);
const DEVICE: &str = "/dev/kvm";

/// Boots a VM under KVM, once per boot of the host. The inner error is the reason for a failure.
pub fn probe(lab: &Lab, progress: &Progress) -> Result<std::result::Result<(), String>> {
    if let Err(error) = fs::File::options().read(true).write(true).open(DEVICE) {
        return Ok(Err(format!("{DEVICE} cannot be opened: {error}")));
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let cache = cache_folder().ok();
    let known = cache.as_ref().map(|folder| folder.join("kvm"));
    let line = |verdict: &str| format!("{} {} {verdict}", boot.trim(), lab.root.qemu.version);
    let text = known.as_ref().and_then(|known| fs::read_to_string(known).ok()).unwrap_or_default();
    if let Some(verdict) = text.strip_prefix(&line("")) {
        return Ok(if verdict == "yes" { Ok(()) } else { Err(verdict.to_owned()) });
    }
    let step = progress.step("Finding out whether a guest boots under KVM");
    let verdict = boots(lab)?;
    step.done();
    let text = verdict.as_ref().map_or_else(String::as_str, |()| "yes");
    // Without a home folder the result is not cached.
    if let (Some(folder), Some(known)) = (cache, known) {
        fs::create_dir_all(folder)?;
        fs::write(known, line(text))?;
    }
    Ok(verdict)
}

fn boots(lab: &Lab) -> Result<std::result::Result<(), String>> {
    let scratch = Scratch::new()?;
    let spec = VmSpec { kvm: true, ..VmSpec::new("kvm") };
    let mut vm = match Vm::start(lab, &spec, &scratch.path().join("vm")) {
        Ok(vm) => vm,
        Err(error) => return Ok(Err(format!("QEMU does not start with KVM: {error:#}"))),
    };
    let deadline = Instant::now() + BOOT_LIMIT;
    while Instant::now() < deadline {
        if vm.guest.wait_boot(Duration::from_millis(200)).is_ok() {
            return Ok(Ok(()));
        }
        let status = vm.qmp.execute("query-status", &json!({}))?;
        if status["running"] != Value::Bool(true) {
            let state = status["status"].as_str().unwrap_or("unknown");
            return Ok(Err(format!("a stock Linux does not boot under this host's KVM ({state})")));
        }
    }
    let seconds = BOOT_LIMIT.as_secs();
    Ok(Err(format!("a stock Linux does not boot under this host's KVM within {seconds} s")))
}
