//! Uncompressed kernels.
//!
//! Debian's kernel images decompress themselves, which takes an emulated CPU a fifth of a boot's
//! time. QEMU starts an uncompressed kernel by PVH ("Xen x86/HVM direct boot ABI").

use object::elf::FileHeader64;
use object::endian::LittleEndian;
use object::read::elf::{FileHeader, ProgramHeader};
use ruzstd::decoding::FrameDecoder;

/// Most bytes of an uncompressed kernel.
const MAX_LEN: u32 = 256 << 20;

/// Type of the ELF note that names a kernel's entry for PVH, `XEN_ELFNOTE_PHYS32_ENTRY`.
const PHYS32_ENTRY: u32 = 18;

/// Returns the kernel in an image that QEMU can start by PVH, or none if the image is compressed in
/// another way than zstd or has no entry for PVH.
pub fn uncompressed(image: &[u8]) -> Option<Vec<u8>> {
    // The length follows the compressed kernel.
    let (compressed, len) = payload(image)?.split_last_chunk()?;
    let len = Some(u32::from_le_bytes(*len)).filter(|len| *len <= MAX_LEN)?;
    let mut kernel = Vec::with_capacity(len as usize);
    FrameDecoder::new().decode_all_to_vec(compressed, &mut kernel).ok()?;
    (kernel.len() == len as usize && has_pvh_entry(&kernel)).then_some(kernel)
}

/// Returns the compressed kernel in an image, as Linux' boot protocol 2.08 defines it.
fn payload(image: &[u8]) -> Option<&[u8]> {
    const SECTOR: usize = 512;
    let bytes = |at: usize| image.get(at..at + 4)?.try_into().ok();
    let number = |at: usize| Some(u32::from_le_bytes(bytes(at)?) as usize);
    if bytes(0x202)? != *b"HdrS" || number(0x206)? & 0xffff < 0x208 {
        return None;
    }
    let setup_sectors = match image.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(*sectors),
    };
    let start = (1 + setup_sectors) * SECTOR + number(0x248)?;
    image.get(start..start.checked_add(number(0x24c)?)?)
}

/// Returns whether a kernel has an entry for PVH.
fn has_pvh_entry(kernel: &[u8]) -> bool {
    let endian = LittleEndian;
    let Ok(header) = FileHeader64::<LittleEndian>::parse(kernel) else { return false };
    let segments = header.program_headers(endian, kernel).unwrap_or_default();
    segments.iter().any(|segment| {
        let Ok(Some(mut notes)) = segment.notes(endian, kernel) else { return false };
        std::iter::from_fn(|| notes.next().ok().flatten())
            .any(|note| note.name() == b"Xen" && note.n_type(endian) == PHYS32_ENTRY)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    /// Returns a kernel of one segment with a note.
    fn kernel(note: u32) -> Vec<u8> {
        let mut kernel = b"\x7fELF\x02\x01\x01".to_vec();
        kernel.resize(32, 0);
        kernel.extend(64_u64.to_le_bytes());
        kernel.resize(54, 0);
        kernel.extend([56, 0, 1, 0]);
        kernel.resize(64, 0);
        kernel.extend([4_u32, 4].map(u32::to_le_bytes).concat());
        kernel.extend([120_u64, 0, 0, 24, 24, 4].map(u64::to_le_bytes).concat());
        kernel.extend([4, 8, note].map(u32::to_le_bytes).concat());
        kernel.extend(b"Xen\0\0\0\0\x01\0\0\0\0");
        kernel
    }

    /// Returns an image with a compressed kernel of a declared length.
    fn image(compressed: &[u8], len: usize) -> Vec<u8> {
        let mut image = vec![0; 0x250];
        image[0x1f1] = 1;
        image[0x202..0x208].copy_from_slice(b"HdrS\x0f\x02");
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&(compressed.len() as u32 + 4).to_le_bytes());
        image.resize(2 * 512 + 16, 0);
        image.extend(compressed);
        image.extend((len as u32).to_le_bytes());
        image
    }

    fn compressed(kernel: &[u8]) -> Vec<u8> {
        compress_to_vec(kernel, CompressionLevel::Fastest)
    }

    #[test]
    fn a_kernel_with_an_entry_for_pvh_is_taken_from_its_image() {
        let kernel = kernel(PHYS32_ENTRY);
        let image = image(&compressed(&kernel), kernel.len());
        assert_eq!(uncompressed(&image), Some(kernel));
        for len in 0..image.len() {
            assert_eq!(uncompressed(&image[..len]), None, "the first {len} bytes");
        }
    }

    #[test]
    fn other_images_are_left_as_they_are() {
        let without = kernel(17);
        assert_eq!(uncompressed(&image(&compressed(&without), without.len())), None);
        let kernel = kernel(PHYS32_ENTRY);
        for len in [0, kernel.len() - 1, kernel.len() + 1, u32::MAX as usize] {
            assert_eq!(uncompressed(&image(&compressed(&kernel), len)), None, "{len} bytes");
        }
        assert_eq!(uncompressed(&image(b"\xfd7zXZ\0", kernel.len())), None);
        let mut old = image(&compressed(&kernel), kernel.len());
        old[0x206] = 7;
        assert_eq!(uncompressed(&old), None);
        let mut outside = image(&compressed(&kernel), kernel.len());
        outside[0x248..0x250].fill(0xff);
        assert_eq!(uncompressed(&outside), None);
    }
}
