//! The software silicon.

pub mod mem;
