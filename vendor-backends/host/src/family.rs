//! Register tables of the supported device families: which parts of the BARs a guest may map, which
//! are emulated, and which are refused. A range without a row is refused.

use mdev_core::units::PAGE_SIZE;

/// A guest's access to a part of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The guest maps its own partition of the range.
    Mapped,
    /// Each access is trapped and emulated. Only the mediator accesses the physical range.
    Emulated,
    /// No access.
    Refused,
}

/// One row of a family's table.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// BAR number.
    pub bar: u8,
    /// Byte offset in the BAR.
    pub offset: u64,
    /// Length in bytes; `None` for the rest of the BAR.
    pub len: Option<u64>,
    /// Access that a guest has.
    pub access: Access,
    /// Contents of the range.
    pub contents: &'static str,
}

/// Resource of a device that vGPUs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Video memory and the screen.
    Framebuffer,
    /// The DMA engine.
    Dma,
}

/// One device family.
#[derive(Debug)]
pub struct Family {
    /// Display name.
    pub name: &'static str,
    /// Shared resource.
    pub kind: Kind,
    /// PCI vendor and device ids.
    pub ids: &'static [(u16, u16)],
    /// Table of BAR ranges.
    pub ranges: &'static [Range],
    /// DMA address bits that every device of the family has; `None` without DMA. A device may have
    /// more.
    pub dma_bits: Option<u8>,
}

const fn row(bar: u8, offset: u64, len: u64, access: Access, contents: &'static str) -> Range {
    Range { bar, offset, len: Some(len), access, contents }
}

/// Linear framebuffers with the Bochs display interface.
pub const FRAMEBUFFER: Family = Family {
    name: "linear framebuffer",
    kind: Kind::Framebuffer,
    ids: &[(0x1234, 0x1111)],
    ranges: &[
        Range { bar: 0, offset: 0, len: None, access: Access::Mapped, contents: "video memory" },
        row(2, 0x000, 0x400, Access::Refused, "the monitor's EDID"),
        row(2, 0x400, 0x020, Access::Emulated, "VGA ports"),
        row(2, 0x500, 0x016, Access::Emulated, "mode registers"),
        row(2, 0x600, 0x008, Access::Emulated, "byte order"),
    ],
    dma_bits: None,
};

/// QEMU's `edu`: a DMA engine, an interrupt and a factorial unit.
pub const EDU: Family = Family {
    name: "edu",
    kind: Kind::Dma,
    ids: &[(0x1234, 0x11e8)],
    ranges: &[
        row(0, 0x00, 0x0c, Access::Emulated, "identification, liveness, factorial"),
        row(0, 0x20, 0x08, Access::Emulated, "status"),
        row(0, 0x60, 0x08, Access::Emulated, "interrupts"),
        row(0, 0x80, 0x20, Access::Emulated, "DMA engine"),
        // The buffer may hold data of another vGPU.
        row(0, 0x4_0000, 0x1000, Access::Refused, "DMA buffer"),
    ],
    dma_bits: Some(28),
};

/// All families.
pub const FAMILIES: [&Family; 2] = [&FRAMEBUFFER, &EDU];

impl Family {
    /// Returns the family of a device.
    pub fn of(vendor: u16, device: u16) -> Option<&'static Self> {
        FAMILIES.into_iter().find(|family| family.ids.contains(&(vendor, device)))
    }

    /// Returns a guest's access to a range of a BAR. A range that no single row contains is
    /// refused.
    pub fn access(&self, bar: u8, offset: u64, len: u64) -> Access {
        let Some(end) = offset.checked_add(len).filter(|_| len > 0) else { return Access::Refused };
        let within = |row: &&Range| {
            let row_end = row.len.map_or(u64::MAX, |len| row.offset + len);
            row.bar == bar && row.offset <= offset && end <= row_end
        };
        self.ranges.iter().find(within).map_or(Access::Refused, |row| row.access)
    }

    /// Returns true if a guest may map a range: whole pages inside one [`Access::Mapped`] row.
    pub fn may_map(&self, bar: u8, offset: u64, len: u64) -> bool {
        offset.is_multiple_of(PAGE_SIZE)
            && len.is_multiple_of(PAGE_SIZE)
            && self.access(bar, offset, len) == Access::Mapped
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn registers_share_no_page_with_mapped_ranges() {
        for family in FAMILIES {
            let of = |mapped: bool| {
                family.ranges.iter().filter(move |row| (row.access == Access::Mapped) == mapped)
            };
            for (mapped, other) in of(true).flat_map(|one| of(false).map(move |two| (one, two))) {
                if mapped.bar != other.bar {
                    continue;
                }
                let page = |at: u64| at / PAGE_SIZE;
                let end = mapped.len.map_or(u64::MAX, |len| mapped.offset + len - 1);
                let other_end = other.offset + other.len.map_or(u64::MAX, |len| len - 1);
                let apart = page(other_end) < page(mapped.offset) || page(end) < page(other.offset);
                assert!(apart, "{}: {} and {}", family.name, mapped.contents, other.contents);
            }
        }
    }

    #[test]
    fn no_register_of_any_family_can_be_mapped() {
        for family in FAMILIES {
            for row in family.ranges.iter().filter(|row| row.access != Access::Mapped) {
                let page = row.offset / PAGE_SIZE * PAGE_SIZE;
                for pages in 1..=4 {
                    assert!(!family.may_map(row.bar, page, pages * PAGE_SIZE), "{}", row.contents);
                }
            }
        }
        assert!(FRAMEBUFFER.may_map(0, 0x40_0000, 0x40_0000));
        assert_eq!(FRAMEBUFFER.access(2, 0x500, 2), Access::Emulated);
        assert_eq!(
            FRAMEBUFFER.access(2, 0x514, 4),
            Access::Refused,
            "no single row contains the range"
        );
    }

    proptest! {
        /// Every range that may be mapped lies entirely in one row of the table.
        #[test]
        fn only_ranges_in_the_table_can_be_mapped(
            family in 0..FAMILIES.len(),
            bar in any::<u8>(),
            offset in any::<u64>(),
            len in any::<u64>(),
            small in any::<bool>(),
        ) {
            let family = FAMILIES[family];
            let (bar, offset, len) =
                if small { (bar % 8, offset % (1 << 20), len % (1 << 20)) } else { (bar, offset, len) };
            let page = |number: u64| number / PAGE_SIZE * PAGE_SIZE;
            for (offset, len) in [(offset, len), (page(offset), page(len))] {
                if family.may_map(bar, offset, len) {
                    let named = family.ranges.iter().any(|row| {
                        row.access == Access::Mapped
                            && row.bar == bar
                            && row.offset <= offset
                            && row.len.is_none_or(|most| offset - row.offset + len <= most)
                    });
                    prop_assert!(named && offset.checked_add(len).is_some() && len > 0);
                }
            }
        }
    }
}
