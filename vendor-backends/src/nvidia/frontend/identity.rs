//! What a vGPU says of itself to programs.

use mdev_core::ids::VgpuId;
use nvidia_rm::abi::{CardInfo, CardInfos, MAX_CARDS};
use programs::front_end::FrontEndSpec;
use zerocopy::IntoBytes;

/// Identity of a vGPU.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The vGPU. Its UUID is the GPU's.
    pub vgpu: VgpuId,
    /// Name, as `nvidia-smi` shows it.
    pub name: String,
    /// Version of the driver, such as `580.159.04`: programs use libcuda of the same version.
    pub driver: String,
    /// PCI vendor and device.
    pub pci_ids: (u16, u16),
    /// PCI bus and device number, in domain 0.
    pub address: (u8, u8),
    /// Video memory, in bytes.
    pub vram_bytes: u64,
}

/// PCI vendor and device of the GPU whose answers are recorded: GH100.
const PCI_IDS: (u16, u16) = (0x10de, 0x2335);
/// Place of the GPU that programs see: a vGPU has its own only in a VM.
const ADDRESS: (u8, u8) = (0, 6);

impl Identity {
    /// Returns what a vGPU with this specification says of itself.
    pub fn of(spec: &FrontEndSpec) -> Self {
        let driver = spec.driver.as_deref().unwrap_or(super::DRIVER_WITHOUT_GPU);
        Self {
            vgpu: spec.vgpu,
            name: spec.name.clone(),
            driver: driver.to_owned(),
            pci_ids: PCI_IDS,
            address: ADDRESS,
            vram_bytes: spec.vram_bytes,
        }
    }

    /// Minor number of the device node.
    pub const MINOR: u32 = 0;

    /// Returns the GPU's id in requests.
    pub fn gpu_id(&self) -> u32 {
        u32::from(self.address.0) << 8 | u32::from(self.address.1)
    }

    /// Returns the PCI address.
    pub fn bus_address(&self) -> String {
        format!("0000:{:02x}:{:02x}.0", self.address.0, self.address.1)
    }

    /// Returns the argument of `NV_ESC_CARD_INFO`, for `len` bytes.
    pub fn card_infos(&self, len: usize) -> Vec<u8> {
        let mut cards = CardInfos { cards: [CardInfo::default(); MAX_CARDS] };
        cards.cards[0] = CardInfo {
            valid: 1,
            pci_bus: self.address.0,
            pci_slot: self.address.1,
            pci_vendor: self.pci_ids.0,
            pci_device: self.pci_ids.1,
            gpu_id: self.gpu_id(),
            reg_size: 16 << 20,
            fb_size: self.vram_bytes.checked_next_power_of_two().unwrap_or(self.vram_bytes),
            minor: Self::MINOR,
            ..Default::default()
        };
        let mut bytes = cards.as_bytes().to_vec();
        bytes.resize(len, 0);
        bytes
    }

    /// Returns the files below `/proc/driver/nvidia`, with their content.
    pub fn proc_files(&self) -> Vec<(String, String)> {
        let Self { driver, name, .. } = self;
        let version = format!(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  \
             (tessera)\nGCC version:\n"
        );
        let information = format!(
            "Model: \t\t {name}\nIRQ:   \t\t 0\nGPU UUID: \t GPU-{}\nVideo BIOS: \t ??.??.??.??.??\n\
             Bus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n\
             Bus Location: \t {}\nDevice Minor: \t {}\nGPU Firmware: \t {driver}\n\
             GPU Excluded:\t No\n",
            self.vgpu,
            self.bus_address(),
            Self::MINOR
        );
        vec![
            ("version".into(), version),
            ("params".into(), PARAMS.into()),
            (format!("gpus/{}/information", self.bus_address()), information),
        ]
    }
}

/// Parameters of the driver's module that its libraries read.
const PARAMS: &str = "\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 0
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
InitializeSystemMemoryAllocations: 1
UsePageAttributeTable: 4294967295
EnableMSI: 1
MemoryPoolSize: 0
IgnoreMMIOCheck: 0
EnableStreamMemOPs: 0
EnableUserNUMAManagement: 1
RmProfilingAdminOnly: 1
PreserveVideoMemoryAllocations: 0
EnableResizableBar: 0
EnableGpuFirmware: 18
OpenRmEnableUnsupportedGpus: 1
RegistryDwords: \"\"
RmMsg: \"\"
";
