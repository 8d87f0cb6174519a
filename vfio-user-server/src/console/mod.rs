//! Screens, live: what a vGPU shows, served as RFB (VNC, RFC 6143) by the manager.
//!
//! Never by a worker: a worker faces its guest. The manager reads the picture out of video memory as it does for a
//! screenshot, and gives it to viewers on connections that the control API has let in. `vgpuctl view` makes sockets of
//! those that VNC viewers can use. In reading order:
//!
//! * [`readout`]: a screen in its video memory, as the worker says where
//! * [`canvas`]: what it looked like at the last look, and which parts changed when
//! * [`turns`]: how often a screen may be read, whoever reads it
//! * [`pace`], [`screens`]: when to look, and how much at a time; who looks at which screen
//! * [`rfb`]: the protocol
//! * [`keys`], [`monitor`]: keyboard and pointer, for the VM's QEMU
//! * [`session`]: one viewer
//! * [`web`]: the console for browsers

pub mod canvas;
pub mod keys;
pub mod monitor;
pub mod pace;
pub mod readout;
pub mod rfb;
pub mod screens;
pub mod session;
pub mod turns;
pub mod web;
