//! Commands about shares of the GPU: `stats`, `top`, `scheduler`.

use clap::{Args, ValueEnum};

use super::Output;
use super::values::milliseconds;
use super::vgpu::OptionalVgpuArg;

#[derive(Debug, Args)]
#[command(after_help = "\
Columns:
  ASKED      attribute core: minimum share under contention, in hundredths of the GPU
  DUE        share while all vGPUs are busy
  SHARE      share of the GPU in the last measured window, about one second
  WAIT       time that work waited before it ran: p50/p99 of the last one to two seconds; omitted
             if the table would be wider than 100 columns
  VM         process ID of the VM, or the number of CUDA programs

Columns of --wide:
  OF BUSY    share of the GPU's busy time in the same window
  ENGINE     engine time since the vGPU's start
  WAITED     time with pending work but without the engine
  HELD       part of WAITED caused by a cap (mode=hard, equal-share, fixed-share)
  HANGS      channels reset after a hang; see hang_timeout, acquire_timeout

Examples:
  vgpuctl stats                                    usage of all vGPUs
  vgpuctl stats --wide                             with times, submissions and errors
  vgpuctl stats -v                                 all counters and limits
  vgpuctl stats web1                               all counters and limits of one vGPU
  vgpuctl stats --output json | jq .vgpus          for programs; Prometheus reads /metrics")]
pub struct Stats {
    /// Only this vGPU, with all counters and limits.
    #[command(flatten)]
    pub vgpu: OptionalVgpuArg,
    /// Only vGPUs on this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Print a row for each vGPU with more columns, wider than most terminals.
    #[arg(short, long, conflicts_with = "verbose")]
    pub wide: bool,
    /// Print all counters and limits.
    #[arg(short, long)]
    pub verbose: bool,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
A bar shows a vGPU's share in the last second. The mark is the requested share. A yellow bar is
below the mark: the vGPU had no work, or other vGPUs used the GPU. WAIT is the time that work waited
before it ran: p50/p99 of the last one to two seconds. The lower part has details of the selected
vGPU.

Keys:
  up, down     select a vGPU               left, right  select a parent
  q            quit")]
pub struct Top {
    /// Initially selected parent. Default: all parents.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Refresh interval in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(100..=60_000))]
    pub interval: u64,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Policies:
  best-effort   equal time slices for all vGPUs with work
  equal-share   1/n of the GPU for each of n started vGPUs, even if other vGPUs are idle
  fixed-share   1/(maximum instances of the type) of the GPU for each vGPU
  weighted      core hundredths of the GPU: a minimum with mode=soft, a maximum with mode=hard

Examples:
  vgpuctl scheduler                                show the schedulers of all parents
  vgpuctl scheduler -p soft0 --policy equal-share  change the policy
  vgpuctl scheduler --timeslice 1                  set the mean time slice to 1 ms
  vgpuctl scheduler --frequency 480 --averaging-factor 33
                                                   set NVIDIA's parameters: slices per second, and
                                                   slices over which deviations are corrected
  vgpuctl scheduler --log                          print the last decisions with their causes")]
pub struct Scheduler {
    /// Parent. Required for a change if there are several parents.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Scheduling policy.
    #[arg(long, value_parser = ["best-effort", "equal-share", "fixed-share", "weighted"])]
    pub policy: Option<String>,
    /// Mean time slice in milliseconds: 0.1 to 30. Disables averaging.
    #[arg(long, value_name = "MS", value_parser = milliseconds,
        conflicts_with_all = ["averaging_factor", "frequency"])]
    pub timeslice: Option<u64>,
    /// Period of caps (mode=hard, equal-share, fixed-share) in milliseconds: 1 to 30.
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub period: Option<u64>,
    /// Slices over which deviations are corrected: 1 to 60. Enables averaging.
    #[arg(long, value_name = "SLICES")]
    pub averaging_factor: Option<u8>,
    /// Mean number of slices per second: 63 to 960. Enables averaging.
    #[arg(long, value_name = "HERTZ")]
    pub frequency: Option<u16>,
    /// Permit requests for more than the whole GPU in total. Shares are then scaled down.
    #[arg(long, value_enum)]
    pub overcommit: Option<Switch>,
    /// Print the last scheduling decisions.
    #[arg(long, conflicts_with_all = ["policy", "timeslice", "period", "averaging_factor",
        "frequency", "overcommit"])]
    pub log: bool,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

/// Value of an option that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Enabled.
    On,
    /// Disabled.
    Off,
}
