//! Probes how many DMA address bits a device uses, because no register of `edu` reports the number.
//!
//! A device with fewer address lines ignores the upper bits of an address. For each possible number
//! of bits, this module maps one page at the test address truncated to that many bits. The device
//! writes to the test address once, and the page that changed shows the number of bits. All of
//! these pages belong to the mediator, and the IOMMU faults on every other address, so the probe
//! cannot damage other memory.

use mdev_core::units::PAGE_SIZE;

use super::engine::{BUFFER, Direction, Edu};
use crate::vfio::device::{Attached, DeviceError};
use crate::vfio::window::Window;

/// Window of the source bytes.
const SOURCE: Window = Window { iova: 4 * PAGE_SIZE, len: PAGE_SIZE };
/// Test address truncated to the fewest bits.
const TEST_ADDRESS: u64 = 8 * PAGE_SIZE;
/// Test pattern.
const PATTERN: [u8; 8] = *b"tessera?";

/// Returns the test address truncated to `bits` bits.
fn truncate(min_bits: u8, bits: u8) -> u64 {
    let all = |bits: u8| 1_u64.checked_shl(bits.into()).map_or(u64::MAX, |end| end - 1);
    TEST_ADDRESS | all(bits) & !all(min_bits)
}

/// Returns the number of address bits that the device uses, at least `min_bits`, among those that
/// the IOMMU can map.
pub fn probe(edu: &Edu, min_bits: u8) -> Result<u8, DeviceError> {
    let source = edu.device().attach(SOURCE)?;
    let _ = source.memory.write(0, &PATTERN);
    edu.transfer(Direction::ToDevice, SOURCE.iova, BUFFER, PATTERN.len() as u64)?;
    // Addresses that the IOMMU cannot map are skipped.
    let page = |bits: u8| {
        let window = Window { iova: truncate(min_bits, bits), len: PAGE_SIZE };
        edu.device().attach(window).ok().map(|page| (bits, page))
    };
    let mut pages: Vec<(u8, Attached)> = (min_bits..=64).filter_map(page).collect();
    while let Some((most, _)) = pages.last() {
        edu.transfer(
            Direction::FromDevice,
            truncate(min_bits, *most),
            BUFFER,
            PATTERN.len() as u64,
        )?;
        let changed = pages.iter().find(|(_, page)| {
            let mut bytes = [0; PATTERN.len()];
            page.memory.read(0, &mut bytes).is_some() && bytes == PATTERN
        });
        if let Some((bits, _)) = changed {
            return Ok(*bits);
        }
        // The IOMMU refused the address that the device used.
        pages.pop();
    }
    Ok(min_bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_of_bits_truncates_to_another_address() {
        assert_eq!(truncate(28, 28), TEST_ADDRESS);
        assert_eq!(truncate(28, 29), 0x1000_0000 | TEST_ADDRESS);
        assert_eq!(truncate(28, 40), 0xff_f000_0000 | TEST_ADDRESS);
        assert_eq!(truncate(28, 64), 0xffff_ffff_f000_0000 | TEST_ADDRESS);
        for bits in 28..=64 {
            let kept = u64::MAX >> (64 - bits);
            assert_eq!(truncate(28, 64) & kept, truncate(28, bits), "{bits} bits");
        }
    }
}
