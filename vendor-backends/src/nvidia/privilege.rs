//! Check that a process that submits work of a guest has no CAP_SYS_ADMIN.

use std::fs;

use mdev_core::gpu::GpuError;

const SYS_ADMIN: u64 = 1 << 21;

/// Refuses a process with CAP_SYS_ADMIN. The driver makes privileged channels for such a process,
/// and privileged channels can access physical addresses. The channel flags deny the privilege too;
/// this check is a second safeguard.
pub fn refuse_sys_admin(allow_sys_admin: bool) -> Result<(), GpuError> {
    let status = fs::read_to_string("/proc/self/status")?;
    if allow_sys_admin || effective_capabilities(&status) & SYS_ADMIN == 0 {
        return Ok(());
    }
    Err(GpuError::Io(std::io::Error::new(
        std::io::ErrorKind::PermissionDenied,
        "A worker on an NVIDIA GPU must not have CAP_SYS_ADMIN: run vgpud as an ordinary user, or \
         as root so that vgpud starts workers as another user",
    )))
}

/// Returns the effective capabilities, or all of them if the status does not contain them.
fn effective_capabilities(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_process_status() {
        let none = "Name:\tx\nCapEff:\t0000000000000000\nCapBnd:\tff\n";
        assert_eq!(effective_capabilities(none), 0);
        assert_ne!(effective_capabilities("CapEff:\t000001ffffffffff\n") & SYS_ADMIN, 0);
        assert_eq!(effective_capabilities("nothing"), u64::MAX, "unknown means all");
    }
}
