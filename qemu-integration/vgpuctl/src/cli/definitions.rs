//! mdevctl's verbs: `types`, `list`, `define`, `undefine`, `modify`, `start`, `stop`; and `import`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use mdev_core::definition::Owner;
use mdev_core::ids::VgpuId;

use super::Output;
use super::values::{attribute, mapping, with_attributes};

#[derive(Debug, Args)]
pub struct Types {
    /// Only this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Print mdevctl's JSON.
    #[arg(long, conflicts_with = "output")]
    pub dumpjson: bool,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct List {
    /// List defined vGPUs, whether they run or not.
    #[arg(short, long)]
    pub defined: bool,
    /// Print attributes, state, socket and VM too.
    #[arg(short, long)]
    pub verbose: bool,
    /// Print mdevctl's JSON. With --uuid, that is the vGPU's definition file.
    #[arg(long, conflicts_with = "output")]
    pub dumpjson: bool,
    /// Only this vGPU.
    #[arg(short, long)]
    pub uuid: Option<VgpuId>,
    /// Only those on this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true)
    .args(["uuid", "mdev_type", "jsonfile"]))]
#[command(after_help = with_attributes("\
Examples:
  vgpuctl define -p soft0 -t SOFT-1Q               prints the new vGPU's uuid
  vgpuctl define -u UUID -t SOFT-2C --auto         on any parent; started with vgpud
  vgpuctl define -u UUID                           keeps a running transient vGPU as it is
  vgpuctl define -p soft0 --jsonfile vgpu.json     from a file in mdevctl's format"))]
pub struct Define {
    /// Its uuid. Without it, a random one is made and printed.
    #[arg(short, long)]
    pub uuid: Option<VgpuId>,
    /// Start it whenever vgpud starts.
    #[arg(short, long)]
    pub auto: bool,
    /// Its parent. Without it, the first that offers the type and has room.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Its type.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    /// An attribute, for example core=80; may be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    pub attr: Vec<(String, String)>,
    /// Type, start policy and attributes, in mdevctl's JSON; - reads the standard input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["mdev_type", "auto", "attr"])]
    pub jsonfile: Option<PathBuf>,
    /// Do it even though a callout script says no.
    #[arg(short, long)]
    pub force: bool,
    /// Format of the answer: nothing or a new uuid, or all about the vGPU.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Undefine {
    /// Its uuid.
    #[arg(short, long)]
    pub uuid: VgpuId,
    /// Only if it is defined for this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Do it even though a callout script says no.
    #[arg(short, long)]
    pub force: bool,
    /// Format of the answer: nothing, or what was done.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true)
    .args(["mdev_type", "addattr", "delattr", "attr", "auto", "manual", "jsonfile"]))]
#[command(after_help = with_attributes("\
Examples:
  vgpuctl modify -u UUID --attr core=60            sets an attribute, whether it was there or not
  vgpuctl modify -u UUID --attr core=60 --live     at once, until the vGPU is stopped
  vgpuctl modify -u UUID --addattr core --value 60 mdevctl's way: appends to the list
  vgpuctl modify -u UUID --delattr --index 0       removes the first attribute
  vgpuctl modify -u UUID --auto                    started with vgpud from now on"))]
