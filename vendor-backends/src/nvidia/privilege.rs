//! What a process must not be allowed to do while a guest submits work through it.

use std::fs;

use mdev_core::gpu::GpuError;

const SYS_ADMIN: u64 = 1 << 21;

/// Refuses to go on with CAP_SYS_ADMIN: the driver would make privileged channels for such a process, which can name
/// physical addresses. Channels are made with flags that deny it, too; this is the other lock on the door.
pub fn check(allow_sys_admin: bool) -> Result<(), GpuError> {
    let status = fs::read_to_string("/proc/self/status")?;
    if allow_sys_admin || effective(&status) & SYS_ADMIN == 0 {
        return Ok(());
    }
    Err(GpuError::Io(std::io::Error::new(
        std::io::ErrorKind::PermissionDenied,
        "A worker on an NVIDIA GPU must not have CAP_SYS_ADMIN: run vgpud as root so that it starts workers as \
         another user, or as an ordinary user",
    )))
}

/// The effective capabilities, all of them where they cannot be told.
fn effective(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_process_status() {
        assert_eq!(effective("Name:\tx\nCapEff:\t0000000000000000\nCapBnd:\tff\n"), 0);
        assert_ne!(effective("CapEff:\t000001ffffffffff\n") & SYS_ADMIN, 0);
        assert_eq!(effective("nothing"), u64::MAX, "what is not known is not trusted");
    }
}
