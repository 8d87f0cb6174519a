//! QEMU arguments that attach a vGPU to a VM.
//!
//! A vGPU needs the device and guest memory that another process can map (`share=on`), because the
//! GPU accesses guest pages directly. [`new_vm`] creates arguments with both. [`attach`] adds both
//! to an existing command line.

use crate::Device;

/// ID of the added memory backend.
pub const MEMORY_ID: &str = "vgpu-mem";

/// Option of a machine whose memory a new QEMU can take over: `vgpuctl vm upgrade`.
const REPLACEABLE: &str = "aux-ram-share=on";

/// Option against the display adapter that QEMU adds by default.
const NO_VGA: [&str; 2] = ["-vga", "none"];

/// Parts of the names of QEMU's display adapters.
const DISPLAYS: [&str; 5] = ["vga", "bochs-display", "qxl", "ramfb", "virtio-gpu"];

/// QEMU's default memory size without `-m`.
const DEFAULT_MEMORY: &str = "128M";

/// QEMU options without a value. Every other option takes the next argument.
const WITHOUT_VALUE: &[&str] = &[
    "S",
    "daemonize",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nographic",
    "old-param",
    "one-insn-per-tb",
    "only-migratable",
    "preconfig",
    "s",
    "semihosting",
    "snapshot",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
];

/// Reason why a vGPU cannot be attached to a command line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// An option has no value.
    #[error("QEMU's {0} has no value")]
    NoValue(String),
    /// Guest memory is in a backend that no other process can map.
    #[error(
        "Guest memory {id:?} is a {kind}, which no other process can map; \
         make it memory-backend-memfd,share=on"
    )]
    Unshareable {
        /// ID of the backend.
        id: String,
        /// Kind of the backend.
        kind: String,
    },
    /// The memory backend that the machine names does not exist.
    #[error("There is no -object memory-backend-memfd,id={0} for the memory backend {0:?}")]
    NoBackend(String),
    /// The memory backend is given in JSON, which is not supported.
    #[error(
        "Guest memory {0:?} is given in JSON; write it as -object memory-backend-memfd,id={0},share=on,size=..."
    )]
    Json(String),
}

/// Returns arguments for a new VM: machine, shared memory and the device. A vGPU with a display
/// head is the VM's only display adapter.
pub fn new_vm(device: &Device, machine: &str, memory: &str, head: bool) -> Vec<String> {
    let machine = format!("{machine},memory-backend={MEMORY_ID},{REPLACEABLE}");
    // The machine takes the memory size from -m, which must agree with the backend's size.
    let mut args = ["-machine", &machine, "-m", memory].map(str::to_owned).to_vec();
    args.extend(memory_args(memory));
    if head {
        args.extend(NO_VGA.map(str::to_owned));
    }
    args.extend(device_args(device));
    args
}

/// Adds a vGPU to an existing command line.
///
/// Sets `share=on` for memory backends that the machine names. If there are none, adds a shared
/// backend with the size given by `-m`. A vGPU with a display head replaces the adapter that QEMU
/// adds by default, on which firmware and guest would start.
pub fn attach(
    existing: &[String],
    device: &Device,
    head: bool,
) -> Result<Vec<String>, AttachError> {
    let mut args = existing.to_vec();
    let options = options(&args)?;
    let values = |name: &str| {
        let found = options.iter().filter(|(option, _)| option == name);
        found.map(|(_, at)| *at).collect::<Vec<_>>()
    };
    let mut backends: Vec<String> =
        values("numa").iter().filter_map(|at| property(&args[*at], "memdev")).collect();
    let machines = [values("machine"), values("M")].concat();
    backends.extend(machines.iter().filter_map(|at| property(&args[*at], "memory-backend")));
    let objects = values("object");
    for id in &backends {
        let at = objects.iter().find(|at| property(&args[**at], "id").as_ref() == Some(id));
        let Some(at) = at else {
            let json = objects
                .iter()
                .any(|at| args[*at].starts_with('{') && args[*at].contains(&format!("\"{id}\"")));
            return Err(if json {
                AttachError::Json(id.clone())
            } else {
                AttachError::NoBackend(id.clone())
            });
        };
        args[*at] = shared(&args[*at], id)?;
    }
    if backends.is_empty() {
        let memory = values("m").last().map(|at| memory_size(&args[*at]));
        let backend = format!("memory-backend={MEMORY_ID},{REPLACEABLE}");
        match machines.last() {
            Some(at) => args[*at] = format!("{},{backend}", args[*at]),
            None => args.extend(["-machine".to_owned(), backend]),
        }
        args.extend(memory_args(memory.as_deref().unwrap_or(DEFAULT_MEMORY)));
    }
    if head && values("vga").is_empty() {
        args.extend(NO_VGA.map(str::to_owned));
    }
    args.extend(device_args(device));
    Ok(args)
}

