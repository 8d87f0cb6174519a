//! QEMU command line of a VM that boots from a disk image with a vGPU.

use crate::Device;
use crate::qemu_args::{AttachError, attach};

/// QEMU options that choose where a VM is shown.
const DISPLAY_OPTIONS: [&str; 4] = ["display", "nographic", "vnc", "spice"];

/// VM that boots from a disk image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// QEMU's program.
    pub program: String,
    /// Name of the VM.
    pub name: Option<String>,
    /// Size of the memory, as for QEMU's `-m`.
    pub memory: String,
    /// Number of CPUs.
    pub cpus: u32,
    /// Whether KVM runs the VM. Otherwise QEMU emulates the CPUs.
    pub kvm: bool,
    /// Path of the disk image.
    pub disk: String,
    /// Format of the disk image.
    pub format: DiskFormat,
    /// Further arguments, which take precedence where QEMU takes the last value of an option.
    pub more: Vec<String>,
}

/// Format of a disk image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFormat {
    /// QEMU's format.
    Qcow2,
    /// Sectors as they are.
    Raw,
}

impl DiskFormat {
    /// First bytes of an image in QEMU's format.
    const QCOW2_MAGIC: &[u8] = b"QFI\xfb";

    /// Returns the format of an image that begins with these bytes.
    pub fn of(begin: &[u8]) -> Self {
        if begin.starts_with(Self::QCOW2_MAGIC) { Self::Qcow2 } else { Self::Raw }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Raw => "raw",
        }
    }
}

impl Boot {
    /// Returns the command line with a vGPU attached, with or without a display head.
    pub fn command_line(&self, device: &Device, head: bool) -> Result<Vec<String>, AttachError> {
        let mut args = vec![self.program.clone()];
        let mut add = |option: &str, value: &str| args.extend([option, value].map(str::to_owned));
        if let Some(name) = &self.name {
            // A doubled comma is a literal comma.
            add("-name", &name.replace(',', ",,"));
        }
        add("-machine", "q35");
        if !self.has(|more| more.contains("accel") || more == "-enable-kvm") {
            add("-accel", if self.kvm { "kvm" } else { "tcg" });
        }
        add("-cpu", "max");
        add("-smp", &self.cpus.to_string());
        add("-m", &self.memory);
        let (disk, format) = (self.disk.replace(',', ",,"), self.format.name());
        add("-drive", &format!("file={disk},format={format},if=virtio"));
        let shown = |more: &str| DISPLAY_OPTIONS.contains(&more.trim_start_matches('-'));
        if !self.has(shown) {
            // The screen of the VM is the vGPU's.
            add("-display", "none");
        }
        args.extend(self.more.iter().cloned());
        attach(&args, device, head)
    }

    fn has(&self, is: impl Fn(&str) -> bool) -> bool {
        self.more.iter().any(|more| is(more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(more: &str) -> Boot {
        Boot {
            program: "qemu".to_owned(),
            name: Some("web1".to_owned()),
            memory: "2G".to_owned(),
            cpus: 2,
            kvm: true,
            disk: "a,b.qcow2".to_owned(),
            format: DiskFormat::Qcow2,
            more: more.split_whitespace().map(str::to_owned).collect(),
        }
    }

    fn line(boot: &Boot) -> String {
        boot.command_line(&Device::new("/s"), true).unwrap().join(" ")
    }

    #[test]
    fn a_disk_is_booted_with_shared_memory_and_the_vgpu() {
        let text = line(&boot(""));
        assert!(
            text.starts_with(
                "qemu -name web1 -machine q35,memory-backend=vgpu-mem,aux-ram-share=on -accel kvm -cpu max -smp 2 -m 2G \
                 -drive file=a,,b.qcow2,format=qcow2,if=virtio -display none "
            ),
            "{text}"
        );
        assert!(text.contains("memory-backend-memfd,id=vgpu-mem,size=2G,share=on"), "{text}");
        assert!(text.contains(r#""path":"/s""#), "{text}");
        assert!(text.contains(" -vga none "), "the vGPU is the only display adapter: {text}");
        let emulated = line(&Boot { kvm: false, name: None, ..boot("") });
        assert!(emulated.starts_with("qemu -machine ") && emulated.contains("-accel tcg"));
    }

    #[test]
    fn further_arguments_take_precedence() {
        let text = line(&boot("-m 4G -nographic -accel tcg -snapshot"));
        assert!(text.contains("size=4G"), "the shared memory has the size of the last -m: {text}");
        assert!(!text.contains("-display") && !text.contains("-accel kvm"), "{text}");
        let last = boot("-m").command_line(&Device::new("/s"), true).unwrap_err();
        assert_eq!(last, AttachError::NoValue("-m".to_owned()));
    }

    #[test]
    fn the_format_is_that_of_the_first_bytes() {
        assert_eq!(DiskFormat::of(b"QFI\xfb\0\0\0\x03"), DiskFormat::Qcow2);
        for bytes in [&b""[..], b"QFI", b"\xeb\x63\x90"] {
            assert_eq!(DiskFormat::of(bytes), DiskFormat::Raw);
        }
    }
}
