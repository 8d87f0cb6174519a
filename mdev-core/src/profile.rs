//! vGPU types: the profiles of a parent, named as in GRID.
//!
//! A type is `<model>-<size><series>`: `SOFT-256MQ`, `SOFT-1Q`, `SOFT-16C`. The size is its video
//! memory in GiB, or in MiB with an `M`. Series Q has a display head, series C has none. A parent
//! lists every power of two from 256 MiB to its own memory, of each series that its capabilities
//! allow. Any other multiple of 256 MiB is a type as well (`SOFT-1280MC`), which is not listed.
//!
//! A parent with a framebuffer only has types of 4 to 64 MiB (`BOCHS-8MQ`), and a parent without
//! video memory has one type (`EDU-C`).

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::gpu::{ClientSpec, GpuCapabilities, GpuDescription};
use crate::ids::VgpuId;
use crate::units::{GIB, MIB};

/// Smallest partition.
pub const MIN_VRAM: u64 = 256 * MIB;

/// Maximum size of the imported guest memory of a vGPU: all of its 40-bit GPU virtual address
/// space.
pub const MAX_IMPORT_BYTES: u64 = 1 << 40;

/// Largest mode by the minimum video memory of a type. The last mode is the maximum of the 12-bit
/// fields of a base EDID block.
const MODES: [(u64, Head); 5] = [
    (4 * GIB, Head { max_width: 3840, max_height: 2160 }),
    (2 * GIB, Head { max_width: 2560, max_height: 1600 }),
    (GIB, Head { max_width: 1920, max_height: 1200 }),
    (512 * MIB, Head { max_width: 1600, max_height: 1200 }),
    (0, Head { max_width: 1280, max_height: 1024 }),
];

/// Engines. A parent without any is a framebuffer only.
const ENGINES: GpuCapabilities = GpuCapabilities::COPY.union(GpuCapabilities::COMPUTE);

/// Sizes of partitions of a parent with a framebuffer only, with their largest modes. Each has
/// space for two pictures.
const FRAMEBUFFERS: [(u64, Head); 5] = [
    (4 * MIB, Head { max_width: 800, max_height: 600 }),
    (8 * MIB, Head { max_width: 1280, max_height: 800 }),
    (16 * MIB, Head { max_width: 1920, max_height: 1080 }),
    (32 * MIB, Head { max_width: 2560, max_height: 1600 }),
    (64 * MIB, Head { max_width: 3840, max_height: 2160 }),
];

/// Smallest framebuffer aperture, the default of the Bochs display adapter.
const MIN_FRAMEBUFFER: u64 = 16 * MIB;

/// Series of a type, the last letter of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Series {
    /// `Q`: a display head, and all engines of the parent.
    #[serde(rename = "Q")]
    Workstation,
    /// `C`: engines only.
    #[serde(rename = "C")]
    Compute,
}

impl Series {
    /// Returns the letter at the end of a type's name.
    pub const fn letter(self) -> char {
        match self {
            Self::Workstation => 'Q',
            Self::Compute => 'C',
        }
    }

    /// Returns true if a parent with these capabilities offers the series.
    pub const fn is_offered_by(self, has: GpuCapabilities) -> bool {
        match self {
            Self::Workstation => has.contains(GpuCapabilities::FRAMEBUFFER),
            Self::Compute => has.intersects(ENGINES),
        }
    }
}

/// Limits of a display head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Width of the largest mode in pixels.
    pub max_width: u32,
    /// Height of the largest mode in pixels.
    pub max_height: u32,
}

impl Head {
    /// Returns the head of a type with this size of video memory.
    fn for_vram(vram_bytes: u64) -> Self {
        let row = MODES.iter().find(|(least, _)| vram_bytes >= *least);
        row.map_or(MODES[MODES.len() - 1].1, |(_, head)| *head)
    }

    /// Returns the size of the framebuffer aperture: a power of two with space for two pictures of
    /// the largest mode, since Linux's drm_vram_helper refuses a mode that needs more than half.
    fn framebuffer_bytes(self) -> u64 {
        let picture = u64::from(self.max_width) * u64::from(self.max_height) * 4;
        (2 * picture).next_power_of_two().max(MIN_FRAMEBUFFER)
    }
}

