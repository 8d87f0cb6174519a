//! Pieces of guest memory in a file, between the manager and a worker: for each, its address (64
//! bits, little-endian), its length (32 bits) and its bytes.

use std::io::{self, ErrorKind, Read, Write};

use mdev_core::ids::GuestPa;
use mdev_core::stream::MAX_CHUNK;

/// Bytes of guest memory that are passed together: a worker's memory is limited. Only the last part
/// has less.
pub const BATCH: u64 = 64 << 20;

/// Writes a piece of at most [`MAX_CHUNK`] bytes.
pub fn write(to: &mut impl Write, address: GuestPa, data: &[u8]) -> io::Result<()> {
    if data.is_empty() || data.len() > MAX_CHUNK {
        return Err(ErrorKind::InvalidInput.into());
    }
    to.write_all(&address.0.to_le_bytes())?;
    to.write_all(&(data.len() as u32).to_le_bytes())?;
    to.write_all(data)
}

/// Reads pieces up to the end of a file, which is untrusted input.
pub fn read(
    mut from: impl Read,
    mut take: impl FnMut(GuestPa, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let invalid = || io::Error::new(ErrorKind::InvalidData, "The guest memory cannot be read");
    let mut data = Vec::new();
    loop {
        let mut header = Vec::new();
        if from.by_ref().take(12).read_to_end(&mut header)? == 0 {
            return Ok(());
        }
        let (address, len) = header.split_first_chunk().ok_or_else(invalid)?;
        let len = <[u8; 4]>::try_from(len).map_err(|_| invalid())?;
        let len = u32::from_le_bytes(len) as usize;
        if len == 0 || len > MAX_CHUNK {
            return Err(invalid());
        }
        data.resize(len, 0);
        from.read_exact(&mut data).map_err(|_| invalid())?;
        take(GuestPa(u64::from_le_bytes(*address)), &data)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_read_as_they_were_written() {
        let mut file = Vec::new();
        let pieces = [(0x1000, vec![7; 5]), (u64::MAX, vec![8; MAX_CHUNK])];
        for (address, data) in &pieces {
            write(&mut file, GuestPa(*address), data).unwrap();
        }
        let mut found = Vec::new();
        read(&file[..], |address, data| {
            found.push((address.0, data.to_vec()));
            Ok(())
        })
        .unwrap();
        assert_eq!(found, pieces);
        assert!(write(&mut file, GuestPa(0), &vec![0; MAX_CHUNK + 1]).is_err());
        assert!(write(&mut file, GuestPa(0), &[]).is_err());
    }

    #[test]
    fn what_is_cut_off_or_too_long_is_refused() {
        let mut file = Vec::new();
        write(&mut file, GuestPa(1), &[9; 3]).unwrap();
        for len in 1..file.len() {
            assert!(read(&file[..len], |_, _| Ok(())).is_err(), "{len}");
        }
        for len in [0, MAX_CHUNK as u32 + 1, u32::MAX] {
            file[8..12].copy_from_slice(&len.to_le_bytes());
            assert!(read(&file[..], |_, _| Ok(())).is_err(), "{len}");
        }
    }
}