pub struct Modify {
    /// Its uuid.
    #[arg(short, long)]
    pub uuid: VgpuId,
    /// Only if it is on this parent.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Another type.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    /// Add an attribute, at the end or at --index.
    #[arg(long, requires = "value", value_name = "NAME", conflicts_with_all = ["delattr", "attr"])]
    pub addattr: Option<String>,
    /// Remove an attribute, the last or that at --index.
    #[arg(long, conflicts_with = "attr")]
    pub delattr: bool,
    /// Which attribute, counted from 0.
    #[arg(short, long)]
    pub index: Option<usize>,
    /// Value of the attribute that --addattr names.
    #[arg(long, requires = "addattr", conflicts_with = "delattr")]
    pub value: Option<String>,
    /// Set an attribute, in its place where it is there already; may be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    pub attr: Vec<(String, String)>,
    /// Start it whenever vgpud starts.
    #[arg(short, long, conflicts_with = "manual")]
    pub auto: bool,
    /// Start it on request only.
    #[arg(short, long)]
    pub manual: bool,
    /// Change the running vGPU, at once and until it is stopped.
    #[arg(short, long)]
    pub live: bool,
    /// Change the definition: the default without --live.
    #[arg(short, long)]
    pub defined: bool,
    /// Start policy and all attributes, in mdevctl's JSON; - reads the standard input.
    #[arg(long, value_name = "FILE",
        conflicts_with_all = ["mdev_type", "addattr", "delattr", "attr", "auto", "manual"])]
    pub jsonfile: Option<PathBuf>,
    /// Do it even though a callout script says no.
    #[arg(short, long)]
    pub force: bool,
    /// Format of the answer: nothing, or all about the vGPU as it is now.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).multiple(true)
    .args(["uuid", "mdev_type", "jsonfile"]))]
#[command(after_help = with_attributes("\
Examples:
  vgpuctl start -u UUID                            one that is defined
  vgpuctl start -u UUID --owner libvirt-qemu       for a VM that libvirt runs
  vgpuctl start -p soft0 -t SOFT-1Q --attr core=20 a transient one; prints its uuid"))]
pub struct Start {
    /// Its uuid. Without it, a random one is made and printed.
    #[arg(short, long)]
    pub uuid: Option<VgpuId>,
    /// Its parent. Without it, where it is defined, or the first that offers the type and has room.
    #[arg(short, long)]
    pub parent: Option<String>,
    /// Its type, for one that is not defined.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "TYPE")]
    pub mdev_type: Option<String>,
    /// An attribute, for one that is not defined; may be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    pub attr: Vec<(String, String)>,
    /// Whom its socket belongs to, this time: the user that its VM runs as, by name or number.
    #[arg(long, value_name = "USER[:GROUP]")]
    pub owner: Option<Owner>,
    /// Type and attributes in mdevctl's JSON, whatever its definition says; - reads the standard input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["mdev_type", "attr"])]
    pub jsonfile: Option<PathBuf>,
    /// Do it even though a callout script says no.
    #[arg(short, long)]
    pub force: bool,
    /// Format of the answer: nothing or a new uuid, or all about the vGPU.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct Stop {
    /// Its uuid.
    #[arg(short, long)]
    pub uuid: VgpuId,
    /// Stop it even though a VM uses it (the VM sees a device that fell off its bus), or a callout
    /// script says no.
    #[arg(short, long)]
    pub force: bool,
    /// Format of the answer: nothing, or what was done.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vgpuctl import                                   what /etc/mdevctl.d holds, and what could be had
  vgpuctl import --parent 0000:3b:00.0=soft0 --type nvidia-63=SOFT-1Q
  vgpuctl import /backup/mdevctl.d --type i915-GVTg_V5_4=SOFT-1Q --drop-attrs --apply

A vGPU that is there already is never changed. Attributes that Tessera does not have keep a
definition from being taken over, unless --drop-attrs leaves them out.")]
pub struct Import {
    /// The tree: DIR/PARENT/UUID.
    #[arg(default_value = "/etc/mdevctl.d")]
    pub dir: PathBuf,
    /// A parent of the tree, and the one here that takes its place; may be repeated.
    #[arg(short, long, value_name = "OLD=NEW", value_parser = mapping)]
    pub parent: Vec<(String, String)>,
    /// A type of the tree, and the one here that takes its place; may be repeated.
    #[arg(id = "mdev_type", short = 't', long = "type", value_name = "OLD=NEW",
        value_parser = mapping)]
    pub mdev_type: Vec<(String, String)>,
    /// Leave out attributes that Tessera does not have.
    #[arg(long)]
    pub drop_attrs: bool,
    /// Define them, instead of only saying what would be done.
    #[arg(long)]
    pub apply: bool,
    /// Format of the answer.
    #[arg(long, value_enum, default_value_t)]
    pub output: Output,
}
