//! Shares of a GPU, and limits. The tests measure, so `cargo lab test` runs them alone.

mod engine_time;
mod limits;
mod live;
mod scheduling;
mod work;
