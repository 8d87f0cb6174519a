//! A GPU as one client of the driver sees it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use mdev_core::gpu::{GpuCapabilities, GpuDescription};
use mdev_core::units::{GIB, KIB, MIB};
use zerocopy::IntoBytes;

use super::rm::{Node, Rm, RmError, call};
use super::session::{AddressSpace, Object, Session};
use super::sys::abi;
use super::sys::numbers::{class, control, engine, fb, flag, status};
use super::version::Layout;

/// Channels of one vGPU.
pub const MAX_CHANNELS: u32 = 32;

/// The driver keeps so much of video memory for contexts and page tables, as a part of all of it.
const KEPT_PART: u64 = 16;

/// A mean slice that costs little: switching between compute contexts takes 0.14 to 0.19 ms, so that 98.5 % are left.
const DEFAULT_TIMESLICE: Duration = Duration::from_millis(12);

/// A GPU that the driver has.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Card {
    /// `0000:3b:00.0`.
    pub address: String,
    /// The number in `/dev/nvidiaN`.
    pub minor: u32,
    /// The driver's own name for it.
    pub gpu_id: u32,
}

/// The GPUs that the driver has.
pub fn cards(rm: &dyn Rm) -> Result<Vec<Card>, RmError> {
    let fd = rm.open(Node::Control).map_err(RmError::os("NVIDIA's driver"))?;
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

/// One client's handles on a GPU.
#[derive(Debug)]
pub struct Device {
    /// The client.
    pub session: Arc<Session>,
    /// The device.
    pub device: Arc<Object>,
    /// The one GPU of it.
    pub subdevice: Arc<Object>,
}

impl Device {
    /// Makes a client for a GPU.
    pub fn open(rm: Arc<dyn Rm>, layout: Layout, card: &Card) -> Result<Self, RmError> {
        let session = Session::open(rm, layout, card.minor)?;
        let mut ids = abi::IdInfo { gpu_id: card.gpu_id, ..Default::default() };
        session.control_root(control::ID_INFO, &mut ids)?;
        let mut params = abi::DeviceParams {
            device: ids.device,
            client_share: session.root(),
            ..Default::default()
        };
        let device = session.alloc(None, class::DEVICE, Some(params.as_mut_bytes()), "device")?;
        let mut instance = 0u32;
        let subdevice = session.alloc(
            Some(&device),
            class::SUBDEVICE,
            Some(instance.as_mut_bytes()),
            "subdevice",
        )?;
        Ok(Self { session, device, subdevice })
    }

    /// What it is, as vGPUs are offered it.
    pub fn describe(&self, parent: &str) -> Result<GpuDescription, RmError> {
        let mut text = abi::NameString::default();
        self.subdevice.control(control::NAME_STRING, &mut text)?;
        let len = text.text.iter().position(|byte| *byte == 0).unwrap_or(text.text.len());
        let name = String::from_utf8_lossy(&text.text[..len]).trim().to_owned();
        let mut info = abi::FbInfo { count: 1, ..Default::default() };
        info.list[0] = [fb::HEAP_SIZE, 0];
        self.subdevice.control(control::FB_INFO, &mut info)?;
        let heap = u64::from(info.list[0][1]) * KIB;
        let shared = heap - (heap / KEPT_PART).max(GIB.min(heap));
        Ok(GpuDescription {
            parent: parent.to_owned(),
            model: model(&name),
            name,
            vram_bytes: shared / (256 * MIB) * (256 * MIB),
            capabilities: GpuCapabilities::VRAM_APERTURE
                | GpuCapabilities::COPY
                | GpuCapabilities::COMPUTE
                | GpuCapabilities::DOORBELL_MAPPED,
            max_vgpus: 256,
            max_channels: MAX_CHANNELS,
            max_import_bytes: 1 << 40,
            default_timeslice: DEFAULT_TIMESLICE,
            hang_timeout: None,
        })
    }

    /// Makes an address space that only this client's channels use.
    pub fn address_space(&self) -> Result<AddressSpace, RmError> {
        let bytes = self.session.layout().va_space;
        let mut params = abi::VaSpaceParams::default();
        let params = &mut params.as_mut_bytes()[..bytes];
        let space = self.session.alloc(
            Some(&self.device),
            class::VA_SPACE,
            Some(params),
            "address space",
        )?;
        let mut params = abi::VirtualParams { va_space: space.handle(), ..Default::default() };
        let params = Some(params.as_mut_bytes());
        let range = self.session.alloc(Some(&self.device), class::VIRTUAL, params, "addresses")?;
        Ok(AddressSpace { device: self.device.clone(), space, range })
    }

    /// The doorbell page of this generation's GPUs.
    pub fn usermode(&self) -> Result<Arc<Object>, RmError> {
        self.session.alloc(Some(&self.subdevice), class::USERMODE, None, "doorbell page")
    }

    /// Video memory, zeroed by the driver.
    pub fn video_memory(&self, bytes: u64) -> Result<Arc<Object>, RmError> {
        let mut params = abi::MemoryParams {
            owner: self.session.root(),
            flags: flag::MEMORY | flag::PERSISTENT,
            // Pages anywhere, of 2 MiB.
            attr: 3 << 27 | 3 << 23,
            attr2: 1 | 1 << 2 | 1 << 20,
            format: 6,
            size: bytes,
            alignment: 2 * MIB,
            limit: bytes - 1,
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        self.session.alloc(Some(&self.device), class::VIDEO_MEMORY, params, "video memory")
    }

    /// A piece of the host's memory that the driver writes and we read.
    pub fn system_memory(&self, bytes: u64, read_only: bool) -> Result<Arc<Object>, RmError> {
        let mut params = abi::MemoryParams {
            owner: self.session.root(),
            // A notifier.
            kind: 13,
            flags: flag::MEMORY,
            // Pages anywhere, of the host.
            attr: 2 << 27 | 1 << 25,
            attr2: 1 | 2 << 2 | u32::from(read_only) << 22,
            format: 6,
            size: bytes,
            alignment: 4096,
            limit: bytes - 1,
            ..Default::default()
        };
        let params = Some(params.as_mut_bytes());
        self.session.alloc(Some(&self.device), class::SYSTEM_MEMORY, params, "host memory")
    }

    /// The copy engine with most of the chip's copying hardware behind it.
    pub fn best_copy_engine(&self) -> Result<u32, RmError> {
        let mut best = None;
        let mut refused = None;
        for engine in (0..engine::COPY_ENGINES).map(|number| engine::COPY0 + number) {
            let mut mask = abi::Pair { first: engine, second: 0 };
            match self.subdevice.control(control::PCE_MASK, &mut mask) {
                Ok(()) => best = best.max(Some((mask.second.count_ones(), engine))),
                Err(error) => refused = Some(error),
            }
        }
        match (best, refused) {
            (Some((pieces, engine)), _) if pieces > 0 => Ok(engine),
            (_, Some(error)) => Err(error),
            _ => {
                Err(RmError::Status { what: "a copy engine".into(), status: status::NOT_SUPPORTED })
            }
        }
    }
}

/// How the GPU's name begins the names of its types: the first word that has a digit, up to a dash.
fn model(name: &str) -> String {
    let words = name.split_whitespace().map(|word| word.split('-').next().unwrap_or_default());
    let model = words.into_iter().find(|word| word.contains(|c: char| c.is_ascii_digit()));
    let fine = |c: &char| c.is_ascii_alphanumeric();
    let model: String = model.unwrap_or("GPU").chars().filter(fine).take(16).collect();
    if model.is_empty() { "GPU".into() } else { model }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_named_after_the_model() {
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
