//! Shares of a GPU, and limits. The tests measure, so `cargo lab test` runs them alone.

mod limits;
mod live;
mod scheduling;
mod work;
