//! GPU, as a client of the resource manager sees it.

use std::cmp::Reverse;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use ipc::mem::Mapping;
use mdev_core::gpu::{GpuCapabilities, GpuDescription};
use mdev_core::units::{GIB, KIB, MIB, PAGE_SIZE};
use nvidia_rm::abi;
use nvidia_rm::generation::{CLASS_LIST, CLASS_LIST_BYTES, Generation, HOPPER};
use nvidia_rm::numbers::{class, control, engine, fb, flag, status};
use nvidia_rm::rm::{Node, Rm, RmError, call};
use nvidia_rm::rm_client::{AddressSpace, AdoptedClient, Object, RmClient};
use nvidia_rm::version::Layout;
use zerocopy::IntoBytes;

use super::adoption::descriptors::ToKeep;
use super::wire::{Card, MAX_CHANNELS};

/// `NV2080_CTRL_CE_CAPS_CE_GRCE`: the copy engine takes turns with the compute engine.
const WITH_GRAPHICS: u32 = 1;

/// Fraction of video memory (1/16) that the driver needs for contexts and page tables.
const RESERVED_FRACTION: u64 = 16;

/// Default time slice. A switch between compute contexts takes 0.14 to 0.19 ms, or 1.5 % of this
/// slice.
const DEFAULT_TIMESLICE: Duration = Duration::from_millis(12);

/// Returns the GPUs of the driver.
pub fn cards(rm: &dyn Rm) -> Result<Vec<Card>, RmError> {
    let fd = rm.open(Node::Control).map_err(RmError::open)?;
    let mut infos = abi::CardInfos::default();
    call(rm, fd.as_fd(), &mut infos, None, "")?;
    let present = infos.cards.iter().filter(|card| card.valid & 1 != 0);
    let card = |card: &abi::CardInfo| Card {
        address: format!(
            "{:04x}:{:02x}:{:02x}.{}",
            card.pci_domain, card.pci_bus, card.pci_slot, card.pci_function
        ),
        minor: card.minor,
        gpu_id: card.gpu_id,
    };
    Ok(present.map(card).collect())
}

/// Objects of a client for one GPU.
#[derive(Debug)]
pub struct Device {
    /// Client of the objects.
    pub rm_client: Arc<RmClient>,
    /// Device object.
    pub device: Arc<Object>,
    /// Subdevice object: the device's only GPU.
    pub subdevice: Arc<Object>,
    /// Generation of the GPU.
    pub generation: &'static Generation,
    /// Descriptors to keep for the next process.
    pub to_keep: ToKeep,
}

impl Device {
    /// Creates a client for a GPU.
    pub fn open(rm: Arc<dyn Rm>, layout: Layout, card: &Card) -> Result<Self, RmError> {
        let rm_client = RmClient::open(rm, layout, card.minor)?;
        let mut ids = abi::IdInfo { gpu_id: card.gpu_id, ..Default::default() };
        rm_client.control_root(control::ID_INFO, &mut ids)?;
        let mut params = abi::DeviceParams {
            device: ids.device,
            client_share: rm_client.root(),
            ..Default::default()
        };
        let device = rm_client.alloc(None, class::DEVICE, Some(params.as_mut_bytes()), "device")?;
        let mut instance = 0u32;
        let subdevice = rm_client.alloc(
            Some(&device),
            class::SUBDEVICE,
            Some(instance.as_mut_bytes()),
            "subdevice",
        )?;
        let generation = generation(&device);
        Ok(Self { rm_client, device, subdevice, generation, to_keep: ToKeep::default() })
    }

    /// Adopts the client of an earlier process, by the handles of its device and subdevice.
    pub fn adopt(
        rm: Arc<dyn Rm>,
        layout: Layout,
        client: AdoptedClient,
        [device, subdevice]: [u32; 2],
    ) -> Self {
        let rm_client = RmClient::adopt(rm, layout, client);
        let device = rm_client.adopt_object(None, device);
        let subdevice = rm_client.adopt_object(Some(&device), subdevice);
        let generation = generation(&device);
        Self { rm_client, device, subdevice, generation, to_keep: ToKeep::default() }
    }

    /// Returns an object below the device that an earlier process has made.
    pub fn adopt_object(&self, handle: u32) -> Arc<Object> {
        self.rm_client.adopt_object(Some(&self.device), handle)
    }

