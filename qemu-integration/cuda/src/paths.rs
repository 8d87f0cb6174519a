//! Which paths the library answers.

use cuda_socket::Node;

use crate::node_files;

/// A path that belongs to NVIDIA's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverPath<'a> {
    /// A device node.
    Node(Node),
    /// A path below `/proc/driver/nvidia`, relative to it.
    Proc(&'a str),
    /// `/proc/devices`: the kernel's list, with the driver's.
    Devices,
    /// State of a module of the driver, in `/sys/module`.
    ModuleState,
    /// Link to a device node in `/dev/char`, by its numbers.
    CharacterLink {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A path of the driver that a vGPU does not have.
    Absent,
}

impl DriverPath<'_> {
    /// Returns whether the status of the path is the driver's. `/proc/devices` is the host's, and
    /// so are links in `/dev/char` to other devices.
    pub fn is_of_driver(&self) -> bool {
        match self {
            Self::Devices => false,
            Self::CharacterLink { major, minor } => node_files::node_of(*major, *minor).is_some(),
            _ => true,
        }
    }
}

/// Returns what a path of the driver names, or `None` for other paths.
pub fn classify(path: &[u8]) -> Option<DriverPath<'_>> {
    match path.get(1)? {
        b'd' => device(path),
        b'p' => process(path),
        b's' => {
            matches!(path, b"/sys/module/nvidia/initstate" | b"/sys/module/nvidia_uvm/initstate")
                .then_some(DriverPath::ModuleState)
        }
        // The helper that loads the driver, and makes device nodes, as root.
        b'u' => (path == b"/usr/bin/nvidia-modprobe").then_some(DriverPath::Absent),
        _ => None,
    }
}

fn device(path: &[u8]) -> Option<DriverPath<'_>> {
    if let Some(numbers) = path.strip_prefix(b"/dev/char/") {
        let (major, minor) = str::from_utf8(numbers).ok()?.split_once(':')?;
        return Some(DriverPath::CharacterLink { major: number(major)?, minor: number(minor)? });
    }
    Some(match path.strip_prefix(b"/dev/nvidia")? {
        b"ctl" => DriverPath::Node(Node::Control),
        b"-uvm" => DriverPath::Node(Node::Uvm),
        rest => match str::from_utf8(rest).ok().and_then(number) {
            Some(minor) => DriverPath::Node(Node::Gpu(minor)),
            None => DriverPath::Absent,
        },
    })
}

fn process(path: &[u8]) -> Option<DriverPath<'_>> {
    if path == b"/proc/devices" {
        return Some(DriverPath::Devices);
    }
    Some(match path.strip_prefix(b"/proc/driver/nvidia")? {
        b"" => DriverPath::Proc(""),
        [b'/', rest @ ..] => {
            let rest = rest.strip_suffix(b"/").unwrap_or(rest);
            str::from_utf8(rest).map_or(DriverPath::Absent, DriverPath::Proc)
        }
        _ => DriverPath::Absent,
    })
}

/// Parses a decimal number without a sign or leading zeros.
fn number(text: &str) -> Option<u32> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit());
    let canonical = text == "0" || !text.starts_with('0');
    (plain && canonical).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_the_driver_are_recognized() {
        let node = |node| Some(DriverPath::Node(node));
        for (path, expected) in [
            ("/dev/nvidiactl", node(Node::Control)),
            ("/dev/nvidia0", node(Node::Gpu(0))),
            ("/dev/nvidia12", node(Node::Gpu(12))),
            ("/dev/nvidia-uvm", node(Node::Uvm)),
            ("/dev/nvidia-uvm-tools", Some(DriverPath::Absent)),
            ("/dev/nvidia", Some(DriverPath::Absent)),
            ("/dev/nvidia00", Some(DriverPath::Absent)),
            ("/dev/nvidia+1", Some(DriverPath::Absent)),
            ("/dev/nvidia-caps/nvidia-cap1", Some(DriverPath::Absent)),
            ("/dev/char/195:255", Some(DriverPath::CharacterLink { major: 195, minor: 255 })),
            ("/proc/driver/nvidia", Some(DriverPath::Proc(""))),
            ("/proc/driver/nvidia/params", Some(DriverPath::Proc("params"))),
            ("/proc/driver/nvidia/gpus/", Some(DriverPath::Proc("gpus"))),
            ("/proc/driver/nvidia-nvlink/permissions", Some(DriverPath::Absent)),
            ("/proc/devices", Some(DriverPath::Devices)),
            ("/sys/module/nvidia/initstate", Some(DriverPath::ModuleState)),
            ("/usr/bin/nvidia-modprobe", Some(DriverPath::Absent)),
        ] {
            assert_eq!(classify(path.as_bytes()), expected, "{path}");
        }
    }

    #[test]
    fn other_paths_are_not() {
        for path in [
            "",
            "/",
            "/d",
            "dev/nvidia0",
            "/dev/null",
            "/dev/nvram",
            "/proc/self/maps",
            "/proc/driver/rtc",
            "/sys/module/nvidia/version",
            "/dev/char/1:x",
            "/etc/passwd",
        ] {
            assert_eq!(classify(path.as_bytes()), None, "{path}");
        }
        assert_eq!(classify(b"/dev/char/\xff"), None);
    }
}
