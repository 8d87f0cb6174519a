//! Properties of a vGPU in its control registers. Reading them disturbs no other user of the vGPU.

use mdev_core::abi::control::{Features, MAGIC, Status, VERSION, reg};

use crate::GuestError;
use crate::platform::Platform;

/// Registers of a vGPU that describe it.
#[derive(Clone, Copy, Debug)]
pub struct Properties<'a>(&'a dyn Platform);

impl<'a> Properties<'a> {
    /// Returns the properties of the vGPU of a platform.
    pub fn of(platform: &'a dyn Platform) -> Self {
        Self(platform)
    }

    /// Checks that the vGPU works and has an interface that this program knows.
    pub fn check(&self) -> Result<(), GuestError> {
        if self.0.read32(reg::MAGIC) != MAGIC {
            return Err(GuestError::NoDevice);
        }
        let (major, minor) = self.version();
        if major != VERSION >> 16 {
            return Err(GuestError::Version { major, minor });
        }
        let status = Status::from_bits_truncate(self.0.read32(reg::STATUS));
        if status.contains(Status::LOST) { Err(GuestError::Lost) } else { Ok(()) }
    }

    /// Returns the name of the vGPU type.
    pub fn type_name(&self) -> String {
        self.text(reg::TYPE_NAME, reg::TYPE_NAME_BYTES)
    }

    /// Returns the name of the GPU.
    pub fn gpu_name(&self) -> String {
        self.text(reg::GPU_NAME, reg::GPU_NAME_BYTES)
    }

    /// Returns the UUID.
    pub fn uuid(&self) -> String {
        let bytes = self.bytes(reg::UUID, 16);
        let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        [&hex[..4], &hex[4..6], &hex[6..8], &hex[8..10], &hex[10..]]
            .map(<[String]>::concat)
            .join("-")
    }

    /// Returns the control interface's version, major and minor.
    pub fn version(&self) -> (u32, u32) {
        let version = self.0.read32(reg::VERSION);
        (version >> 16, version & 0xffff)
    }

    /// Returns the supported features.
    pub fn features(&self) -> Features {
        Features::from_bits_truncate(self.0.read32(reg::FEATURES))
    }

    /// Returns the size of video memory in bytes.
    pub fn vram_bytes(&self) -> u64 {
        let [low, high] =
            [reg::VRAM_BYTES_LO, reg::VRAM_BYTES_HI].map(|half| u64::from(self.0.read32(half)));
        high << 32 | low
    }

    /// Returns the largest number of channels.
    pub fn max_channels(&self) -> u32 {
        self.0.read32(reg::MAX_CHANNELS)
    }

    /// Returns the version of the control queue; 0 without a queue.
    pub fn queue_version(&self) -> u32 {
        self.0.read32(reg::QUEUE_VERSION)
    }

    fn bytes(&self, register: u64, len: u64) -> Vec<u8> {
        let words = (0..len).step_by(4).map(|at| self.0.read32(register + at));
        words.flat_map(u32::to_le_bytes).collect()
    }

    fn text(&self, register: u64, len: u64) -> String {
        let bytes = self.bytes(register, len);
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }
}
