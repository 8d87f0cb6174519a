//! mdevctl's commands: `types`, `list`, `define`, `undefine`, `modify`, `start`, `stop`; and
//! `import`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use mdev_core::definition::Owner;

use super::Output;
use super::values::{mapping, with_attributes};
use super::vgpu::{ATTRIBUTE_ARGS, AttributeArgs, OptionalVgpuArg, VGPU_ARGS, VgpuArg};

#[derive(Debug, Args)]
pub struct Types {
    /// Only this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Print mdevctl's JSON.
    #[arg(long, conflicts_with = "output")]
    pub dumpjson: bool,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct List {
    /// List all defined vGPUs, running or not.
    #[arg(short, long)]
    pub defined: bool,
    /// Also print attributes, state, socket and VM.
    #[arg(short, long)]
    pub verbose: bool,
    /// Print mdevctl's JSON. With --uuid, print the vGPU's definition file.
    #[arg(long, conflicts_with = "output")]
    pub dumpjson: bool,
    #[command(flatten)]
    pub vgpu: OptionalVgpuArg,
    /// Only vGPUs on this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true)
    .args(VGPU_ARGS).args(["mdev_type", "jsonfile"]))]
#[command(after_help = with_attributes("\
Examples:
  vgpuctl define -p soft0 -t SOFT-1Q               prints the new vGPU's uuid
  vgpuctl define --name web1 -t SOFT-1Q --core 50  with a name and a share
  vgpuctl define -u UUID -t SOFT-2C --auto         on any parent; starts with vgpud
  vgpuctl define -u UUID                           makes a running transient vGPU permanent
  vgpuctl define -p soft0 --jsonfile vgpu.json     from a file in mdevctl's format"))]
pub struct Define {
    #[command(flatten)]
    pub vgpu: OptionalVgpuArg,
    /// Start the vGPU whenever vgpud starts.
    #[arg(short, long)]
    pub auto: bool,
    /// Parent. Default: the first parent that offers the type and has room.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// vGPU type.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    #[command(flatten)]
    pub attrs: AttributeArgs,
    /// Type, start policy and attributes, in mdevctl's JSON; - reads the standard input.
    #[arg(long, value_name = "FILE",
        conflicts_with_all = ["mdev_type", "auto", "name", "core", "attr"])]
    pub jsonfile: Option<PathBuf>,
    /// Proceed even if a callout script refuses.
    #[arg(short, long)]
    pub force: bool,
    /// Output format: nothing or a new uuid as text, or the vGPU as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Undefine {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// Fail unless the vGPU is defined for this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Proceed even if a callout script refuses.
    #[arg(short, long)]
    pub force: bool,
    /// Output format: nothing as text, or the result as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true)
    .args(ATTRIBUTE_ARGS)
    .args(["mdev_type", "addattr", "delattr", "auto", "manual", "jsonfile"]))]
#[command(after_help = with_attributes("\
Examples:
  vgpuctl modify web1 --core 60                    changes the share from the next start on
  vgpuctl modify web1 --core 60 --live             changes the running vGPU until it stops
  vgpuctl modify web1 --name web2                  renames the vGPU, at once
  vgpuctl modify -u UUID --attr mode=hard          adds or replaces an attribute
  vgpuctl modify -u UUID --addattr core --value 60 appends an attribute, as in mdevctl
  vgpuctl modify -u UUID --delattr --index 0       removes the first attribute
  vgpuctl modify -u UUID --auto                    starts the vGPU with vgpud"))]