/// vGPU type of a parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Name: `SOFT-1Q`.
    pub name: String,
    /// Series.
    pub series: Series,
    /// Size of the partition of video memory in bytes: a multiple of [`MIN_VRAM`]; a power of two
    /// on a parent with a framebuffer only, or 0 if the parent has none.
    pub vram_bytes: u64,
    /// Display head of series Q.
    pub head: Option<Head>,
    /// Length of the framebuffer aperture: a power of two, at most half of the partition, or the
    /// whole partition of a parent with a framebuffer only; 0 without a head.
    pub framebuffer_bytes: u64,
    /// Maximum number of instances on an empty parent.
    pub max_instances: u32,
    /// Maximum number of channels of a vGPU.
    pub max_channels: u32,
    /// Maximum size of imported guest memory of a vGPU in bytes.
    pub max_import_bytes: u64,
    /// [`GpuDescription::hang_timeout`].
    #[serde(default)]
    pub hang_timeout: Option<Duration>,
    /// Whether CUDA programs can use a vGPU of this type without a VM.
    #[serde(default)]
    pub programs: bool,
}

impl Profile {
    fn new(gpu: &GpuDescription, series: Series, vram_bytes: u64) -> Self {
        let head = (series == Series::Workstation).then(|| Head::for_vram(vram_bytes));
        let fit = gpu.vram_bytes.checked_div(vram_bytes).unwrap_or(u64::MAX);
        Self {
            name: format!("{}-{}{}", gpu.model, Size(vram_bytes), series.letter()),
            series,
            vram_bytes,
            head,
            framebuffer_bytes: head.map_or(0, Head::framebuffer_bytes),
            max_instances: u32::try_from(fit).unwrap_or(u32::MAX).min(gpu.max_vgpus),
            max_channels: gpu.max_channels,
            max_import_bytes: gpu.max_import_bytes.min(MAX_IMPORT_BYTES),
            hang_timeout: gpu.hang_timeout,
            programs: head.is_none() && gpu.capabilities.contains(GpuCapabilities::PROGRAMS),
        }
    }

    /// Returns a type whose whole partition is the framebuffer.
    fn framebuffer(gpu: &GpuDescription, vram_bytes: u64, head: Head) -> Self {
        let framebuffer_bytes = vram_bytes;
        Self {
            head: Some(head),
            framebuffer_bytes,
            ..Self::new(gpu, Series::Workstation, vram_bytes)
        }
    }

    /// Returns the description in the format that consumers of GRID's types parse:
    ///
    /// `num_heads=1, framebuffer=1024M, max_resolution=1920x1200, max_instance=8`; without a head,
    /// `num_heads=0, framebuffer=1024M, max_instance=8`.
    pub fn description(&self) -> String {
        let vram = self.vram_bytes / MIB;
        let instances = self.max_instances;
        match self.head {
            Some(Head { max_width, max_height }) => format!(
                "num_heads=1, framebuffer={vram}M, max_resolution={max_width}x{max_height}, \
                 max_instance={instances}"
            ),
            None => format!("num_heads=0, framebuffer={vram}M, max_instance={instances}"),
        }
    }

    /// Returns the resources of a vGPU of this type.
    pub fn client_spec(&self, vgpu: VgpuId) -> ClientSpec {
        ClientSpec {
            vgpu,
            vram_bytes: self.vram_bytes,
            framebuffer_bytes: self.framebuffer_bytes,
            max_channels: self.max_channels,
            max_import_bytes: self.max_import_bytes,
        }
    }
}

/// Size as in the names of types: `256M`, `1`, `1280M`, `16`.
struct Size(u64);

impl Size {
    /// Parses the size of a type's name.
    fn parse(text: &str) -> Option<Self> {
        let (digits, unit) = match text.strip_suffix('M') {
            Some(digits) => (digits, MIB),
            None => (text, GIB),
        };
        digits.parse::<u64>().ok()?.checked_mul(unit).map(Self)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            bytes if bytes.is_multiple_of(GIB) => write!(f, "{}", bytes / GIB),
            bytes => write!(f, "{}M", bytes / MIB),
        }
    }
}

/// Error of a type that the parent does not offer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Parent {parent} has no type {name:?}; it offers {offered}")]
pub struct UnknownType {
    /// Name of the parent.
    pub parent: String,
    /// Requested name.
    pub name: String,
    /// List of the parent's types.
    pub offered: String,
}

/// Returns the name of the type of this size and series on a parent of this model. The size is
/// rounded up to a multiple of [`MIN_VRAM`].
pub fn name(model: &str, vram_bytes: u64, series: Series) -> String {
    let bytes = vram_bytes.checked_next_multiple_of(MIN_VRAM).unwrap_or(vram_bytes);
    format!("{model}-{}{}", Size(bytes), series.letter())
}

