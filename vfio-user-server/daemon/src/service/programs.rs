//! The CUDA programs that use a vGPU: their processes' names.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use mdev_core::untrusted::{VALUE, read_text};

use super::attached_vm::escaped;
use crate::worker_protocol::ProgramsStatus;
use vgpud_api::{ProgramProcess, Programs};

/// Describes the programs that a worker reports for a vGPU of user `owner`.
pub fn describe(programs: ProgramsStatus, owner: u32) -> Programs {
    let ProgramsStatus { vram_used_bytes, processes, in_vm, .. } = programs;
    let processes = processes.into_iter().map(|(pid, vram_used_bytes)| ProgramProcess {
        pid,
        name: if in_vm { String::new() } else { name(pid, owner).unwrap_or_default() },
        vram_used_bytes,
    });
    Programs { vram_used_bytes, processes: processes.collect(), in_vm }
}

/// Returns the name of a process that may use a vGPU of user `owner`. A worker that was compromised
/// can report any process.
fn name(pid: i32, owner: u32) -> Option<String> {
    let folder = format!("/proc/{pid}");
    let user = fs::metadata(&folder).ok()?.uid();
    if user != 0 && user != owner {
        return None;
    }
    let name = read_text(Path::new(&format!("{folder}/comm")), VALUE).ok()?;
    Some(escaped(name.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_the_owner_have_names() {
        let pid = std::process::id().cast_signed();
        let user = fs::metadata("/proc/self").unwrap().uid();
        let processes = vec![(pid, 7), (i32::MAX, 0)];
        let status = ProgramsStatus { vram_used_bytes: 7, processes, ..ProgramsStatus::default() };
        let programs = describe(status.clone(), user);
        assert_eq!(programs.vram_used_bytes, 7);
        let [own, gone] = programs.processes.as_slice() else { panic!("{programs:?}") };
        assert!(own.pid == pid && !own.name.is_empty() && own.vram_used_bytes == 7, "{own:?}");
        assert!(gone.name.is_empty(), "{gone:?}");
        // A VM's process IDs say nothing about the host's processes.
        let in_vm = describe(ProgramsStatus { in_vm: true, ..status }, user);
        assert!(in_vm.in_vm && in_vm.processes.iter().all(|process| process.name.is_empty()));
        if user != 0 {
            assert_eq!(name(pid, user + 1), None);
        }
    }
}
