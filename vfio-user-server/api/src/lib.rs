//! Types of `vgpud`'s control API: HTTP/1.1 with JSON on a UNIX socket.
//!
//! Server and clients share these types. Lists are bare JSON arrays. Every error response, whatever
//! its status, is an [`ErrorBody`]. Names and shapes that mdevctl also has are mdevctl's
//! (`mdev_type`, `start`, `attrs`), so that a definition can be copied between the two.
//!
//! * [`version`]: the daemon's version
//! * [`parents`]: physical GPUs and the vGPU types that they offer
//! * [`vgpus`]: vGPUs and their states
//! * [`requests`]: request bodies that create, change, start and stop vGPUs
//! * [`client`]: the VM attached to a vGPU, and its trapped accesses
//! * [`programs`]: the CUDA programs that use a vGPU
//! * [`saving`]: saving, restoring and upgrading vGPUs
//! * [`statistics`], [`scheduling`]: engine time and shares; policies and decisions
//! * [`console`], [`physical_screen`]: screens in a viewer or browser; physical screens
//! * [`errors`]: error codes and messages

pub mod client;
pub mod console;
pub mod errors;
pub mod parents;
pub mod physical_screen;
pub mod programs;
pub mod requests;
pub mod saving;
pub mod scheduling;
pub mod statistics;
pub mod version;
pub mod vgpus;

pub use client::{AttachedClient, Traps};
pub use console::{OpenConsole, OpenWeb, RFB_UPGRADE, WebAddress};
pub use errors::{ErrorBody, ErrorCode, ErrorDetail};
pub use parents::{Parent, ParentState, ParentTypes, TypeInfo};
pub use physical_screen::{Focused, PhysicalScreen, Rotate};
pub use programs::{ProgramProcess, Programs};
pub use requests::{CreateVgpu, ModifyTarget, ModifyVgpu, StartVgpu, StopVgpu, UndefineVgpu};
pub use saving::{
    Checkpoint, ConfigWrite, Handover, HandoverStep, LogWrites, RestoreFile, RestoredVgpu,
    SAVED_VGPU, SaveVgpu, UpgradedVgpu,
};
pub use scheduling::{Decided, ModifyScheduler, Scheduler, SchedulerDecision};
pub use statistics::{EngineTimes, Limits, ParentStats, Stats, VgpuStats};
pub use version::Version;
pub use vgpus::{Attribute, StartPolicy, Vgpu, VgpuState};
