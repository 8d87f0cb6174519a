//! PCI configuration space.

use crate::bank::{Bank, BankState, RestoreError};
use crate::bar::{Bar, BarWidth};
use crate::capability::{Capability, DEVCTL_FLR, MSI_CAPABLE_SHIFT, MSI_ENABLE_SHIFT};
use crate::row::{Row, Width};

/// Length of the configuration space of a PCI Express function, in bytes.
pub const CONFIG_BYTES: u64 = 4096;

/// Bits of the command register.
pub mod command {
    /// The function answers memory accesses.
    pub const MEMORY: u32 = 1 << 1;
    /// The function masters the bus: DMA and MSI.
    pub const BUS_MASTER: u32 = 1 << 2;
    /// The function does not assert INTx.
    pub const INTX_DISABLE: u32 = 1 << 10;
    /// Bits that a guest can set. Parity and SERR are stored only. There are no I/O BARs.
    pub const WRITABLE: u32 = MEMORY | BUS_MASTER | 1 << 6 | 1 << 8 | INTX_DISABLE;
}

/// Bits of the status register.
pub mod status {
    /// The function asserts INTx, or would if INTx were not disabled.
    pub const INTERRUPT: u32 = 1 << 3;
    /// The function has a capability list.
    pub const CAPABILITIES: u32 = 1 << 4;
    /// Error bits, cleared by writing one. The function never sets them.
    pub const ERRORS: u32 = 0xf900;
}

/// Registers of configuration space, by behaviour. Registers that only store values share an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigReg {
    /// Constant register: identification, capabilities pointer, interrupt pin.
    Identity,
    /// Command.
    Command,
    /// Status.
    Status,
    /// Register that only stores values for the guest.
    Scratch,
    /// Base address register, 0 to 5.
    Bar(u8),
    /// Header of a capability.
    Capability,
    /// Power management capabilities.
    PmCapabilities,
    /// Power state.
    PmControl,
    /// MSI message control.
    MsiControl,
    /// MSI address, low half.
    MsiAddressLow,
    /// MSI address, high half.
    MsiAddressHigh,
    /// MSI data.
    MsiData,
    /// PCI Express register without behaviour.
    Express,
    /// PCI Express device control.
    DeviceControl,
}

/// Identification of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Subsystem vendor id.
    pub subsystem_vendor: u16,
    /// Subsystem id.
    pub subsystem: u16,
    /// Base class, sub-class and programming interface, 8 bits each.
    pub class: u32,
    /// Revision id.
    pub revision: u8,
}

impl Identity {
    /// Returns the identity of revision 0 whose subsystem is the device itself.
    pub const fn new(vendor: u16, device: u16, class: u32) -> Self {
        let (subsystem_vendor, subsystem) = (vendor, device);
        Self { vendor, device, subsystem_vendor, subsystem, class, revision: 0 }
    }
}

/// Declaration of a configuration space.
#[derive(Clone, Copy, Debug)]
pub struct ConfigTable<'a> {
    /// Identification.
    pub identity: Identity,
    /// True if the function has INTA.
    pub intx: bool,
    /// Memory BARs.
    pub bars: &'a [Bar],
    /// Capabilities, in list order.
    pub capabilities: &'a [Capability],
}

/// Effect of a configuration space write on the rest of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConfigEffect {
    /// True if the guest started a function-level reset.
    pub reset: bool,
    /// True if the guest enabled or disabled INTx.
    pub intx_changed: bool,
}

/// Configuration space of an emulated function.
#[derive(Debug)]
pub struct ConfigSpace {
    bank: Bank<ConfigReg>,
    bars: Vec<Bar>,
}

/// Offset of the pointer to the first capability.
const CAPABILITIES_POINTER: u16 = 0x34;
/// Offset of the first capability.
const FIRST_CAPABILITY: u64 = 0x40;

impl ConfigSpace {
    /// Returns the configuration space that the table declares, with power-on values.
    ///
    /// # Panics
    ///
    /// Panics if BARs share a register or capabilities exceed the space. Tables are constants of
    /// the device; any test that creates the device finds the mistake.
    pub fn new(table: &ConfigTable<'_>) -> Self {
        let mut rows = header(table);
        rows.extend(table.bars.iter().flat_map(bar_rows));
        rows.extend(capability_rows(table.capabilities));
        Self { bank: Bank::new(CONFIG_BYTES, rows), bars: table.bars.to_vec() }
    }

    /// Returns the registers, for documentation.
    pub fn bank(&self) -> &Bank<ConfigReg> {
        &self.bank
    }

    /// Returns the BARs.
    pub fn bars(&self) -> &[Bar] {
        &self.bars
    }

