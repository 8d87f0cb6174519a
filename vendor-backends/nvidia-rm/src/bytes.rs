//! Little-endian numbers in bytes.

/// Returns 32 bits at an offset.
pub fn get_u32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

/// Replaces 32 bits at an offset.
pub fn put_u32(bytes: &mut [u8], at: usize, value: u32) -> Option<()> {
    *bytes.get_mut(at..)?.first_chunk_mut()? = value.to_le_bytes();
    Some(())
}
