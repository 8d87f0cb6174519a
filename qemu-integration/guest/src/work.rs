//! Jobs, one per file. Each job checks the GPU's results on the CPU.
//!
//! Inputs are small whole numbers, so sums and products are exact in any order, and results compare
//! bit by bit.

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

/// Job that can be submitted repeatedly.
pub trait Work: Debug {
    /// Returns the job's name.
    fn name(&self) -> &'static str;

    /// Returns the amount of work of one run, and its unit.
    fn amount(&self) -> (f64, &'static str);

    /// Sets inputs, and overwrites outputs with wrong values. No run may be in flight.
    fn prepare(&self);

    /// Adds one run to `methods`.
    fn push(&self, methods: &mut Methods);

    /// Checks the result of one run since [`Work::prepare`]. Returns the number of compared values.
    fn verify(&self) -> Result<u64, GuestError>;
}

/// Results of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Name of the job.
    pub job: &'static str,
    /// Time from submission to semaphore, in milliseconds.
    pub seconds: f64,
    /// Engine time that the device charged to the channel for the run.
    pub engine_seconds: f64,
    /// Amount of work.
    pub amount: f64,
    /// Unit of the work.
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

/// Compares values with the expected values.
fn compare<T: PartialEq + Debug>(
    job: &str,
    got: &[T],
    expected: impl Fn(usize) -> T,
) -> Result<u64, GuestError> {
    for (index, value) in got.iter().enumerate() {
        let right = expected(index);
        if *value != right {
            return Err(GuestError::Wrong(format!(
                "{job}: value {index} is {value:?}, expected {right:?}"
            )));
        }
    }
    Ok(got.len() as u64)
}
