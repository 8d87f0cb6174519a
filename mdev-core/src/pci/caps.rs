//! Capabilities, each a table with offsets relative to its header.

use super::config::ConfigReg;
use crate::abi::control::VECTORS;
use crate::regs::{Row, Width};

/// A capability as it is declared: its rows start after the two header bytes.
#[derive(Debug)]
pub(super) struct Capability {
    /// Its number.
    pub id: u8,
    /// For the header rows' descriptions.
    pub name: &'static str,
    /// Length in bytes, header included.
    pub len: u64,
    /// The registers.
    pub rows: &'static [Row<ConfigReg>],
}

/// PCI power management: D0 and D3hot, and the state survives.
pub(super) const POWER: Capability = Capability {
    id: 0x01,
    name: "PM",
    len: 8,
    rows: &[
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
};

/// Multiple-message code: log2 of the vectors.
pub(super) const MSI_VECTORS_LOG2: u32 = VECTORS.ilog2();
/// Where the multiple-message enable field is.
pub(super) const MSI_ENABLE_SHIFT: u32 = 4;

/// MSI with 64-bit addresses and no mask bits. MSI-X is left out: together with hot-unplug it aborts QEMU 11.1.
pub(super) const MSI: Capability = Capability {
    id: 0x05,
    name: "MSI",
    len: 16,
    rows: &[
        Row::rw(
            ConfigReg::MsiControl,
            "MSI_CONTROL",
            2,
            Width::W16,
            1 << 7 | MSI_VECTORS_LOG2 << 1,
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
            "Its upper half",
        ),
        Row::rw(ConfigReg::MsiData, "MSI_DATA", 12, Width::W16, 0, 0xffff, "Message data"),
    ],
};

/// Bit of the device control register that starts a function-level reset.
pub(super) const DEVCTL_FLR: u32 = 1 << 15;
/// Bit of the device capabilities register that offers it.
const DEVCAP_FLR: u32 = 1 << 28;
/// Role-based error reporting, which every endpoint must set.
const DEVCAP_RBER: u32 = 1 << 15;

/// PCI Express endpoint: here for function-level reset, and for the extended configuration space.
pub(super) const EXPRESS: Capability = Capability {
    id: 0x10,
    name: "PCIe",
    len: 60,
    rows: &[
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
        Row::w1c(ConfigReg::Express, "EXP_DEVSTA", 10, Width::W16, 0, 0x000f, "Errors: none"),
        Row::ro(ConfigReg::Express, "EXP_LNKCAP", 12, Width::W32, 0x11, "2.5 GT/s, x1: nominal"),
        Row::rw(ConfigReg::Express, "EXP_LNKCTL", 16, Width::W16, 0, 0x00c3, "Stored only"),
        Row::ro(ConfigReg::Express, "EXP_LNKSTA", 18, Width::W16, 0x11, "2.5 GT/s, x1"),
        Row::ro(ConfigReg::Express, "EXP_DEVCAP2", 36, Width::W32, 0, "Nothing more"),
        Row::ro(ConfigReg::Express, "EXP_LNKCAP2", 44, Width::W32, 0x2, "2.5 GT/s"),
        Row::ro(ConfigReg::Express, "EXP_LNKCTL2", 48, Width::W16, 0x1, "2.5 GT/s"),
    ],
};
