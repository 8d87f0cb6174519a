//! PCI configuration space, assembled from tables: a header, a list of capabilities, BARs.

mod bar;
mod caps;
mod config;

pub use bar::{Bar, BarKind, BarWidth};
pub use config::{ConfigEffect, ConfigReg, ConfigSpace, Identity};

/// Length of the configuration space of a PCI Express function, in bytes.
pub const CONFIG_BYTES: u64 = 4096;

/// Bits of the command register.
pub mod command {
    /// Answer to memory accesses.
    pub const MEMORY: u32 = 1 << 1;
    /// Master the bus: DMA and MSI.
    pub const BUS_MASTER: u32 = 1 << 2;
    /// Do not assert INTx.
    pub const INTX_DISABLE: u32 = 1 << 10;
    /// What a guest can set; parity and SERR are stored only. There are no I/O BARs.
    pub const WRITABLE: u32 = MEMORY | BUS_MASTER | 1 << 6 | 1 << 8 | INTX_DISABLE;
}

/// Bits of the status register.
pub mod status {
    /// The function asserts INTx (or would, were it not disabled).
    pub const INTERRUPT: u32 = 1 << 3;
    /// There is a capability list.
    pub const CAPABILITIES: u32 = 1 << 4;
    /// Error bits, cleared by writing one. The device never sets them.
    pub const ERRORS: u32 = 0xf900;
}
