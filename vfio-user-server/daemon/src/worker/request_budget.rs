//! Budgets of a worker's CPU time for the requests of programs.
//!
//! A program may send requests without end. Requests are not refused, as libraries would take that
//! for an error, but wait. Two budgets apply: each process of the host has one, and all processes
//! of a vGPU, or its VM, have one. Both begin with a reserve, which covers what programs do when
//! they start (some 0.1 s). While the vGPU has none, processes that use little are still served.

use std::time::Duration;

use crate::cpu_budget::Limit;

/// Limit of a process.
pub const PROCESS: Limit = Limit { percent: 25, reserve: Duration::from_secs(1) };

/// Limit of all processes of a vGPU, or of its VM.
pub const VGPU: Limit = Limit { percent: 50, reserve: Duration::from_secs(4) };