/// Returns the display adapter that a command line names besides the vGPU.
pub fn other_display(args: &[String]) -> Option<String> {
    options(args).ok()?.into_iter().find_map(|(option, at)| {
        let value = &args[at];
        match option.as_str() {
            "vga" => (value != "none").then(|| format!("-vga {value}")),
            "device" => {
                let driver = driver(value);
                DISPLAYS
                    .iter()
                    .any(|part| driver.to_ascii_lowercase().contains(part))
                    .then(|| format!("-device {driver}"))
            }
            _ => None,
        }
    })
}

/// Returns the driver in a value of `-device`, which can be JSON.
fn driver(value: &str) -> String {
    let json = serde_json::from_str::<serde_json::Value>(value).ok();
    let json = json.and_then(|json| Some(json["driver"].as_str()?.to_owned()));
    json.or_else(|| parts(value).into_iter().next()).unwrap_or_default()
}

fn memory_args(size: &str) -> [String; 2] {
    ["-object".to_owned(), format!("memory-backend-memfd,id={MEMORY_ID},size={size},share=on")]
}

fn device_args(device: &Device) -> [String; 2] {
    ["-device".to_owned(), device.json()]
}

/// Returns the name of each option and the index of its value.
fn options(args: &[String]) -> Result<Vec<(String, usize)>, AttachError> {
    let mut options = Vec::new();
    let mut at = 0;
    while at < args.len() {
        // QEMU accepts one dash or two. An argument without a dash is the program or a disk.
        let name = args[at].strip_prefix('-').map(|name| name.strip_prefix('-').unwrap_or(name));
        at += 1;
        if let Some(name) = name.filter(|name| !name.is_empty() && !WITHOUT_VALUE.contains(name)) {
            if at == args.len() {
                return Err(AttachError::NoValue(args[at - 1].clone()));
            }
            options.push((name.to_owned(), at));
            at += 1;
        }
    }
    Ok(options)
}

/// Splits an option's value at commas. A doubled comma is a literal comma.
fn parts(value: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = value.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    parts
}

fn property(value: &str, name: &str) -> Option<String> {
    parts(value).iter().rev().find_map(|part| {
        let (key, value) = part.split_once('=')?;
        (key == name).then(|| value.to_owned())
    })
}

/// Returns a memory backend with `share=on`.
fn shared(object: &str, id: &str) -> Result<String, AttachError> {
    let parts = parts(object);
    let kind = parts[0].strip_prefix("qom-type=").unwrap_or(&parts[0]).to_owned();
    if !matches!(
        kind.as_str(),
        "memory-backend-memfd" | "memory-backend-file" | "memory-backend-shm"
    ) {
        return Err(AttachError::Unshareable { id: id.to_owned(), kind });
    }
    let kept = parts.iter().filter(|part| *part != "share" && !part.starts_with("share="));
    let kept: Vec<_> = kept.map(|part| part.replace(',', ",,")).collect();
    Ok(format!("{},share=on", kept.join(",")))
}

