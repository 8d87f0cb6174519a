//! PCI capabilities, as tables with offsets relative to the capability's header.

use crate::config::ConfigReg;
use crate::row::{Row, Width};

/// Declaration of a capability. Rows start after the two header bytes.
#[derive(Clone, Debug)]
pub struct Capability {
    /// Capability ID (PCI Code and ID Assignment Specification).
    pub id: u8,
    /// Description of the header's rows.
    pub name: &'static str,
    /// Length in bytes, header included.
    pub len: u64,
    /// Registers after the header.
    pub rows: Vec<Row<ConfigReg>>,
}

/// Returns the power management capability with D0 and D3hot. The state survives D3hot.
pub fn power_management() -> Capability {
    Capability {
        id: 0x01,
        name: "PM",
        len: 8,
        rows: vec![
            Row::ro(ConfigReg::PmCapabilities, "PM_PMC", 2, Width::W16, 0x0003, "Version 3"),
            Row::rw(
                ConfigReg::PmControl,
                "PM_PMCSR",
                4,
                Width::W16,
                1 << 3,
                0x3,
                "Power state: 0 (D0) or 3 (D3hot); bit 3: no reset between them",
            ),
        ],
    }
}

/// Position of the multiple-message capable field in MSI_CONTROL: log2 of the vectors.
pub(crate) const MSI_CAPABLE_SHIFT: u32 = 1;
/// Position of the multiple-message enable field in MSI_CONTROL.
pub(crate) const MSI_ENABLE_SHIFT: u32 = 4;

/// Returns the MSI capability for `vectors` vectors, a power of two up to 32, with 64-bit addresses
/// and no mask bits.
///
/// MSI-X is not offered: QEMU 11.1 aborts when a device with MSI-X is unplugged.
pub fn msi(vectors: u32) -> Capability {
    let vectors_log2 = vectors.clamp(1, 32).ilog2();
    Capability {
        id: 0x05,
        name: "MSI",
        len: 16,
        rows: vec![
            Row::rw(
                ConfigReg::MsiControl,
                "MSI_CONTROL",
                2,
                Width::W16,
                1 << 7 | vectors_log2 << MSI_CAPABLE_SHIFT,
                0x71,
                "Enable, vectors granted (log2, bits 6:4), vectors (log2, bits 3:1), 64-bit",
            ),
            Row::rw(
                ConfigReg::MsiAddressLow,
                "MSI_ADDR_LO",
                4,
                Width::W32,
                0,
                0xffff_fffc,
                "Message address",
            ),
            Row::rw(
                ConfigReg::MsiAddressHigh,
                "MSI_ADDR_HI",
                8,
                Width::W32,
                0,
                0xffff_ffff,
                "Message address, upper half",
            ),
            Row::rw(ConfigReg::MsiData, "MSI_DATA", 12, Width::W16, 0, 0xffff, "Message data"),
        ],
    }
}

/// Bit of the device control register that starts a function-level reset.
pub(crate) const DEVCTL_FLR: u32 = 1 << 15;
/// Bit of the device capabilities register that offers function-level reset.
const DEVCAP_FLR: u32 = 1 << 28;
/// Bit of the device capabilities register for role-based error reporting, required of endpoints.
const DEVCAP_RBER: u32 = 1 << 15;

/// Returns the PCI Express capability of an endpoint, for function-level reset and for extended
/// configuration space.
pub fn express_endpoint() -> Capability {
    Capability {
        id: 0x10,
        name: "PCIe",
        len: 60,
        rows: vec![
            Row::ro(ConfigReg::Express, "EXP_FLAGS", 2, Width::W16, 0x0002, "Version 2, endpoint"),
            Row::ro(
                ConfigReg::Express,
                "EXP_DEVCAP",
                4,
                Width::W32,
                DEVCAP_FLR | DEVCAP_RBER,
                "Function-level reset; 128-byte payloads",
            ),
            Row::rw(
                ConfigReg::DeviceControl,
                "EXP_DEVCTL",
                8,
                Width::W16,
                0x2810,
                0x781f,
                "Bit 15: function-level reset, reads as 0",
            ),
            Row::w1c(
                ConfigReg::Express,
                "EXP_DEVSTA",
                10,
                Width::W16,
                0,
                0x000f,
                "Error bits, never set",
            ),
            Row::ro(
                ConfigReg::Express,
                "EXP_LNKCAP",
                12,
                Width::W32,
                0x11,
                "2.5 GT/s, x1: nominal",
            ),
            Row::rw(ConfigReg::Express, "EXP_LNKCTL", 16, Width::W16, 0, 0x00c3, "Stored only"),
            Row::ro(ConfigReg::Express, "EXP_LNKSTA", 18, Width::W16, 0x11, "2.5 GT/s, x1"),
            Row::ro(
                ConfigReg::Express,
                "EXP_DEVCAP2",
                36,
                Width::W32,
                0,
                "No further capabilities",
            ),
            Row::ro(ConfigReg::Express, "EXP_LNKCAP2", 44, Width::W32, 0x2, "2.5 GT/s"),
            Row::ro(ConfigReg::Express, "EXP_LNKCTL2", 48, Width::W16, 0x1, "2.5 GT/s"),
        ],
    }
}
