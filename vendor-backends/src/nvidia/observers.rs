//! Observers of a vGPU's work on the compute engine.
//!
//! They read what the GPU shows, which the guest cannot forge. They know nothing of the vGPU's
//! channels and doorbells: the log gets the times of submissions by a trait
//! ([`SubmissionTimes`](ctxsw_log::SubmissionTimes)).
//!
//! Reading order:
//!
//! 1. [`switch_probe`]: a channel of the worker's own that asks for the engine
//! 2. [`engine_time`], `engine_demand`, `other_processes`: engine time, waits, and residencies of
//!    others, by the records of the context switch log ([`nvidia_rm::ctxsw_record`])
//! 3. `utilization`, `used_time`, `engine_use`: the part of the engine time that was used
//! 4. [`ctxsw_log`]: the log, which passes its records to the others

pub mod ctxsw_log;
mod engine_demand;
pub mod engine_time;
mod engine_use;
mod other_processes;
pub mod switch_probe;
mod used_time;
mod utilization;
