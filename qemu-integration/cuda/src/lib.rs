//! Preload library that gives CUDA programs a vGPU.
//!
//! `LD_PRELOAD` loads the library into a program. The environment variable `TESSERA_CUDA_SOCKET`
//! names the socket of a vGPU for programs. The device files and `/proc/driver/nvidia` of NVIDIA's
//! driver then exist for the program: the library forwards what happens to them to the vGPU's
//! worker, in the protocol of the crate `cuda-socket`. Without the variable, and for all other
//! files, calls go to libc or the kernel as they are.
//!
//! * [`exports`]: the functions of libc that the library replaces
//! * [`paths`]: which paths the library answers
//! * [`node_files`]: opening of device nodes and of files in `/proc`
//! * [`file_status`]: results of `stat()` for them
//! * [`open_files`]: table of the process's descriptors
//! * [`ioctl`], [`mapping`], [`events`]: `ioctl()`, `mmap()` and `poll()` on them
//! * [`shared_memory`], [`file_memory`], [`memory_maps`]: memory of the program that the GPU uses
//! * [`session`], [`connection`]: requests to the worker, threads and `fork()`
//! * [`environment`]: what the library reads when it is loaded
//! * [`sys`]: calls of libc and the kernel, and memory of the program
//!
//! # Safety of callers
//!
//! **Signals.** A signal handler may call the replaced functions on other files wherever libc
//! allows it: they take no lock and no memory. On the driver's files they are not
//! async-signal-safe. A request runs with signals blocked, so that no handler runs within one.
//!
//! **Threads.** Requests of a process take turns.
//!
//! **Fork.** A child makes a connection of its own when it first needs one. It keeps the files
//! that it inherited.

// A test's own calls stay libc's.
#![cfg_attr(test, allow(dead_code))]

mod connection;
mod environment;
mod events;
#[cfg(not(test))]
mod exports;
mod file_memory;
mod file_status;
mod ioctl;
mod mapping;
mod memory_maps;
mod node_files;
mod open_files;
mod paths;
mod session;
mod shared_memory;
mod sys;
