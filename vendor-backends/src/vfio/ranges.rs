//! Which DMA addresses the IOMMU lets be mapped, as the kernel tells: all that it has, but for what the platform reserves
//! (messages of interrupts, on PCs).

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, RawFd};

use iommufd_bindings::iommufd::{iommu_ioas_iova_ranges, iommu_iova_range};
use nix::errno::Errno;
use vfio_ioctls::{VfioContainer, VfioIommufd};
use zerocopy::IntoBytes;

/// The requests: `_IO(';', 112)` of a container, `_IO(';', 132)` of iommufd, neither of which the crates have.
const CONTAINER_INFO: libc::Ioctl = 0x3b70;
const IOAS_RANGES: libc::Ioctl = 0x3b84;

/// In what a container tells: its flags, that it has capabilities, where the first is, and the one with ranges.
const FLAGS: usize = 4;
const HAS_CAPABILITIES: u32 = 1 << 1;
const FIRST: usize = 16;
const RANGES: u16 = 1;
/// Within that capability: how many there are, and where they begin.
const COUNT: usize = 8;
const BEGIN: usize = 16;
/// The most that is read of it: far more than any kernel tells.
const MOST: usize = 1 << 20;

/// What a container lets be mapped.
pub(super) fn of_container(container: &VfioContainer) -> io::Result<Vec<RangeInclusive<u64>>> {
    let mut told = vec![0_u64; 512];
    loop {
        let len = size_of_val(told.as_slice());
        told.as_mut_bytes()[..FLAGS].copy_from_slice(&(len as u32).to_ne_bytes());
        // SAFETY: the kernel writes no more than the length that the first field says.
        unsafe { request(container.as_raw_fd(), CONTAINER_INFO, told.as_mut_ptr().cast())? };
        let whole = word(told.as_bytes(), 0).unwrap_or_default() as usize;
        if whole <= len || whole > MOST {
            break;
        }
        told = vec![0; whole.div_ceil(size_of::<u64>())];
    }
    Ok(parse(told.as_bytes()))
}

/// What an address space of iommufd lets be mapped.
pub(super) fn of_iommufd(iommufd: &VfioIommufd) -> io::Result<Vec<RangeInclusive<u64>>> {
    let mut ranges = vec![iommu_iova_range::default(); 64];
    loop {
        let mut ask = iommu_ioas_iova_ranges {
            size: size_of::<iommu_ioas_iova_ranges>() as u32,
            ioas_id: iommufd.ioas().id(),
            num_iovas: ranges.len() as u32,
            __reserved: 0,
            allowed_iovas: ranges.as_mut_ptr().expose_provenance() as u64,
            out_iova_alignment: 0,
        };
        let fd = iommufd.iommufd().as_raw_fd();
        // SAFETY: the kernel writes the structure, and no more ranges than it says there is room for.
        let done = unsafe { request(fd, IOAS_RANGES, (&raw mut ask).cast()) };
        let count = ask.num_iovas as usize;
        match done {
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) && count <= MOST => {
                ranges = vec![iommu_iova_range::default(); count];
            }
            done => {
                done?;
                return Ok(ranges
                    .iter()
                    .take(count)
                    .map(|range| range.start..=range.last)
                    .collect());
            }
        }
    }
}

/// Asks the kernel.
///
/// # Safety
///
/// `argument` points to what the request reads and writes.
unsafe fn request(fd: RawFd, request: libc::Ioctl, argument: *mut libc::c_void) -> io::Result<()> {
    // SAFETY: as the caller says.
    let done = unsafe { libc::ioctl(fd, request, argument) };
    Errno::result(done).map(drop).map_err(io::Error::from)
}

/// The ranges in what a container tells; all addresses, where it tells none.
fn parse(told: &[u8]) -> Vec<RangeInclusive<u64>> {
    let all = || vec![0..=u64::MAX];
    if word(told, FLAGS).is_none_or(|flags| flags & HAS_CAPABILITIES == 0) {
        return all();
    }
    let mut at = word(told, FIRST).unwrap_or_default() as usize;
    // Each is further on than the one before.
    while at >= FIRST {
        let (Some(kind), Some(next)) = (word(told, at), word(told, at + 4)) else { break };
        if kind as u16 == RANGES {
            let count = word(told, at + COUNT).unwrap_or_default() as usize;
            let long = |offset: usize| {
                Some(u64::from_ne_bytes(told.get(offset..)?.first_chunk().copied()?))
            };
            let ranges = (0..count).map_while(|index| {
                let range = index.checked_mul(16)?.checked_add(at + BEGIN)?;
                Some(long(range)?..=long(range + 8)?)
            });
            return ranges.collect();
        }
        if (next as usize) <= at {
            break;
        }
        at = next as usize;
    }
    all()
}

fn word(told: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(told.get(offset..)?.first_chunk().copied()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_containers_ranges_are_found_among_what_else_it_tells() {
        let mut told = Vec::new();
        for word in [96_u32, HAS_CAPABILITIES, 0, 0, 24, 0, 2, 48, 0, 0, 0, 0, 1, 0, 2, 0] {
            told.extend(word.to_ne_bytes());
        }
        for range in [0_u64, 0xfedf_ffff, 0xfef0_0000, (1 << 39) - 1] {
            told.extend(range.to_ne_bytes());
        }
        assert_eq!(parse(&told), [0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1]);
        assert_eq!(parse(&told[..80]), [0..=0xfedf_ffff], "what was cut off is not there");
        let older = [24_u32, 0, 0, 0, 24, 0].map(u32::to_ne_bytes).concat();
        assert_eq!(parse(&older), [0..=u64::MAX]);
    }

    proptest! {
        #[test]
        fn nothing_told_makes_it_panic_or_hang(mut told in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(flags) = told.get_mut(FLAGS) {
                *flags |= HAS_CAPABILITIES as u8;
            }
            if let Some(first) = told.get_mut(FIRST..FIRST + 4) {
                first.copy_from_slice(&24_u32.to_ne_bytes());
            }
            prop_assert!(parse(&told).len() <= 200 / 16 + 1);
        }
    }
}
