//! Guest memory that a vGPU has written, as its worker passes it.
//!
//! A worker that was compromised could pass memory without an end, or requests for more without
//! any memory. Each part therefore has to bring the save on, and all parts together are not more
//! than this host's memory, where a VM's memory is.

use std::fs::File;
use std::io::{self, BufReader};

use mdev_core::ids::GuestPa;
use nix::sys::sysinfo::sysinfo;

use crate::guest_pieces;
use crate::worker_client::Written;

/// Returns the bytes that a VM's memory can have.
pub(super) fn limit() -> u64 {
    sysinfo().map_or(u64::MAX, |host| host.ram_total().saturating_add(host.swap_total()))
}

/// Passes the pieces of all parts to `take`, from the first part on. `request` requests the part
/// from an address on.
///
/// # Errors
///
/// Fails if `request` or `take` fails, if the pieces are not in ascending order, if a part with
/// less than [`guest_pieces::BATCH`] is not the last one, or if there are more than `limit` bytes.
pub(super) fn read(
    first: Written,
    limit: u64,
    mut request: impl FnMut(u64) -> io::Result<Written>,
    mut take: impl FnMut(GuestPa, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let (mut part, mut from, mut left) = (first, 0, limit);
    loop {
        let Written { pieces, next } = part;
        let before = left;
        guest_pieces::read(BufReader::new(File::from(pieces)), |address, data| {
            let len = data.len() as u64;
            let end = address.0.checked_add(len).filter(|_| address.0 >= from);
            from = end.ok_or_else(|| refused("in another order"))?;
            left = left.checked_sub(len).ok_or_else(|| refused("without an end"))?;
            take(address, data)
        })?;
        let Some(next) = next else { return Ok(()) };
        if next < from {
            return Err(refused("in another order"));
        }
        if before - left < guest_pieces::BATCH {
            return Err(refused("in too small parts"));
        }
        from = next;
        part = request(next)?;
    }
}

fn refused(how: &str) -> io::Error {
    io::Error::other(format!("The worker passes guest memory {how}; it may have been taken over"))
}

#[cfg(test)]
mod tests {
    use std::io::Seek;

    use mdev_core::stream::MAX_CHUNK;
    use mdev_core::testing::memory;

    use super::*;

    const CHUNK: u64 = MAX_CHUNK as u64;
    const BATCH: u64 = guest_pieces::BATCH;

    /// Returns a part of pieces of these addresses and lengths.
    fn part(pieces: impl IntoIterator<Item = (u64, u64)>, next: Option<u64>) -> Written {
        let mut file = memory(0);
        for (address, len) in pieces {
            guest_pieces::write(&mut file, GuestPa(address), &vec![7; len as usize]).unwrap();
        }
        file.rewind().unwrap();
        Written { pieces: file.into(), next }
    }

    /// Returns a whole part from an address on.
    fn whole(from: u64) -> Written {
        let pieces = (from..from + BATCH).step_by(MAX_CHUNK).map(|at| (at, CHUNK));
        part(pieces, Some(from + BATCH))
    }

    /// Reads parts of which each is made by `parts`. Returns how many there were, and their bytes.
    fn read_all(limit: u64, parts: impl Fn(u64) -> Written) -> (u64, u64, io::Result<()>) {
        let (mut requests, mut bytes) = (1, 0);
        let request = |from| {
            requests += 1;
            assert!(requests < 100, "no end");
            Ok(parts(from))
        };
        let take = |_, data: &[u8]| {
            bytes += data.len() as u64;
            Ok(())
        };
        let result = read(parts(0), limit, request, take);
        (requests, bytes, result)
    }

    #[test]
    fn all_parts_are_read() {
        let parts = |from| match from {
            0 => whole(0),
            from => part([(from, 5), (from + 4096, CHUNK), (u64::MAX - 9, 9)], None),
        };
        let (requests, bytes, result) = read_all(BATCH + CHUNK + 14, parts);
        result.unwrap();
        assert_eq!((requests, bytes), (2, BATCH + CHUNK + 14));
        read_all(0, |_| part([], None)).2.unwrap();
    }

    #[test]
    fn memory_without_an_end_is_refused() {
        let (requests, bytes, result) = read_all(3 * BATCH, whole);
        assert_eq!((requests, bytes), (4, 3 * BATCH));
        assert!(result.unwrap_err().to_string().contains("without an end"));
        // In one part.
        let (_, bytes, result) = read_all(3 * CHUNK, whole);
        assert_eq!(bytes, 3 * CHUNK);
        assert!(result.unwrap_err().to_string().contains("without an end"));
    }

    #[test]
    fn parts_that_do_not_bring_the_save_on_are_refused() {
        for few in [0, 1, BATCH / CHUNK - 1] {
            let small =
                |from| part((0..few).map(|n| (from + n * CHUNK, CHUNK)), Some(from + BATCH));
            let (requests, _, result) = read_all(u64::MAX, small);
            assert_eq!(requests, 1, "{few}");
            assert!(result.unwrap_err().to_string().contains("in too small parts"));
        }
    }

    #[test]
    fn pieces_in_another_order_are_refused() {
        let again = |from: u64| if from == 0 { whole(0) } else { part([(from - 1, 2)], None) };
        let overlapping = |_| part([(4096, 4096), (8191, 1)], None);
        let beyond = |_| part([(u64::MAX, 1)], None);
        let back = |_| Written { next: Some(0), ..whole(0) };
        for (parts, expected) in
            [(&again as &dyn Fn(u64) -> Written, 2), (&back, 1), (&overlapping, 1), (&beyond, 1)]
        {
            let (requests, _, result) = read_all(u64::MAX, parts);
            assert_eq!(requests, expected);
            assert!(result.unwrap_err().to_string().contains("in another order"));
        }
    }

    #[test]
    fn a_client_that_is_gone_ends_the_requests() {
        let gone = |_, _: &[u8]| Err(io::ErrorKind::BrokenPipe.into());
        let error = read(whole(0), u64::MAX, |_| panic!("a request"), gone).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
