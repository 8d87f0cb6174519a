//! Arguments about vGPUs that several commands have: which vGPU, and attributes of a new one.

use clap::Args;
use mdev_core::definition::{VgpuName, VgpuRef};

use super::values::attribute;
use crate::failure::Failure;

/// vGPU as a positional argument or, as in mdevctl's commands, as an option.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct VgpuArg {
    /// Name or uuid of the vGPU.
    #[arg(value_name = "VGPU")]
    positional: Option<VgpuRef>,
    /// Name or uuid of the vGPU.
    #[arg(id = "flagged", short = 'u', long = "uuid", value_name = "VGPU")]
    flagged: Option<VgpuRef>,
}

/// vGPU that a command takes and does not require.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct OptionalVgpuArg {
    /// Name or uuid of the vGPU.
    #[arg(value_name = "VGPU")]
    positional: Option<VgpuRef>,
    /// Name or uuid of the vGPU.
    #[arg(id = "flagged", short = 'u', long = "uuid", value_name = "VGPU")]
    flagged: Option<VgpuRef>,
}

/// Argument IDs of [`VgpuArg`] and [`OptionalVgpuArg`].
pub const VGPU_ARGS: [&str; 2] = ["positional", "flagged"];

impl VgpuArg {
    /// Returns the vGPU.
    pub fn vgpu(&self) -> Result<&VgpuRef, Failure> {
        let given = self.positional.as_ref().or(self.flagged.as_ref());
        // The parser has refused a command line without one.
        given.ok_or_else(|| Failure::Usage("Which vGPU?".to_owned()))
    }
}

impl OptionalVgpuArg {
    /// Returns the vGPU, if one is given.
    pub fn vgpu(&self) -> Option<&VgpuRef> {
        self.positional.as_ref().or(self.flagged.as_ref())
    }
}

/// Attributes of a vGPU.
#[derive(Debug, Args)]
pub struct AttributeArgs {
    /// Name of the vGPU, unique on this host. The same as --attr name=NAME.
    #[arg(long)]
    pub name: Option<VgpuName>,
    /// Share of the GPU while others contend, in hundredths. The same as --attr core=HUNDREDTHS.
    #[arg(long, value_name = "HUNDREDTHS", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub core: Option<u8>,
    /// Attribute, for example core=80; may be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = attribute)]
    pub attr: Vec<(String, String)>,
}

/// Argument IDs of [`AttributeArgs`].
pub const ATTRIBUTE_ARGS: [&str; 3] = ["name", "core", "attr"];

impl AttributeArgs {
    /// Returns all attributes as names and values.
    pub fn pairs(&self) -> Vec<(String, String)> {
        let core = self.core.map(|core| ("core".to_owned(), core.to_string()));
        let name = self.name.as_ref().map(|name| ("name".to_owned(), name.to_string()));
        self.attr.iter().cloned().chain(core).chain(name).collect()
    }
}
