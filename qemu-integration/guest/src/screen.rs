//! Screen mode, as reported by the kernel's framebuffer device.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use crate::GuestError;

/// `FBIOGET_VSCREENINFO`, `FBIOPUT_VSCREENINFO` and `FBIOGET_FSCREENINFO` of linux/fb.h; both
/// structures are plain words.
const GET_VARIABLE: libc::c_ulong = 0x4600;
const PUT_VARIABLE: libc::c_ulong = 0x4601;
const GET_FIXED: libc::c_ulong = 0x4602;
/// Word `activate` of `fb_var_screeninfo`, and `FB_ACTIVATE_FORCE`: sets the mode even if it is the
/// same.
const ACTIVATE: usize = 21;
const FORCE: u32 = 128;
/// `KDSETMODE`, `KD_TEXT` and `KD_GRAPHICS` of linux/kd.h.
const SET_MODE: libc::c_ulong = 0x4b3a;
const MODE_TEXT: libc::c_ulong = 0;
const MODE_GRAPHICS: libc::c_ulong = 1;

/// Folder in which Linux lists framebuffers.
pub const GRAPHICS: &str = "/sys/class/graphics";

/// Returns the name of a PCI function's framebuffer, such as `fb1`, from a folder like
/// [`GRAPHICS`].
///
/// A framebuffer of the firmware (efifb, simpledrm) is found where the kernel puts it below the
/// function, since Linux 6.9.
pub fn framebuffer(graphics: &Path, address: &str) -> Option<String> {
    let entries = fs::read_dir(graphics).ok()?;
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names.into_iter().filter(|name| name.starts_with("fb")).find(|name| {
        let device: Option<PathBuf> = graphics.join(name).canonicalize().ok();
        device.is_some_and(|device| device.iter().any(|part| part == OsStr::new(address)))
    })
}

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
    /// Turns on the screen of a framebuffer device, and returns its mode. A screen that is not the
    /// console's is off until a program uses it.
    pub fn turn_on(path: &Path) -> Result<Self, GuestError> {
        let what = || format!("Asking {} for the mode (has bochs-drm bound?)", path.display());
        let file =
            OpenOptions::new().read(true).write(true).open(path).map_err(GuestError::os(what()))?;
        // Longer than both structures, which have 160 and 80 bytes.
        let (mut variable, mut fixed) = ([0u32; 64], [0u32; 64]);
        let ioctl = |request: libc::c_ulong, words: &mut [u32; 64]| {
            // SAFETY: the kernel accesses less than the array holds.
            let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, words.as_mut_ptr()) };
            if result < 0 {
                return Err(GuestError::os(what())(std::io::Error::last_os_error()));
            }
            Ok(())
        };
        ioctl(GET_VARIABLE, &mut variable)?;
        variable[ACTIVATE] = FORCE;
        ioctl(PUT_VARIABLE, &mut variable)?;
        ioctl(GET_FIXED, &mut fixed)?;
        Ok(Self::decode(&variable, &fixed))
    }

    /// `fb_var_screeninfo`: xres, yres, two virtual sizes, two offsets, bits per pixel.
    /// `fb_fix_screeninfo`: a name of 16 bytes, an address, three words, three half words, then the
    /// line length.
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
    let mode = if visible { MODE_TEXT } else { MODE_GRAPHICS };
    // SAFETY: KDSETMODE takes a number.
    unsafe { libc::ioctl(file.as_raw_fd(), SET_MODE as _, mode) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn framebuffers_of_other_adapters_are_skipped() {
        let sys = tempfile::tempdir().unwrap();
        let graphics = sys.path().join("class/graphics");
        fs::create_dir_all(&graphics).unwrap();
        for (name, device) in [
            ("fb0", "pci0000:00/0000:00:01.0/graphics/fb0"),
            ("fb1", "pci0000:00/0000:00:02.0/0000:01:00.0/graphics/fb1"),
            ("fb2", "platform/efi-framebuffer.0/graphics/fb2"),
            ("fbcon", "virtual/graphics/fbcon"),
        ] {
            fs::create_dir_all(sys.path().join(device)).unwrap();
            let target = Path::new("../..").join(device);
            std::os::unix::fs::symlink(target, graphics.join(name)).unwrap();
        }
        assert_eq!(framebuffer(&graphics, "0000:01:00.0").as_deref(), Some("fb1"));
        assert_eq!(framebuffer(&graphics, "0000:00:01.0").as_deref(), Some("fb0"));
        assert_eq!(framebuffer(&graphics, "0000:00:10.0"), None);
    }

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