pub struct Modify {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// Fail unless the vGPU is on this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// New type.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    /// Add an attribute, at the end or at --index.
    #[arg(long, requires = "value", value_name = "NAME",
        conflicts_with_all = ["delattr", "name", "core", "attr"])]
    pub addattr: Option<String>,
    /// Remove the last attribute, or the attribute at --index.
    #[arg(long, conflicts_with_all = ATTRIBUTE_ARGS)]
    pub delattr: bool,
    /// Index of the attribute, from 0.
    #[arg(short, long)]
    pub index: Option<usize>,
    /// Value of the attribute named by --addattr.
    #[arg(long, requires = "addattr", conflicts_with = "delattr")]
    pub value: Option<String>,
    #[command(flatten)]
    pub attrs: AttributeArgs,
    /// Start the vGPU whenever vgpud starts.
    #[arg(short, long, conflicts_with = "manual")]
    pub auto: bool,
    /// Start the vGPU on request only.
    #[arg(short, long)]
    pub manual: bool,
    /// Change the running vGPU at once, until it is stopped.
    #[arg(short, long)]
    pub live: bool,
    /// Change the definition: the default without --live.
    #[arg(short, long)]
    pub defined: bool,
    /// Start policy and all attributes, in mdevctl's JSON; - reads the standard input.
    #[arg(long, value_name = "FILE",
        conflicts_with_all = ["mdev_type", "addattr", "delattr", "name", "core", "attr", "auto",
            "manual"])]
    pub jsonfile: Option<PathBuf>,
    /// Proceed even if a callout script refuses.
    #[arg(short, long)]
    pub force: bool,
    /// Output format: nothing as text, or the changed vGPU as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true)
    .args(VGPU_ARGS).args(["mdev_type", "jsonfile"]))]
#[command(after_help = with_attributes("\
Examples:
  vgpuctl start web1                               a defined vGPU
  vgpuctl start web1 --owner libvirt-qemu          for a VM that libvirt runs
  vgpuctl start -t SOFT-1Q --core 20 --name tmp    a transient vGPU; prints its uuid"))]
pub struct Start {
    #[command(flatten)]
    pub vgpu: OptionalVgpuArg,
    /// Parent. Default: the parent of the definition, or the first that offers the type and has
    /// room.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Type of a transient vGPU.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    #[command(flatten)]
    pub attrs: AttributeArgs,
    /// Owner of the socket for this start: the user that the VM runs as, by name or number.
    #[arg(long, value_name = "USER[:GROUP]")]
    pub owner: Option<Owner>,
    /// Type and attributes in mdevctl's JSON, instead of the definition; - reads the standard
    /// input.
    #[arg(long, value_name = "FILE",
        conflicts_with_all = ["mdev_type", "name", "core", "attr"])]
    pub jsonfile: Option<PathBuf>,
    /// Proceed even if a callout script refuses.
    #[arg(short, long)]
    pub force: bool,
    /// Output format: nothing or a new uuid as text, or the vGPU as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Stop {
    #[command(flatten)]
    pub vgpu: VgpuArg,
    /// Stop the vGPU even if a VM uses it or a callout script refuses. The VM sees a surprise
    /// removal of the device.
    #[arg(short, long)]
    pub force: bool,
    /// Output format: nothing as text, or the result as JSON.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vgpuctl import                                   shows the plan for /etc/mdevctl.d
  vgpuctl import --parent 0000:3b:00.0=soft0 --type nvidia-63=SOFT-1Q
  vgpuctl import /backup/mdevctl.d --type i915-GVTg_V5_4=SOFT-1Q --drop-attrs --apply

Existing vGPUs are never changed. Definitions with attributes that Tessera does not have are left
out, unless --drop-attrs removes these attributes.")]
pub struct Import {
    /// Directory of definitions: DIR/PARENT/UUID.
    #[arg(default_value = "/etc/mdevctl.d")]
    pub dir: PathBuf,
    /// Replace a parent of the definitions by a parent of this host; may be repeated.
    #[arg(short, long, value_name = "OLD=NEW", value_parser = mapping)]
    pub parent: Vec<(String, String)>,
    /// Replace a type of the definitions by a type of this host; may be repeated.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "OLD=NEW",
        value_parser = mapping)]
    pub mdev_type: Vec<(String, String)>,
    /// Remove attributes that Tessera does not have.
    #[arg(long)]
    pub drop_attrs: bool,
    /// Define the vGPUs, instead of only printing the plan.
    #[arg(long)]
    pub apply: bool,
    /// Output format.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}
