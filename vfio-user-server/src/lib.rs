//! The vfio-user server, and the roles of `vgpud` that are built on it.
//!
//! [`guide`] walks through it. The server, in reading order: [`device`] and [`layout`] (what a device author writes),
//! [`dma`], [`irq`], [`migration`], [`transfer`] and [`errno`] (its vocabulary), [`session`] (one client's connection),
//! [`patience`] (when to wait awake), [`transport`] and [`fds`] (messages on a socket), and [`proto`] (messages as
//! bytes). None of it knows what a vGPU is, which `tests/independence.rs` sees to.
//!
//! The roles of `vgpud`: [`manager`] with its [`api`], [`callouts`] and [`console`], [`worker`], [`spawn`] (how one
//! starts the other), [`private`] (what they say to each other) and [`usage`] (command lines that make no sense).

pub mod api;
pub mod backend;
pub mod callouts;
pub mod console;
pub mod device;
pub mod dma;
pub mod errno;
pub mod fds;
pub mod guide;
pub mod irq;
pub mod layout;
pub mod manager;
pub mod migration;
pub mod owner;
pub mod patience;
pub mod private;
pub mod proto;
pub mod session;
pub mod spawn;
mod sys;
#[doc(hidden)]
pub mod testing;
pub mod transfer;
pub mod transport;
pub mod usage;
pub mod users;
pub mod worker;