    /// Returns an address space that an earlier process has made.
    pub fn adopt_space(&self, space: u32, range: u32) -> AddressSpace {
        let (space, range) = (self.adopt_object(space), self.adopt_object(range));
        AddressSpace { device: self.device.clone(), space, range }
    }

    /// Describes the GPU as a parent of vGPUs.
    pub fn describe(&self, parent: &str) -> Result<GpuDescription, RmError> {
        let mut text = abi::NameString::default();
        self.subdevice.control_in_series(control::NAME_STRING, &mut text)?;
        let len = text.text.iter().position(|byte| *byte == 0).unwrap_or(text.text.len());
        let name = String::from_utf8_lossy(&text.text[..len]).trim().to_owned();
        let mut info = abi::FbInfo { count: 1, ..Default::default() };
        info.list[0] = [fb::HEAP_SIZE, 0];
        self.subdevice.control_in_series(control::FB_INFO, &mut info)?;
        let heap = u64::from(info.list[0][1]) * KIB;
        let available = heap - (heap / RESERVED_FRACTION).max(GIB.min(heap));
        Ok(GpuDescription {
            parent: parent.to_owned(),
            model: model(&name),
            name,
            vram_bytes: available / (256 * MIB) * (256 * MIB),
            capabilities: GpuCapabilities::VRAM_APERTURE
                | GpuCapabilities::COPY
                | GpuCapabilities::COMPUTE
                | GpuCapabilities::DOORBELL_MAPPED
                | GpuCapabilities::PINS,
            max_vgpus: 256,
            max_channels: MAX_CHANNELS,
            max_import_bytes: 1 << 40,
            default_timeslice: DEFAULT_TIMESLICE,
            hang_timeout: None,
        })
    }

    /// Creates an address space for this client's channels.
    pub fn address_space(&self) -> Result<AddressSpace, RmError> {
        let bytes = self.rm_client.layout().va_space;
        // The driver's own choice is 1 MiB. A program may have memory right above `mmap_min_addr`,
        // as while libcuda checkpoints it, and addresses for the GPU are the program's.
        let mut params = abi::VaSpaceParams { base: PAGE_SIZE, ..Default::default() };
        let params = &mut params.as_mut_bytes()[..bytes];
        let space = self.rm_client.alloc(
            Some(&self.device),
            class::VA_SPACE,
            Some(params),
            "address space",
        )?;
        let mut params = abi::VirtualParams { va_space: space.handle(), ..Default::default() };
        let params = Some(params.as_mut_bytes());
        let range =
            self.rm_client.alloc(Some(&self.device), class::VIRTUAL, params, "addresses")?;
        Ok(AddressSpace { device: self.device.clone(), space, range })
    }

    /// Allocates the usermode page, which contains the doorbell. Fails on GPUs of an unknown
    /// generation.
    pub fn usermode(&self) -> Result<Arc<Object>, RmError> {
        let class = self.generation.doorbell_page;
        self.rm_client.alloc(Some(&self.subdevice), class, None, "doorbell page")
    }

