//! The vGPU's partition of video memory, which its programs share.

use std::io;
use std::os::fd::AsFd;

use ipc::mem::Mapping;
use mdev_core::gpu::Aperture;
use mdev_core::units::PAGE_SIZE;

use super::extents::Extent;

/// Unit of allocations, in bytes: a big page.
pub const GRANULE: u64 = 64 << 10;

/// Fills a part of the partition with zeros.
pub fn clear(partition: &Aperture, part: Extent) -> io::Result<()> {
    // A file of real video memory cannot have holes.
    partition.punch_hole(part.offset, part.len).or_else(|_| write_zeros(partition, part))
}

fn write_zeros(partition: &Aperture, Extent { offset, len }: Extent) -> io::Result<()> {
    let end = offset.checked_add(len).filter(|end| *end <= partition.len);
    let start = end.and_then(|_| partition.offset.checked_add(offset));
    let start = start.ok_or(io::ErrorKind::InvalidInput)?;
    let mapping = Mapping::new(partition.fd.as_fd(), start, len, true)?;
    let zeros = [0; PAGE_SIZE as usize];
    for at in (0..len).step_by(zeros.len()) {
        let bytes = (len - at).min(PAGE_SIZE) as usize;
        mapping.write(at, &zeros[..bytes]).ok_or(io::ErrorKind::Other)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ipc::mem::SharedMemory;

    use super::*;

    #[test]
    fn a_part_is_cleared_and_nothing_else() {
        let file = SharedMemory::new(c"test", 8 * GRANULE).unwrap();
        let partition = Aperture { fd: file.fd, offset: GRANULE, len: 6 * GRANULE };
        let part = Extent { offset: 2 * GRANULE, len: 3 * GRANULE };
        for clear in [clear, write_zeros] {
            file.mapping.write(0, &vec![0xa5; 8 * GRANULE as usize]).unwrap();
            clear(&partition, part).unwrap();
            let mut bytes = vec![0; 8 * GRANULE as usize];
            file.mapping.read(0, &mut bytes).unwrap();
            for (granule, bytes) in bytes.chunks(GRANULE as usize).enumerate() {
                let expected = if (3..6).contains(&granule) { 0 } else { 0xa5 };
                assert!(bytes.iter().all(|byte| *byte == expected), "{granule}");
            }
            assert!(clear(&partition, Extent { offset: 4 * GRANULE, len: 3 * GRANULE }).is_err());
        }
    }
}
