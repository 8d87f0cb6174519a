//! Screen mode, as reported by the kernel's framebuffer device.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::GuestError;

/// `FBIOGET_VSCREENINFO` and `FBIOGET_FSCREENINFO` of linux/fb.h; both structures are plain words.
const GET_VARIABLE: libc::c_ulong = 0x4600;
const GET_FIXED: libc::c_ulong = 0x4602;
/// `KDSETMODE`, `KD_TEXT` and `KD_GRAPHICS` of linux/kd.h.
const SET_MODE: libc::c_ulong = 0x4b3a;
const TEXT: libc::c_ulong = 0;
const GRAPHICS: libc::c_ulong = 1;

/// Current mode of a screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Bytes from one row to the next.
    pub pitch: u32,
    /// Bits of a pixel.
    pub bits_per_pixel: u32,
    /// Byte offset of the first pixel in video memory.
    pub offset: u64,
}

impl Screen {
    /// Queries the mode of a framebuffer device.
    pub fn of(path: &Path) -> Result<Self, GuestError> {
        let what = || format!("Asking {} for the mode (has bochs-drm bound?)", path.display());
        let file = OpenOptions::new().read(true).open(path).map_err(GuestError::os(what()))?;
        // Longer than both structures, which have 160 and 80 bytes.
        let (mut variable, mut fixed) = ([0u32; 64], [0u32; 64]);
        for (request, answer) in [(GET_VARIABLE, &mut variable), (GET_FIXED, &mut fixed)] {
            // SAFETY: the kernel writes less than the array holds.
            let result =
                unsafe { libc::ioctl(file.as_raw_fd(), request as _, answer.as_mut_ptr()) };
            if result < 0 {
                return Err(GuestError::os(what())(std::io::Error::last_os_error()));
            }
        }
        Ok(Self::decode(&variable, &fixed))
    }

    /// `fb_var_screeninfo`: xres, yres, two virtual sizes, two offsets, bits per pixel. `fb_fix_screeninfo`: a name of
    /// 16 bytes, an address, three words, three half words, then the line length.
    fn decode(variable: &[u32; 64], fixed: &[u32; 64]) -> Self {
        let [width, height, _, _, x, y, bits_per_pixel, ..] = *variable;
        let pitch = fixed[12];
        let offset = u64::from(y) * u64::from(pitch) + u64::from(x) * u64::from(bits_per_pixel / 8);
        Self { width, height, pitch, bits_per_pixel, offset }
    }
}

/// Stops or resumes the kernel's text console, which would draw over a picture.
///
/// Returns whether a console was found.
pub fn show_console(visible: bool) -> bool {
    let Ok(file) = OpenOptions::new().read(true).write(true).open("/dev/tty0") else {
        return false;
    };
    let mode = if visible { TEXT } else { GRAPHICS };
    // SAFETY: KDSETMODE takes a number.
    unsafe { libc::ioctl(file.as_raw_fd(), SET_MODE as _, mode) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_pixels() {
        let (mut variable, mut fixed) = ([0; 64], [0; 64]);
        variable[..7].copy_from_slice(&[1024, 768, 1024, 1536, 0, 768, 32]);
        fixed[12] = 4096;
        let screen = Screen::decode(&variable, &fixed);
        assert_eq!((screen.width, screen.height, screen.pitch), (1024, 768, 4096));
        assert_eq!(screen.offset, 768 * 4096);
    }
}