/// Returns the size in a value of `-m` such as `512`, `2G` or `size=2G,slots=4`.
fn memory_size(value: &str) -> String {
    let size = property(value, "size").or_else(|| parts(value).into_iter().next());
    let size = size.filter(|size| !size.is_empty() && !size.contains('='));
    let size = size.unwrap_or_else(|| DEFAULT_MEMORY.to_owned());
    // Without a unit, the size of -m is in MiB and the size of a backend in bytes.
    if size.bytes().all(|byte| byte.is_ascii_digit()) { format!("{size}M") } else { size }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DEVICE: &str = r#"{"driver":"vfio-user-pci","socket":{"path":"/s","type":"unix"}}"#;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    /// Attaches a vGPU to a command line and returns the result without the device at its end.
    fn attached(existing: &str) -> String {
        let mut args = attach(&words(existing), &Device::new("/s"), false).unwrap();
        assert_eq!(args.pop().as_deref(), Some(DEVICE));
        assert_eq!(args.pop().as_deref(), Some("-device"));
        args.join(" ")
    }

    #[test]
    fn a_new_vm_has_shared_memory_and_the_device() {
        assert_eq!(
            new_vm(&Device::new("/s"), "q35,accel=kvm", "2G", true).join(" "),
            format!(
                "-machine q35,accel=kvm,memory-backend=vgpu-mem,aux-ram-share=on -m 2G \
                 -object memory-backend-memfd,id=vgpu-mem,size=2G,share=on -vga none \
                 -device {DEVICE}"
            )
        );
        assert!(!new_vm(&Device::new("/s"), "q35", "2G", false).contains(&"-vga".to_owned()));
    }

    #[test]
    fn a_head_replaces_the_default_display_adapter() {
        let attached =
            |existing: &str| attach(&words(existing), &Device::new("/s"), true).unwrap().join(" ");
        let end = format!(" -device {DEVICE}");
        assert!(attached("qemu -m 1G").ends_with(&format!(" -vga none{end}")));
        for own in ["-vga std", "-vga none", "--vga qxl"] {
            let line = attached(&format!("qemu -m 1G {own}"));
            assert_eq!(line.matches("-vga").count(), 1, "{line}");
        }
        let other = |args: &str| other_display(&words(args));
        assert_eq!(other("qemu -vga std").as_deref(), Some("-vga std"));
        assert_eq!(other("qemu --device virtio-vga,id=v").as_deref(), Some("-device virtio-vga"));
        let json = r#"qemu -device {"driver":"bochs-display","addr":"2"}"#;
        assert_eq!(other(json).as_deref(), Some("-device bochs-display"));
        for none in ["qemu -vga none", "qemu -device e1000", "qemu vga -m", ""] {
            assert_eq!(other(none), None, "{none}");
        }
    }

    #[test]
    fn an_existing_machine_gets_a_shared_backend_of_its_size() {
        let object =
            |size| format!("-object memory-backend-memfd,id=vgpu-mem,size={size},share=on");
        for (existing, expected, size) in [
            ("qemu", "qemu -machine memory-backend=vgpu-mem,aux-ram-share=on", "128M"),
            (
                "qemu -m 512",
                "qemu -m 512 -machine memory-backend=vgpu-mem,aux-ram-share=on",
                "512M",
            ),
            (
                "qemu -M pc -m size=2G,slots=4 -nographic disk.img",
                "qemu -M pc,memory-backend=vgpu-mem,aux-ram-share=on -m size=2G,slots=4 -nographic disk.img",
                "2G",
            ),
            (
                "qemu --machine q35,accel=tcg -m 1.5G -name m",
                "qemu --machine q35,accel=tcg,memory-backend=vgpu-mem,aux-ram-share=on -m 1.5G -name m",
                "1.5G",
            ),
        ] {
            assert_eq!(attached(existing), format!("{expected} {}", object(size)));
        }
    }

    #[test]
    fn existing_memory_backends_become_shared() {
        let with = |object: &str| format!("qemu -object {object} -machine q35,memory-backend=mem");
        for (object, expected) in [
            (
                "memory-backend-memfd,id=mem,size=1G,share=on",
                "memory-backend-memfd,id=mem,size=1G,share=on",
            ),
            (
                "memory-backend-memfd,share=off,id=mem,size=1G",
                "memory-backend-memfd,id=mem,size=1G,share=on",
            ),
            (
                "memory-backend-file,id=mem,mem-path=/a,,b,size=1G",
                "memory-backend-file,id=mem,mem-path=/a,,b,size=1G,share=on",
            ),
        ] {
            assert_eq!(attached(&with(object)), with(expected));
        }
        let numa = "qemu -object memory-backend-memfd,id=a,size=1G -numa node,memdev=a -m 1G";
        assert_eq!(attached(numa), numa.replace("size=1G", "size=1G,share=on"));
    }

    #[test]
    fn unshareable_memory_is_refused_with_the_remedy() {
        let refused = |existing: &str| {
            attach(&words(existing), &Device::new("/s"), true).unwrap_err().to_string()
        };
        assert_eq!(
            refused(
                "qemu -object memory-backend-ram,id=mem,size=1G -machine q35,memory-backend=mem"
            ),
            "Guest memory \"mem\" is a memory-backend-ram, which no other process can map; \
             make it memory-backend-memfd,share=on"
        );
        assert_eq!(
            refused("qemu -machine q35,memory-backend=mem"),
            "There is no -object memory-backend-memfd,id=mem for the memory backend \"mem\""
        );
        assert!(
            refused(r#"qemu -object {"qom-type":"memory-backend-ram","id":"mem"} -M q35,memory-backend=mem"#)
                .contains("is given in JSON")
        );
        assert_eq!(refused("qemu -m"), "QEMU's -m has no value");
    }

    proptest! {
        #[test]
        fn attaching_does_not_panic(
            args in prop::collection::vec("-{0,2}[a-zA-Z,={]{0,8}", 0..8), head: bool,
        ) {
            other_display(&args);
            if let Ok(attached) = attach(&args, &Device::new("/s"), head) {
                prop_assert!(attached.len() >= args.len() + 2);
            }
        }

        #[test]
        fn commas_in_values_are_kept(value in "[a-z,]{0,10}") {
            let object = format!("memory-backend-file,id=mem,mem-path={}", value.replace(',', ",,"));
            prop_assert_eq!(property(&shared(&object, "mem").unwrap(), "mem-path"), Some(value));
        }
    }
}