/// Returns the listed types of a parent: series Q, then series C, each from small to large.
pub fn profiles(gpu: &GpuDescription) -> Vec<Profile> {
    let has = gpu.capabilities;
    if has.contains(GpuCapabilities::FRAMEBUFFER) && !has.intersects(ENGINES) {
        let fits = FRAMEBUFFERS.into_iter().filter(|(size, _)| *size <= gpu.vram_bytes);
        return fits.map(|(size, head)| Profile::framebuffer(gpu, size, head)).collect();
    }
    if gpu.vram_bytes == 0 && Series::Compute.is_offered_by(has) {
        return vec![Profile::new(gpu, Series::Compute, 0)];
    }
    let sizes = || {
        std::iter::successors(Some(MIN_VRAM), |size| size.checked_mul(2))
            .take_while(|size| *size <= gpu.vram_bytes)
    };
    [Series::Workstation, Series::Compute]
        .into_iter()
        .filter(|series| series.is_offered_by(has))
        .flat_map(|series| sizes().map(move |size| Profile::new(gpu, series, size)))
        .collect()
}

/// Returns the type with this name. As in mdev, names are case-sensitive.
pub fn find(gpu: &GpuDescription, name: &str) -> Result<Profile, UnknownType> {
    let all = profiles(gpu);
    if let Some(profile) = all.iter().find(|profile| profile.name == name) {
        return Ok(profile.clone());
    }
    if let Some(profile) = unlisted(gpu, name) {
        return Ok(profile);
    }
    let names: Vec<_> = all.into_iter().map(|profile| profile.name).collect();
    let offered = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Err(UnknownType { parent: gpu.parent.clone(), name: name.to_owned(), offered })
}