    /// Reads bytes. `intx` is the level of INTA, for the status register.
    pub fn read(&self, offset: u64, data: &mut [u8], intx: bool) {
        self.bank.read(offset, data, |id, value| match id {
            ConfigReg::Status if intx => value | status::INTERRUPT,
            _ => value,
        });
    }

    /// Writes bytes and returns the effect on the device.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> ConfigEffect {
        let mut effect = ConfigEffect::default();
        self.bank.write(offset, data, |bank, id, write| match id {
            ConfigReg::Command => {
                effect.intx_changed |= (write.old ^ write.new) & command::INTX_DISABLE != 0;
            }
            // Power states D1 and D2 are not offered; writes of them are discarded.
            ConfigReg::PmControl if matches!(write.new & 0x3, 1 | 2) => bank.set(id, write.old),
            ConfigReg::MsiControl => {
                let offered = write.new >> MSI_CAPABLE_SHIFT & 0x7;
                let granted = (write.new >> MSI_ENABLE_SHIFT & 0x7).min(offered);
                let others = write.new & !(0x7 << MSI_ENABLE_SHIFT);
                bank.set(id, others | granted << MSI_ENABLE_SHIFT);
            }
            ConfigReg::DeviceControl => effect.reset |= write.raw & DEVCTL_FLR != 0,
            ConfigReg::Identity
            | ConfigReg::Status
            | ConfigReg::Scratch
            | ConfigReg::Bar(_)
            | ConfigReg::Capability
            | ConfigReg::PmCapabilities
            | ConfigReg::PmControl
            | ConfigReg::MsiAddressLow
            | ConfigReg::MsiAddressHigh
            | ConfigReg::MsiData
            | ConfigReg::Express => {}
        });
        effect
    }

    /// Returns true if the guest has enabled bus mastering. Without it, the function must not
    /// access guest memory or send MSIs.
    pub fn bus_master(&self) -> bool {
        self.bank.get(ConfigReg::Command) & command::BUS_MASTER != 0
    }

    /// Returns true if the guest has disabled INTx.
    pub fn intx_disabled(&self) -> bool {
        self.bank.get(ConfigReg::Command) & command::INTX_DISABLE != 0
    }

    /// Returns the guest physical address of a BAR, if the BAR exists and memory decoding is
    /// enabled.
    pub fn bar_address(&self, index: u8) -> Option<u64> {
        let bar = self.bars.iter().find(|bar| bar.index == index)?;
        if self.bank.get(ConfigReg::Command) & command::MEMORY == 0 {
            return None;
        }
        let low = u64::from(self.bank.get(ConfigReg::Bar(bar.index)));
        let high = match bar.width {
            BarWidth::Bits32 => 0,
            BarWidth::Bits64 => u64::from(self.bank.get(ConfigReg::Bar(bar.index + 1))),
        };
        Some((high << 32 | low) & bar.address_mask())
    }

    /// Returns the offset of a capability's header, by the list that a guest follows.
    pub fn capability(&self, id: u8) -> Option<u16> {
        let byte = |offset: u16| {
            let mut byte = [0];
            self.bank.read(offset.into(), &mut byte, |_, value| value);
            byte[0]
        };
        let mut at = u16::from(byte(CAPABILITIES_POINTER));
        // The table is finite, and each header is further on.
        while at != 0 {
            if byte(at) == id {
                return Some(at);
            }
            at = u16::from(byte(at + 1));
        }
        None
    }

    /// Resets all registers to their power-on values.
    pub fn reset(&mut self) {
        self.bank.reset();
    }

    /// Replaces the contents by an image of [`Bank::image`].
    pub fn set_image(&mut self, image: &[u8]) {
        self.bank.set_image(image);
    }

    /// Returns the saved registers.
    pub fn save(&self) -> BankState {
        self.bank.save()
    }

    /// Checks a saved state without restoring it.
    pub fn check(&self, state: &BankState) -> Result<(), RestoreError> {
        self.bank.check(state)?;
        let value = |name: &str| state.0.get(name).copied().unwrap_or_default();
        let impossible = |name| Err(RestoreError::Impossible { name, value: value(name) });
        if matches!(value("PM_PMCSR") & 0x3, 1 | 2) {
            return impossible("PM_PMCSR");
        }
        let msi = value("MSI_CONTROL");
        if msi >> MSI_ENABLE_SHIFT & 0x7 > msi >> MSI_CAPABLE_SHIFT & 0x7 {
            return impossible("MSI_CONTROL");
        }
        Ok(())
    }

    /// Restores a saved state, all registers or none.
    pub fn restore(&mut self, state: &BankState) -> Result<(), RestoreError> {
        self.check(state)?;
        self.bank.restore(state)
    }
}

