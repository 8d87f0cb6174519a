//! Check that a process that submits work of a guest has no CAP_SYS_ADMIN.

use mdev_core::gpu::GpuError;
use rustix::thread::{CapabilitySet, capabilities};

/// Refuses a process with CAP_SYS_ADMIN. The driver makes privileged channels for such a process,
/// and privileged channels can access physical addresses. The channel flags deny the privilege too;
/// this check is a second safeguard.
pub fn refuse_sys_admin(allow_sys_admin: bool) -> Result<(), GpuError> {
    let effective = capabilities(None).map_err(std::io::Error::from)?.effective;
    if allow_sys_admin || !effective.contains(CapabilitySet::SYS_ADMIN) {
        return Ok(());
    }
    Err(GpuError::Io(std::io::Error::new(
        std::io::ErrorKind::PermissionDenied,
        "A worker on an NVIDIA GPU must not have CAP_SYS_ADMIN: run vgpud as an ordinary user, or \
         as root so that vgpud starts workers as another user",
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capability_is_that_of_the_process_status() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
        let effective = u64::from_str_radix(line.trim(), 16).unwrap();
        assert_eq!(refuse_sys_admin(false).is_err(), effective >> 21 & 1 == 1);
        refuse_sys_admin(true).unwrap();
    }
}