/// Returns the type with this name whose size is no power of two.
fn unlisted(gpu: &GpuDescription, name: &str) -> Option<Profile> {
    let rest = name.strip_prefix(gpu.model.as_str())?.strip_prefix('-')?;
    let series = [Series::Workstation, Series::Compute]
        .into_iter()
        .find(|series| rest.ends_with(series.letter()) && series.is_offered_by(gpu.capabilities))?;
    let Size(bytes) = Size::parse(rest.strip_suffix(series.letter())?)?;
    let fits = (MIN_VRAM..=gpu.vram_bytes).contains(&bytes) && bytes.is_multiple_of(MIN_VRAM);
    if !fits || !gpu.capabilities.intersects(ENGINES) {
        return None;
    }
    // One type has one name: 1024M is 1.
    Some(Profile::new(gpu, series, bytes)).filter(|profile| profile.name == name)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn gpu(vram_bytes: u64) -> GpuDescription {
        GpuDescription {
            parent: "soft0".into(),
            model: "SOFT".into(),
            name: "Tessera software GPU".into(),
            vram_bytes,
            capabilities: GpuCapabilities::all(),
            max_vgpus: 256,
            max_channels: 64,
            max_import_bytes: 1 << 40,
            default_timeslice: Duration::from_millis(2),
            hang_timeout: None,
        }
    }

    #[test]
    fn types_have_grid_names() {
        let names: Vec<_> = profiles(&gpu(2 * GIB)).into_iter().map(|p| p.name).collect();
        let expected = [
            "SOFT-256MQ",
            "SOFT-512MQ",
            "SOFT-1Q",
            "SOFT-2Q",
            "SOFT-256MC",
            "SOFT-512MC",
            "SOFT-1C",
            "SOFT-2C",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn multiples_of_the_smallest_size_are_types_that_are_not_listed() {
        let gpu = gpu(8 * GIB);
        for (name, bytes, instances) in [
            ("SOFT-768MC", 768 * MIB, 10),
            ("SOFT-1280MC", 1280 * MIB, 6),
            ("SOFT-3Q", 3 * GIB, 2),
            ("SOFT-7936MQ", 7936 * MIB, 1),
        ] {
            let profile = find(&gpu, name).unwrap();
            assert_eq!((profile.vram_bytes, profile.max_instances), (bytes, instances), "{name}");
            assert!(profiles(&gpu).iter().all(|listed| listed.name != name));
        }
        for name in [
            "SOFT-1000MC",
            "SOFT-1024MC",
            "SOFT-9C",
            "SOFT-0C",
            "SOFT-MC",
            "SOFT-03C",
            "SOFT-3X",
            "SOFT-3",
            "SOFT3C",
            "HARD-3C",
            "SOFT-+3C",
            "SOFT-99999999999999999999C",
            "SOFT-3MC",
        ] {
            assert!(find(&gpu, name).is_err(), "{name}");
        }
        let mut framebuffer = gpu.clone();
        framebuffer.capabilities = GpuCapabilities::FRAMEBUFFER;
        assert!(
            find(&framebuffer, "SOFT-768MQ").is_err(),
            "not on a parent with a framebuffer only"
        );
    }

    #[test]
    fn the_description_has_the_format_that_consumers_parse() {
        let gpu = gpu(8 * GIB);
        assert_eq!(
            find(&gpu, "SOFT-1Q").unwrap().description(),
            "num_heads=1, framebuffer=1024M, max_resolution=1920x1200, max_instance=8"
        );
        assert_eq!(
            find(&gpu, "SOFT-256MC").unwrap().description(),
            "num_heads=0, framebuffer=256M, max_instance=32"
        );
    }

    #[test]
    fn types_that_need_missing_capabilities_are_not_offered() {
        let mut gpu = gpu(GIB);
        gpu.capabilities.remove(GpuCapabilities::FRAMEBUFFER);
        assert!(profiles(&gpu).iter().all(|p| p.series == Series::Compute));
        gpu.capabilities = GpuCapabilities::empty();
        assert_eq!(profiles(&gpu), []);
        let error = find(&gpu, "SOFT-1Q").unwrap_err();
        assert_eq!(error.to_string(), "Parent soft0 has no type \"SOFT-1Q\"; it offers none");
    }

    #[test]
    fn a_parent_too_small_for_any_type_offers_none() {
        assert_eq!(profiles(&gpu(MIN_VRAM - 1)), []);
        let mut framebuffer = gpu(4 * MIB - 1);
        framebuffer.capabilities = GpuCapabilities::FRAMEBUFFER;
        assert_eq!(profiles(&framebuffer), []);
        let mut nothing = gpu(0);
        nothing.capabilities = GpuCapabilities::empty();
        assert_eq!(profiles(&nothing), []);
    }

    #[test]
    fn a_framebuffer_only_parent_has_small_types() {
        let mut gpu = gpu(16 * MIB);
        gpu.model = "BOCHS".into();
        gpu.capabilities = GpuCapabilities::FRAMEBUFFER | GpuCapabilities::VRAM_APERTURE;
        let all = profiles(&gpu);
        let names: Vec<_> = all.iter().map(|p| (p.name.as_str(), p.max_instances)).collect();
        assert_eq!(names, [("BOCHS-4MQ", 4), ("BOCHS-8MQ", 2), ("BOCHS-16MQ", 1)]);
        for profile in all {
            let Some(Head { max_width, max_height }) = profile.head else { panic!("no head") };
            assert_eq!(profile.framebuffer_bytes, profile.vram_bytes);
            assert!(u64::from(max_width * max_height) * 8 <= profile.vram_bytes);
        }
    }

    #[test]
    fn a_parent_without_video_memory_has_one_type() {
        let mut gpu = gpu(0);
        gpu.model = "EDU".into();
        gpu.capabilities = GpuCapabilities::COPY;
        gpu.max_vgpus = 3;
        gpu.max_import_bytes = 64 * MIB;
        let all = profiles(&gpu);
        assert_eq!((all.len(), all[0].name.as_str(), all[0].max_instances), (1, "EDU-C", 3));
        assert_eq!((all[0].vram_bytes, all[0].max_import_bytes), (0, 64 * MIB));
    }

    proptest! {
            #[test]
            fn any_size_is_a_type_that_its_name_finds(
                vram in MIN_VRAM..1_u64 << 42,
                asked in 1_u64..1 << 42,
            ) {
                let gpu = gpu(vram);
                for series in [Series::Workstation, Series::Compute] {
                    let found = find(&gpu, &name(&gpu.model, asked, series));
                    let rounded = asked.next_multiple_of(MIN_VRAM);
                    prop_assert_eq!(found.is_ok(), rounded <= vram);
                    if let Ok(profile) = found {
                        prop_assert_eq!((profile.vram_bytes, profile.series), (rounded, series));
                        prop_assert!(profile.framebuffer_bytes <= rounded / 2);
                        prop_assert!(u64::from(profile.max_instances) * rounded <= vram);
                    }
                }
            }

            #[test]
            fn every_type_is_valid_for_a_device(vram in 1_u64..1 << 42) {
                for profile in profiles(&gpu(vram)) {
                    prop_assert!(profile.vram_bytes.is_power_of_two());
                    prop_assert!(profile.max_instances >= 1);
                    prop_assert!(u64::from(profile.max_instances) * profile.vram_bytes <= vram);
                    if let Some(head) = profile.head {
                            let picture = u64::from(head.max_width) * u64::from(head.max_height) * 4;
                            prop_assert!(profile.framebuffer_bytes.is_power_of_two());
                            prop_assert!(picture * 2 <= profile.framebuffer_bytes);
                            prop_assert!(profile.framebuffer_bytes <= profile.vram_bytes / 2);
                            prop_assert!(head.max_width < 4096 && head.max_height < 4096);
                        } else {
     prop_assert_eq!(profile.framebuffer_bytes, 0);
    }
                    prop_assert_eq!(find(&gpu(vram), &profile.name).unwrap(), profile);
                }
            }
        }
}