    /// Allocates video memory, zeroed by the driver.
    pub fn video_memory(&self, bytes: u64) -> Result<Arc<Object>, RmError> {
        let mut params = abi::MemoryParams {
            owner: self.rm_client.root(),
            flags: flag::MEMORY | flag::PERSISTENT,
            // Noncontiguous pages of 2 MiB.
            attr: 3 << 27 | 3 << 23,
            attr2: 1 | 1 << 2 | 1 << 20,
            format: 6,
            size: bytes,
            alignment: 2 * MIB,
            limit: bytes - 1,
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        self.rm_client.alloc(Some(&self.device), class::VIDEO_MEMORY, params, "video memory")
    }

    /// Allocates video memory through which kernels launch other kernels.
    pub fn launch_region(&self, bytes: u64) -> Result<Arc<Object>, RmError> {
        let mut params = abi::MemoryParams {
            owner: self.rm_client.root(),
            flags: flag::MEMORY,
            // Noncontiguous pages of 4 KiB.
            attr: 3 << 27 | 1 << 23,
            attr2: 1 | 1 << 2,
            format: 6,
            size: bytes,
            alignment: bytes,
            limit: bytes.saturating_sub(1),
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        self.rm_client.alloc(Some(&self.device), class::VIDEO_MEMORY, params, "launch region")
    }

    /// Allocates host memory for the driver to write to.
    pub fn system_memory(&self, bytes: u64, read_only: bool) -> Result<Arc<Object>, RmError> {
        let mut params = abi::MemoryParams {
            owner: self.rm_client.root(),
            // NVOS32_TYPE_NOTIFIER.
            kind: 13,
            flags: flag::MEMORY,
            // Noncontiguous pages of the host.
            attr: 2 << 27 | 1 << 25,
            attr2: 1 | 2 << 2 | u32::from(read_only) << 22,
            format: 6,
            size: bytes,
            alignment: 4096,
            limit: bytes - 1,
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        self.rm_client.alloc(Some(&self.device), class::SYSTEM_MEMORY, params, "host memory")
    }

    /// Schedules a channel group on its runlist.
    pub fn schedule(&self, group: &Object) -> Result<(), RmError> {
        let mut enable = [1u8, 0, 0];
        let bytes = self.rm_client.layout().schedule;
        group.control_bytes(control::SCHEDULE, &mut enable[..bytes])
    }

    /// Creates a memory object from the pages of a mapping. The pages are pinned until it is freed.
    pub fn register(&self, mapping: &Mapping) -> Result<Arc<Object>, RmError> {
        let start = mapping.address();
        self.rm_client.register(&self.device, start..start + mapping.len())
    }

    /// Returns the numbers of the copy engines, the one with the most physical copy engines (PCEs)
    /// first. Those that take turns with the compute engine are left out unless there is no other.
    pub fn copy_engines(&self) -> Result<Vec<u32>, RmError> {
        let mut engines = Vec::new();
        let mut refused = None;
        for engine in (0..engine::COPY_ENGINES).map(|number| engine::COPY0 + number) {
            let mut mask = abi::Pair { first: engine, second: 0 };
            match self.subdevice.control(control::PCE_MASK, &mut mask) {
                Ok(()) if mask.second == 0 => {}
                Ok(()) => {
                    let mut caps = abi::Pair { first: engine, second: 0 };
                    let known = self.subdevice.control(control::COPY_ENGINE_CAPS, &mut caps);
                    let of_graphics = known.is_ok() && caps.second & WITH_GRAPHICS != 0;
                    engines.push((of_graphics, Reverse((mask.second.count_ones(), engine))));
                }
                Err(error) => refused = Some(error),
            }
        }
        engines.sort_unstable();
        let of_graphics = engines.first().is_some_and(|(of_graphics, _)| *of_graphics);
        engines.retain(|(shared, _)| *shared == of_graphics);
        match (engines.is_empty(), refused) {
            (false, _) => Ok(engines.iter().map(|(_, Reverse((_, engine)))| *engine).collect()),
            (true, Some(error)) => Err(error),
            (true, None) => {
                Err(RmError::Status { call: "a copy engine".into(), status: status::NOT_SUPPORTED })
            }
        }
    }
}

/// Returns the generation of a device's GPU.
fn generation(device: &Object) -> &'static Generation {
    let mut list = [0; CLASS_LIST_BYTES];
    // If the driver refuses the query, the GPU is taken for one of Hopper.
    let listed = device.control_in_series(CLASS_LIST, &mut list).is_ok();
    Generation::of_list(&list).filter(|_| listed).unwrap_or(&HOPPER)
}

/// Returns the prefix of vGPU type names: the first word of the GPU's name that has a digit, up to
/// a dash.
fn model(name: &str) -> String {
    let words = name.split_whitespace().map(|word| word.split('-').next().unwrap_or_default());
    let model = words.into_iter().find(|word| word.contains(|c: char| c.is_ascii_digit()));
    let allowed = |c: &char| c.is_ascii_alphanumeric();
    let model: String = model.unwrap_or("GPU").chars().filter(allowed).take(16).collect();
    if model.is_empty() { "GPU".into() } else { model }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vgpu_types_are_named_after_the_model() {
        for (name, expected) in [
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("NVIDIA A100-SXM4-80GB", "A100"),
            ("NVIDIA H200", "H200"),
            ("Graphics Device", "GPU"),
            ("", "GPU"),
        ] {
            assert_eq!(model(name), expected);
        }
    }
}
