//! Lists of pages in guest memory.

use cuda_socket::Range;
use mdev_core::abi::queue::{self, LIST_RANGES, List, MAX_RANGES, Memory, PAGE_BYTES};
use mdev_core::mem::SharedGuestMemory;
use mdev_core::units::is_aligned;
use nix::errno::Errno;

use super::ring;
use crate::guest_memory::{FreedPages, GivenMemory, GuestPages};

/// Reads the list of a memory, once and page by page. Each page of the list has a range at least,
/// so a list that has no end is refused.
pub fn read(
    memory: &SharedGuestMemory,
    spec: &Memory,
    freed: &FreedPages,
) -> Result<GivenMemory, Errno> {
    let range = Range { address: spec.address, len: spec.length };
    let range = match spec.kind {
        queue::ALLOCATED if spec.address == 0 => None,
        queue::PINNED => Some(range),
        _ => return Err(Errno::EINVAL),
    };
    let (mut ranges, mut total, mut next) = (Vec::new(), 0_u64, spec.list);
    while next != 0 {
        if !is_aligned(next, PAGE_BYTES as u64) {
            return Err(Errno::EINVAL);
        }
        let page: List = ring::read(memory, next).map_err(|_| Errno::EFAULT)?;
        let count = page.count as usize;
        if !(1..=LIST_RANGES).contains(&count) || ranges.len() + count > MAX_RANGES {
            return Err(Errno::EINVAL);
        }
        for range in &page.ranges[..count] {
            total = total.checked_add(range.length).ok_or(Errno::EINVAL)?;
            ranges.push((range.address, range.length));
        }
        next = page.next;
    }
    if total != spec.length || total == 0 {
        return Err(Errno::EINVAL);
    }
    let pages = GuestPages::new(spec.id, ranges, freed).ok_or(Errno::EINVAL)?;
    Ok(GivenMemory { pages, range })
}
