//! Screens of vGPUs: screenshots, thumbnails, and live screens over RFB (VNC, RFC 6143).
//!
//! The manager serves screens, because workers are exposed to their guests. The manager reads
//! pixels from video memory and sends them to viewers on connections that the control API or the
//! web console has authorized. In reading order:
//!
//! * `video_memory`: checks the video memory that a worker passes
//! * [`readout`]: reads a screen from video memory
//! * [`readout_limiter`]: limits how often a screen is read, by the vGPU's `refresh`
//! * [`screenshot`], [`thumbnail`], [`shared_screenshots`]: PNGs, shared by concurrent requests
//! * [`read_pace`], [`live_screens`]: reads of screens with viewers: when, how much, and for which
//!   viewers
//! * [`qemu_keys`], [`qmp_input`]: keyboard and pointer, sent to the VM's QEMU
//! * [`viewer`]: RFB session of one viewer

pub mod live_screens;
pub mod qemu_keys;
pub mod qmp_input;
pub mod read_pace;
pub mod readout;
pub mod readout_limiter;
pub mod screenshot;
pub mod shared_screenshots;
pub mod thumbnail;
mod video_memory;
pub mod viewer;
