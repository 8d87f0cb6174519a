//! Jobs, one per file. Each knows what the GPU should have computed, and checks it on the CPU.
//!
//! Inputs are small whole numbers, so that sums and products are exact in any order and results compare bit by bit.

pub mod copy;
pub mod factorial;
pub mod fill;
pub mod mandelbrot;
pub mod saxpy;
pub mod sgemm;
pub mod spin;
pub mod vadd;

use std::fmt::{self, Debug, Display};
use std::time::Instant;

use serde::Serialize;

use crate::GuestError;
use crate::channel::Channel;
use crate::pushbuffer::Methods;

/// A job that can be submitted again and again.
pub trait Work: Debug {
    /// What it is called.
    fn name(&self) -> &'static str;

    /// What one run amounts to, and in which unit.
    fn amount(&self) -> (f64, &'static str);

    /// Sets inputs, and outputs to something wrong. Nothing of it may be in flight.
    fn prepare(&self);

    /// Adds one run to `methods`.
    fn push(&self, methods: &mut Methods);

    /// Compares the result of one run since [`Work::prepare`]; says how many values were compared.
    fn verify(&self) -> Result<u64, GuestError>;
}

/// How a job went.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Which.
    pub job: &'static str,
    /// From submission to semaphore.
    pub seconds: f64,
    /// Engine time that the device charged the channel for it.
    pub engine_seconds: f64,
    /// How much was done.
    pub amount: f64,
    /// Of what.
    pub unit: &'static str,
    /// Values that were compared with the CPU's; all were right.
    pub checked: u64,
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.amount / self.seconds.max(1e-9);
        write!(
            f,
            "{}: {:.3} ms, {:.1} million {}/s, {} values checked, all right",
            self.job,
            self.seconds * 1e3,
            rate / 1e6,
            self.unit,
            self.checked
        )
    }
}

/// Runs a job once and checks it.
pub fn run(work: &dyn Work, channel: &mut Channel) -> Result<Report, GuestError> {
    work.prepare();
    let mut methods = Methods::new();
    work.push(&mut methods);
    let before = channel.query()?.engine_ns;
    let start = Instant::now();
    channel.run(&methods)?;
    let seconds = start.elapsed().as_secs_f64();
    let engine_ns = channel.query()?.engine_ns.saturating_sub(before);
    let checked = work.verify()?;
    let (amount, unit) = work.amount();
    let engine_seconds = engine_ns as f64 / 1e9;
    Ok(Report { job: work.name(), seconds, engine_seconds, amount, unit, checked })
}

/// Compares values with what they should be.
fn compare<T: PartialEq + Debug>(
    job: &str,
    got: &[T],
    expected: impl Fn(usize) -> T,
) -> Result<u64, GuestError> {
    for (index, value) in got.iter().enumerate() {
        let right = expected(index);
        if *value != right {
            return Err(GuestError::Wrong(format!(
                "{job}: value {index} is {value:?}, should be {right:?}"
            )));
        }
    }
    Ok(got.len() as u64)
}
