//! Who gets how much: `stats`, `top`, `scheduler`.

use clap::{Args, ValueEnum};
use mdev_core::ids::VgpuId;

use super::Output;
use super::values::milliseconds;

#[derive(Debug, Args)]
#[command(after_help = "\
Columns:
  ASKED      core: hundredths of the GPU that it gets at least, while others contend
  DUE        what it gets while all others are busy
  SHARE      what it got of the last second or so, in parts of the GPU
  OF BUSY    the same in parts of what all together used
  ENGINE     time that it had the engine, since it was started
  WAITED     time that it had work and not the engine
  HELD       of that, time held back by its cap (mode=hard, equal-share, fixed-share)
  HANGS      channels that were reset because they hung: see hang_timeout, acquire_timeout

Examples:
  vgpuctl stats                                    who uses how much
  vgpuctl stats -v                                 every counter and limit, in words
  vgpuctl stats -u UUID                            the same of one vGPU
  vgpuctl stats --output json | jq .vgpus          for programs; Prometheus reads /metrics")]
pub struct Stats {
    /// Only this vGPU, and all about it.
    #[arg(short, long)]
    pub uuid: Option<VgpuId>,
    /// Only those on this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Print every counter and limit.
    #[arg(short, long)]
    pub verbose: bool,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
A bar shows what a vGPU got of the last second; its mark, what it asked for. Yellow is less than
that: it had no work, or the GPU is held by others. Below is all about the vGPU that is chosen.

Keys:
  up, down     choose a vGPU               left, right  choose a parent
  q            leave")]
pub struct Top {
    /// Only this parent, at first.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Milliseconds from one look to the next.
    #[arg(long, value_name = "MS", default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(100..=60_000))]
    pub interval: u64,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Policies:
  best-effort   equal slices among those that have work
  equal-share   each started vGPU gets 1/n, whether or not the others are busy
  fixed-share   each gets 1/(most instances of its type), always
  weighted      each asks for core hundredths: mode=soft at least that, mode=hard never more

Examples:
  vgpuctl scheduler                                how each parent's time is divided
  vgpuctl scheduler -p soft0 --policy equal-share  from now on
  vgpuctl scheduler --timeslice 1                  slices of 1 ms on average
  vgpuctl scheduler --frequency 480 --averaging-factor 33
                                                   NVIDIA's knobs: slices a second, and over how
                                                   many of them a deviation is made good
  vgpuctl scheduler --log                          the last decisions, and why")]
pub struct Scheduler {
    /// The parent. Needed for a change where there are several.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// How time is divided.
    #[arg(long, value_parser = ["best-effort", "equal-share", "fixed-share", "weighted"])]
    pub policy: Option<String>,
    /// Mean time slice in milliseconds: 0.1 to 30. Switches averaging off.
    #[arg(long, value_name = "MS", value_parser = milliseconds,
        conflicts_with_all = ["averaging_factor", "frequency"])]
    pub timeslice: Option<u64>,
    /// Over how long caps (mode=hard, equal-share, fixed-share) are kept, in milliseconds: 1 to 30.
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub period: Option<u64>,
    /// Slices over which a deviation is made good: 1 to 60. Switches averaging on.
    #[arg(long, value_name = "SLICES")]
    pub averaging_factor: Option<u8>,
    /// Slices in a second, on average: 63 to 960. Switches averaging on.
    #[arg(long, value_name = "HERTZ")]
    pub frequency: Option<u16>,
    /// Whether more than the whole GPU may be asked for: each then gets its part of what is asked for.
    #[arg(long, value_enum)]
    pub overcommit: Option<Switch>,
    /// Print the last decisions.
    #[arg(long, conflicts_with_all = ["policy", "timeslice", "period", "averaging_factor",
        "frequency", "overcommit"])]
    pub log: bool,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}
