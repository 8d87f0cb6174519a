//! PCI identities of a vGPU.

use pci_registers::Identity;

/// Bochs display adapter, as QEMU offers it without legacy VGA, so that the guest's in-tree driver
/// binds.
///
/// Revision 2 indicates QEMU's extension registers.
pub(super) const DISPLAY: Identity = Identity {
    vendor: 0x1234,
    device: 0x1111,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    class: 0x03_80_00,
    revision: 2,
};

/// Processing accelerator. Ids 1af4:10f0 to 10ff are reserved for experimental use without
/// registration; no driver in Linux binds to them (virtio ends at 107f).
pub(super) const ACCELERATOR: Identity = Identity {
    vendor: 0x1af4,
    device: 0x10f0,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    class: 0x12_00_00,
    revision: 1,
};
