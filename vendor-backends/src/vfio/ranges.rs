//! IOVA ranges that the IOMMU can map, as the kernel reports them: everything that the IOMMU
//! supports except ranges that the platform reserves (on PCs, the MSI window).

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, RawFd};

use iommufd_bindings::iommufd::{iommu_ioas_iova_ranges, iommu_iova_range};
use nix::errno::Errno;
use vfio_ioctls::{VfioContainer, VfioIommufd};
use zerocopy::IntoBytes;

/// Request numbers that the crates lack: `VFIO_IOMMU_GET_INFO`, `_IO(';', 112)`, of a container,
/// and `IOMMU_IOAS_IOVA_RANGES`, `_IO(';', 132)`, of iommufd.
const CONTAINER_INFO: libc::Ioctl = 0x3b70;
const IOAS_IOVA_RANGES: libc::Ioctl = 0x3b84;

/// Fields of `vfio_iommu_type1_info`: offset of the flags, flag for capabilities, offset of the
/// first capability's offset, and the id of the IOVA range capability.
const FLAGS: usize = 4;
const HAS_CAPABILITIES: u32 = 1 << 1;
const FIRST_CAPABILITY: usize = 16;
const RANGE_CAPABILITY: u16 = 1;
/// Fields of the IOVA range capability: offsets of the count and of the first range.
const COUNT: usize = 8;
const FIRST_RANGE: usize = 16;
/// Limit in bytes (or ranges) of a reply; far above what any kernel returns.
const MAX_REPLY: usize = 1 << 20;

/// Returns the IOVA ranges of a container.
pub(super) fn of_container(container: &VfioContainer) -> io::Result<Vec<RangeInclusive<u64>>> {
    let mut info = vec![0_u64; 512];
    loop {
        let len = size_of_val(info.as_slice());
        info.as_mut_bytes()[..FLAGS].copy_from_slice(&(len as u32).to_ne_bytes());
        // SAFETY: the kernel writes no more than the length that the first field says.
        unsafe { request(container.as_raw_fd(), CONTAINER_INFO, info.as_mut_ptr().cast())? };
        let needed = word(info.as_bytes(), 0).unwrap_or_default() as usize;
        if needed <= len || needed > MAX_REPLY {
            break;
        }
        info = vec![0; needed.div_ceil(size_of::<u64>())];
    }
    Ok(parse(info.as_bytes()))
}

/// Returns the IOVA ranges of an iommufd address space.
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
        // SAFETY: the kernel writes the structure, and no more ranges than it says there is room
        // for.
        let done = unsafe { request(fd, IOAS_IOVA_RANGES, (&raw mut ask).cast()) };
        let count = ask.num_iovas as usize;
        match done {
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) && count <= MAX_REPLY => {
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

/// Issues an ioctl.
///
/// # Safety
///
/// `argument` must point to the structure that the request reads and writes.
unsafe fn request(fd: RawFd, request: libc::Ioctl, argument: *mut libc::c_void) -> io::Result<()> {
    // SAFETY: guaranteed by the caller.
    let done = unsafe { libc::ioctl(fd, request, argument) };
    Errno::result(done).map(drop).map_err(io::Error::from)
}

/// Parses the IOVA ranges from `vfio_iommu_type1_info`. Returns the whole address space if the
/// kernel reports none.
fn parse(info: &[u8]) -> Vec<RangeInclusive<u64>> {
    let all = || vec![0..=u64::MAX];
    if word(info, FLAGS).is_none_or(|flags| flags & HAS_CAPABILITIES == 0) {
        return all();
    }
    let mut at = word(info, FIRST_CAPABILITY).unwrap_or_default() as usize;
    // Capabilities are in ascending order; stop at one that is not.
    while at >= FIRST_CAPABILITY {
        let (Some(kind), Some(next)) = (word(info, at), word(info, at + 4)) else { break };
        if kind as u16 == RANGE_CAPABILITY {
            let count = word(info, at + COUNT).unwrap_or_default() as usize;
            let long = |offset: usize| {
                Some(u64::from_ne_bytes(info.get(offset..)?.first_chunk().copied()?))
            };
            let ranges = (0..count).map_while(|index| {
                let range = index.checked_mul(16)?.checked_add(at + FIRST_RANGE)?;
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

fn word(info: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(info.get(offset..)?.first_chunk().copied()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_are_found_among_other_capabilities() {
        let mut info = Vec::new();
        for word in [96_u32, HAS_CAPABILITIES, 0, 0, 24, 0, 2, 48, 0, 0, 0, 0, 1, 0, 2, 0] {
            info.extend(word.to_ne_bytes());
        }
        for range in [0_u64, 0xfedf_ffff, 0xfef0_0000, (1 << 39) - 1] {
            info.extend(range.to_ne_bytes());
        }
        assert_eq!(parse(&info), [0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1]);
        assert_eq!(parse(&info[..80]), [0..=0xfedf_ffff], "a truncated reply has fewer ranges");
        let older = [24_u32, 0, 0, 0, 24, 0].map(u32::to_ne_bytes).concat();
        assert_eq!(parse(&older), [0..=u64::MAX]);
    }

    proptest! {
        #[test]
        fn nothing_told_makes_it_panic_or_hang(mut info in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(flags) = info.get_mut(FLAGS) {
                *flags |= HAS_CAPABILITIES as u8;
            }
            if let Some(first) = info.get_mut(FIRST_CAPABILITY..FIRST_CAPABILITY + 4) {
                first.copy_from_slice(&24_u32.to_ne_bytes());
            }
            prop_assert!(parse(&info).len() <= 200 / 16 + 1);
        }
    }
}
