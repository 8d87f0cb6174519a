//! `vgpuctl`: commands, compatibility with mdevctl, error messages.

mod errors;
mod mdevctl;
mod names;
mod run;
mod verbs;
