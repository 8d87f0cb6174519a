//! Message about programs of a vGPU that the software GPU cannot run.

use mdev_core::ids::VgpuId;

/// Shortest interval between messages.
const LOG_INTERVAL_NS: u64 = 60_000_000_000;

/// Time of the last message.
#[derive(Debug, Default)]
pub(super) struct MachineCodeLog {
    logged_ns: Option<u64>,
}

impl MachineCodeLog {
    /// Reports a launch of machine code.
    pub fn report(&mut self, vgpu: VgpuId, code: u64, now_ns: u64) {
        if self.logged_ns.is_none_or(|logged| now_ns.saturating_sub(logged) > LOG_INTERVAL_NS) {
            self.logged_ns = Some(now_ns);
            log::warn!(
                "vGPU {vgpu}: a kernel of machine code was launched (at {code:#x}), which only an \
                 NVIDIA GPU can run: channel reset. Use a vGPU of an NVIDIA GPU for such programs"
            );
        }
    }
}
