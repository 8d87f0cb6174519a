//! `vgpuctl`: commands, compatibility with mdevctl, error messages.

mod errors;
mod mdevctl;
mod run;
mod verbs;
