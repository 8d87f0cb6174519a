//! Physical devices as parents, through VFIO: QEMU's `edu` DMA engine and its display adapter, in a
//! VM that is the host.
//!
//! Most tests boot the VM and run themselves in it. `cargo lab test` runs these tests, as does
//! `cargo test -p system-tests --test vfio -- --ignored --test-threads=1`.

mod access;
mod display;
mod dma;
mod guest;
mod nested;
mod service;
mod shares;
