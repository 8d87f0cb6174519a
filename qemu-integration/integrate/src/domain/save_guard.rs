//! Device that makes QEMU refuse to save a domain, since a saved state has nothing of its vGPU.
//!
//! QEMU's client for vfio-user neither saves the device nor refuses (11.1): the saved domain would
//! never start again. QEMU refuses for a shared memory device that is a peer (`ivshmem-plain`), on
//! every way to save: `virsh save`, `managedsave`, snapshots with memory, and migration. The guest
//! sees a RAM controller of one page, which no driver uses.

use serde_json::json;

use super::DomainError;
use super::pci_slot::Free;

/// QEMU's id of the device.
const DEVICE: &str = "vgpu-save-guard";
/// QEMU's id of the device's memory.
const MEMORY: &str = "vgpu-save-guard-mem";

/// Returns QEMU's arguments. The device takes the last free slot.
pub(super) fn arguments(free: &Free) -> Result<[(&'static str, String); 2], DomainError> {
    if free.last == free.first {
        return Err(DomainError::NoSlot);
    }
    let memory = format!("memory-backend-memfd,id={MEMORY},size=4096,share=on");
    let device = json!({
        "driver": "ivshmem-plain", "id": DEVICE, "memdev": MEMORY, "master": "off",
        "bus": free.bus, "addr": format!("{:#x}", free.last),
    });
    Ok([("-object", memory), ("-device", device.to_string())])
}

/// Returns whether a value of an option is one of these arguments.
pub(super) fn is_argument(value: &str) -> bool {
    value.contains(DEVICE)
}