/// Returns the registers of the type 0 header (PCI Local Bus 3.0, section 6.1).
fn header(table: &ConfigTable<'_>) -> Vec<Row<ConfigReg>> {
    use ConfigReg::{Command, Identity as Id, Scratch, Status};
    use Width::{W8, W16};
    let identity = &table.identity;
    let first = if table.capabilities.is_empty() { 0 } else { FIRST_CAPABILITY as u32 };
    let list = if table.capabilities.is_empty() { 0 } else { status::CAPABILITIES };
    let class = identity.class;
    vec![
        Row::ro(Id, "VENDOR_ID", 0x00, W16, identity.vendor.into(), "Vendor"),
        Row::ro(Id, "DEVICE_ID", 0x02, W16, identity.device.into(), "Device"),
        Row::rw(
            Command,
            "COMMAND",
            0x04,
            W16,
            0,
            command::WRITABLE,
            "Bit 1 memory, bit 2 bus master, bit 10 INTx off",
        ),
        Row::w1c(
            Status,
            "STATUS",
            0x06,
            W16,
            list,
            status::ERRORS,
            "Bit 3 interrupt, bit 4 capability list",
        ),
        Row::ro(Id, "REVISION", 0x08, W8, identity.revision.into(), "Revision"),
        Row::ro(Id, "PROG_IF", 0x09, W8, class & 0xff, "Programming interface"),
        Row::ro(Id, "SUBCLASS", 0x0a, W8, class >> 8 & 0xff, "Sub-class"),
        Row::ro(Id, "CLASS", 0x0b, W8, class >> 16 & 0xff, "Base class"),
        Row::rw(Scratch, "CACHE_LINE", 0x0c, W8, 0, 0xff, "Stored only"),
        Row::ro(Id, "LATENCY", 0x0d, W8, 0, "Not used by PCI Express"),
        Row::ro(Id, "HEADER_TYPE", 0x0e, W8, 0, "One function"),
        Row::ro(Id, "BIST", 0x0f, W8, 0, "None"),
        Row::ro(
            Id,
            "SUBSYSTEM_VENDOR_ID",
            0x2c,
            W16,
            identity.subsystem_vendor.into(),
            "Subsystem vendor",
        ),
        Row::ro(Id, "SUBSYSTEM_ID", 0x2e, W16, identity.subsystem.into(), "Subsystem"),
        Row::ro(Id, "ROM", 0x30, Width::W32, 0, "No expansion ROM"),
        Row::ro(Id, "CAPABILITIES", 0x34, W8, first, "First capability"),
        Row::rw(Scratch, "INTERRUPT_LINE", 0x3c, W8, 0, 0xff, "Stored only"),
        Row::ro(Id, "INTERRUPT_PIN", 0x3d, W8, table.intx.into(), "INTA"),
    ]
}

/// Returns the registers of a BAR.
fn bar_rows(bar: &Bar) -> Vec<Row<ConfigReg>> {
    const NAMES: [&str; 6] = ["BAR0", "BAR1", "BAR2", "BAR3", "BAR4", "BAR5"];
    let offset = |index: u8| 0x10 + 4 * u64::from(index);
    let mask = bar.address_mask();
    let row = |index: u8, reset: u32, mask: u32, doc| {
        let name = NAMES[usize::from(index)];
        Row::rw(ConfigReg::Bar(index), name, offset(index), Width::W32, reset, mask, doc)
    };
    let mut rows = vec![row(bar.index, bar.flags(), mask as u32, bar.doc)];
    if bar.width == BarWidth::Bits64 {
        rows.push(row(bar.index + 1, 0, (mask >> 32) as u32, "Upper half of the preceding BAR"));
    }
    rows
}

