//! Commands about programs on a vGPU: `run`.

use std::ffi::OsString;

use clap::{ArgGroup, Args};

use super::vgpu::{AttributeArgs, OptionalVgpuArg, VGPU_ARGS};

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(VGPU_ARGS).arg("mdev_type"))]
#[command(after_help = "\
The program gets the vGPU in place of the host's GPUs, by the preload library of Tessera, and so do
the programs that it starts. Programs with more rights than their user (set-user-ID) and statically
linked programs do not. The library is found beside vgpuctl, in ../lib/tessera or in
/usr/lib/tessera; TESSERA_CUDA_LIBRARY names another one. The exit status is the program's.

Examples:
  vgpuctl run web1 -- nvidia-smi                   on a running vGPU
  vgpuctl run web1 -- python3 train.py             several programs may use a vGPU
  vgpuctl run -t H200-16C --core 25 -- ./program   on a vGPU for the program's lifetime")]
pub struct Run {
    #[command(flatten)]
    pub vgpu: OptionalVgpuArg,
    /// Type of a transient vGPU, which is stopped when the program ends.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    /// Parent of the transient vGPU. Default: the first that offers the type and has room.
    #[arg(short, long, requires = "mdev_type")]
    pub parent: Option<String>,
    #[command(flatten)]
    pub attrs: AttributeArgs,
    /// Program and its arguments, after --.
    #[arg(last = true, required = true)]
    pub program: Vec<OsString>,
}
