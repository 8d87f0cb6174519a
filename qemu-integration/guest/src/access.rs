//! Time of an access to a register, each of which ends in the vGPU's worker on the host.

use std::fmt;
use std::time::Instant;

use mdev_core::abi::control::reg;
use serde::Serialize;

use crate::platform::Platform;

/// Turns of reads and writes. The median turn counts.
const TURNS: usize = 5;

/// Median times of an access.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Accesses {
    job: &'static str,
    /// Number of reads, and of writes.
    count: u32,
    /// Time of a read, in microseconds.
    read_us: f64,
    /// Time of a write that wakes the GPU, in microseconds.
    write_us: f64,
}

impl fmt::Display for Accesses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, read_us, write_us, .. } = self;
        write!(f, "access: a read takes {read_us:.1} us, a write {write_us:.1} us ({count} each)")
    }
}

/// Reads and writes a register `count` times in each turn.
pub fn measure(platform: &dyn Platform, count: u32) -> Accesses {
    let median = |access: &dyn Fn()| {
        let mut turns = [0.0; TURNS];
        for turn in &mut turns {
            let begun = Instant::now();
            (0..count).for_each(|_| access());
            *turn = begun.elapsed().as_secs_f64() * 1e6 / f64::from(count.max(1));
        }
        turns.sort_unstable_by(f64::total_cmp);
        turns[TURNS / 2]
    };
    let read_us = median(&|| {
        platform.read32(reg::MAGIC);
    });
    let write_us = median(&|| platform.write32(reg::WAKE, 0));
    Accesses { job: "access", count: count * TURNS as u32, read_us, write_us }
}
