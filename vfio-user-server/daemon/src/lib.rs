//! Roles of `vgpud`: the manager, a worker for each vGPU, and GPU processes.
//!
//! * [`run`]: the process `vgpud run`, which wires up the modules of the manager's process
//! * [`manager`]: parents, vGPUs and shares
//! * [`callouts`], [`console`]: callout scripts; screens of vGPUs
//! * [`service`]: operations on vGPUs, for the HTTP servers
//! * [`web_console`], [`api`]: HTTP services, with [`http_server`], [`http`] and [`blocking`] for
//!   both; [`io_runtime`]: threads for them
//! * [`worker`]: one vGPU, served over vfio-user
//! * [`worker_protocol`], [`worker_client`]: messages between the manager and a worker; requests to
//!   a worker; [`guest_pieces`]: guest memory in them
//! * [`staged_memory`]: video memory that is saved and restored through staging memory
//! * [`backend`]: GPU backends of this build
//! * [`gpu_process`]: GPU process of a parent; [`context_process`]: memory and engine of a vGPU
//! * [`spawn`]: start of processes and threads; signals to a process, and its end
//! * [`cpu_budget`]: CPU time for the requests of others
//! * [`systemd`]: socket activation and notifications
//! * [`logger`], [`log_limiter`]: log lines, and their rate limit; [`vgpu_names`]: names of vGPUs
//!   in them

pub mod anchor;
pub mod api;
pub mod backend;
pub mod blocking;
pub mod callouts;
pub mod child_logs;
pub mod console;
pub mod context_process;
pub mod cpu_budget;
pub mod foreign_stream;
pub mod gpu_process;
pub mod guest_pieces;
pub mod http;
pub mod http_server;
pub mod io_runtime;
pub mod log_limiter;
pub mod logger;
pub mod manager;
pub mod run;
pub mod service;
pub mod spawn;
pub mod staged_memory;
mod sys;
pub mod systemd;
pub mod vgpu_names;
pub mod web_console;
pub mod worker;
pub mod worker_client;
pub mod worker_protocol;
