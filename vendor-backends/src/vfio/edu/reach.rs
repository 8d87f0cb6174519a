//! How many bits of a DMA address a device uses: no register of `edu` says it, so it is tried.
//!
//! A device that has fewer lines than an address has bits drops the upper ones. So one page is mapped for each number of
//! bits that it may have, at what would be left of one and the same address; then the device writes to that address once,
//! and the page that has changed tells. All of these pages are the mediator's own, and what is at none of them the IOMMU
//! would refuse: nothing that the device does here can hurt anybody.

use mdev_core::units::PAGE_SIZE;

use super::engine::{BUFFER, Direction, Edu};
use crate::vfio::device::{Attached, DeviceError};
use crate::vfio::window::Window;

/// Where the bytes come from that are written.
const FROM: Window = Window { iova: 4 * PAGE_SIZE, len: PAGE_SIZE };
/// What is left of the address with the fewest bits.
const LEFT: u64 = 8 * PAGE_SIZE;
/// The bytes.
const MARK: [u8; 8] = *b"tessera?";

/// The address of which the test is, as it looks with so many bits.
fn cut(least: u8, bits: u8) -> u64 {
    let all = |bits: u8| 1_u64.checked_shl(bits.into()).map_or(u64::MAX, |end| end - 1);
    LEFT | all(bits) & !all(least)
}

/// How many bits the device uses of those that the IOMMU takes, and no fewer than `least`.
pub fn bits(edu: &Edu, least: u8) -> Result<u8, DeviceError> {
    let from = edu.device().attach(FROM)?;
    let _ = from.memory.write(0, &MARK);
    edu.transfer(Direction::ToDevice, FROM.iova, BUFFER, MARK.len() as u64)?;
    // What the IOMMU does not take is not tried.
    let page = |bits: u8| {
        let window = Window { iova: cut(least, bits), len: PAGE_SIZE };
        edu.device().attach(window).ok().map(|page| (bits, page))
    };
    let mut pages: Vec<(u8, Attached)> = (least..=64).filter_map(page).collect();
    while let Some((most, _)) = pages.last() {
        edu.transfer(Direction::FromDevice, cut(least, *most), BUFFER, MARK.len() as u64)?;
        let told = pages.iter().find(|(_, page)| {
            let mut bytes = [0; MARK.len()];
            page.memory.read(0, &mut bytes).is_some() && bytes == MARK
        });
        if let Some((bits, _)) = told {
            return Ok(*bits);
        }
        // The IOMMU has refused what the device made of it.
        pages.pop();
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_of_bits_leaves_another_address() {
        assert_eq!(cut(28, 28), LEFT);
        assert_eq!(cut(28, 29), 0x1000_0000 | LEFT);
        assert_eq!(cut(28, 40), 0xff_f000_0000 | LEFT);
        assert_eq!(cut(28, 64), 0xffff_ffff_f000_0000 | LEFT);
        for bits in 28..=64 {
            let kept = u64::MAX >> (64 - bits);
            assert_eq!(cut(28, 64) & kept, cut(28, bits), "{bits} bits");
        }
    }
}