/// Returns the registers of the capabilities, one after the other, and links them.
fn capability_rows(capabilities: &[Capability]) -> Vec<Row<ConfigReg>> {
    let mut rows = Vec::new();
    let mut base = FIRST_CAPABILITY;
    for (index, capability) in capabilities.iter().enumerate() {
        let past = base + capability.len.next_multiple_of(4);
        let next = if index + 1 < capabilities.len() { past as u32 } else { 0 };
        let id = u32::from(capability.id);
        let header = ConfigReg::Capability;
        rows.push(Row::ro(header, "CAP_ID", base, Width::W8, id, capability.name));
        rows.push(Row::ro(header, "CAP_NEXT", base + 1, Width::W8, next, "Next capability"));
        rows.extend(capability.rows.iter().map(|row| row.at(base)));
        base = past;
    }
    rows
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::capability::{express_endpoint, msi, power_management};

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    const DISPLAY: Identity = Identity {
        vendor: 0x1234,
        device: 0x1111,
        subsystem_vendor: 0x1af4,
        subsystem: 0x1100,
        class: 0x03_80_00,
        revision: 2,
    };

    fn space() -> ConfigSpace {
        let bar =
            |index, size, width, prefetchable| Bar { index, doc: "", size, width, prefetchable };
        ConfigSpace::new(&ConfigTable {
            identity: DISPLAY,
            intx: true,
            bars: &[
                bar(0, 16 * MIB, BarWidth::Bits32, true),
                bar(3, 0x4000, BarWidth::Bits32, false),
                bar(4, 8 * GIB, BarWidth::Bits64, true),
            ],
            capabilities: &[power_management(), msi(4), express_endpoint()],
        })
    }

    fn read32(space: &ConfigSpace, offset: u64) -> u32 {
        let mut data = [0; 4];
        space.read(offset, &mut data, false);
        u32::from_le_bytes(data)
    }

    #[test]
    fn conventional_and_extended_space_can_be_read_at_once() {
        let space = space();
        for len in [256, 4096] {
            let mut data = vec![0xee; len];
            space.read(0, &mut data, true);
            assert_eq!(&data[..4], &[0x34, 0x12, 0x11, 0x11]);
            assert_eq!(&data[8..12], &[2, 0, 0x80, 3]);
            assert_eq!(data[6] & 0x18, 0x18, "interrupt status and capability list");
            assert_eq!(&data[0x2c..0x30], &[0xf4, 0x1a, 0x00, 0x11]);
            assert!(data[0x100.min(len)..].iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn bars_report_their_size() {
        let mut space = space();
        for (offset, answer) in
            [(0x10, 0xff00_0008), (0x14, 0), (0x1c, 0xffff_c000), (0x20, 0xc), (0x24, 0xffff_fffe)]
        {
            space.write(offset, &[0xff; 4]);
            assert_eq!(read32(&space, offset), answer, "BAR at {offset:#x}");
        }
        assert_eq!(space.bar_address(4), None, "memory decode is off");
        space.write(4, &[2]);
        space.write(0x20, &[0; 4]);
        space.write(0x24, &[2, 0, 0, 0]);
        assert_eq!(space.bar_address(4), Some(8 * GIB));
    }

    #[test]
    fn capabilities_are_linked() {
        let space = space();
        let mut seen = Vec::new();
        let mut at = read32(&space, 0x34) & 0xff;
        while at != 0 {
            let header = read32(&space, at.into());
            seen.push(header & 0xff);
            at = header >> 8 & 0xff;
        }
        assert_eq!(seen, [0x01, 0x05, 0x10]);
    }

    #[test]
    fn function_level_reset_is_an_effect_and_its_bit_reads_as_zero() {
        let mut space = space();
        let base = EXPRESS_AT;
        assert!(space.write(base + 8, &0xa810u16.to_le_bytes()).reset);
        assert_eq!(read32(&space, base + 8) & 0xffff, 0x2810);
        assert!(!space.write(base + 8, &0x2810u16.to_le_bytes()).reset);
        assert!(space.write(4, &[0, 4]).intx_changed);
        assert!(space.intx_disabled());
    }

    const EXPRESS_AT: u64 = 0x58;

    #[test]
    fn values_that_are_not_offered_are_not_stored() {
        let mut space = space();
        space.write(0x44, &[1]);
        assert_eq!(read32(&space, 0x44) & 0x3, 0, "no D1");
        space.write(0x44, &[3]);
        assert_eq!(read32(&space, 0x44) & 0x3, 3, "D3hot");
        space.write(0x4a, &[0x51, 0]);
        assert_eq!(
            read32(&space, 0x48) >> 16,
            0x00a5,
            "log2 of the vectors granted: 5 requested, 2 offered"
        );
    }

    proptest! {
        #[test]
        fn read_only_bits_never_change(
            writes in prop::collection::vec((0u64..4200, prop::collection::vec(any::<u8>(), 0..=16)), 0..100)
        ) {
            let mut space = space();
            for (offset, data) in writes {
                space.write(offset, &data);
            }
            for row in space.bank().rows() {
                let value = {
                    let mut data = [0; 4];
                    space.read(row.offset, &mut data[..row.width.bytes() as usize], false);
                    u32::from_le_bytes(data)
                };
                let fixed = !(row.writable | row.w1c);
                prop_assert_eq!(value & fixed, row.reset & fixed, "{}", row.name);
            }
            for (offset, mask) in [(0x10, 0xff00_0000u32), (0x1c, 0xffff_c000), (0x20, 0), (0x24, 0xffff_fffe)] {
                space.write(offset, &[0xff; 4]);
                prop_assert_eq!(read32(&space, offset) & !0xf, mask & !0xf);
            }
        }
    }
}
