//! QEMU arguments that give a VM a vGPU.
//!
//! Two things are needed: the device, and guest memory that another process may map (`share=on`), since the GPU works
//! on the guest's own pages. [`new_vm`] writes both; [`attach`] puts them into a command line that exists.

use crate::Device;

/// Name of the memory backend that is added.
pub const MEMORY_ID: &str = "vgpu-mem";

/// What QEMU gives a VM without `-m`.
const DEFAULT_MEMORY: &str = "128M";

/// Options of QEMU that take no value. Every other one takes the next argument.
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

/// Why a command line cannot have a vGPU. Nothing is changed then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// An option's value is missing.
    #[error("QEMU's {0} has no value")]
    NoValue(String),
    /// Memory of a kind that no other process can map.
    #[error(
        "Guest memory {id:?} is a {kind}, which no other process can map; \
         make it memory-backend-memfd,share=on"
    )]
    Unshareable {
        /// The backend's id.
        id: String,
        /// What it is.
        kind: String,
    },
    /// The machine's memory is not where it is said to be.
    #[error("There is no -object memory-backend-memfd,id={0} for the memory backend {0:?}")]
    NoBackend(String),
    /// An -object in JSON, which is not looked into.
    #[error(
        "Guest memory {0:?} is given in JSON; write it as -object memory-backend-memfd,id={0},share=on,size=..."
    )]
    Json(String),
}

/// Arguments for a VM of its own: machine, shared memory and the device.
pub fn new_vm(device: &Device, machine: &str, memory: &str) -> Vec<String> {
    let machine = format!("{machine},memory-backend={MEMORY_ID}");
    // The machine takes its size from -m all the same, and both must agree.
    let mut args = ["-machine", &machine, "-m", memory].map(str::to_owned).to_vec();
    args.extend(memory_args(memory));
    args.extend(device_args(device));
    args
}

/// A command line that exists, with a vGPU.
///
/// Memory that the machine names already becomes shared; otherwise a shared backend of the size of `-m` is added.
pub fn attach(existing: &[String], device: &Device) -> Result<Vec<String>, AttachError> {
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
        let backend = format!("memory-backend={MEMORY_ID}");
        match machines.last() {
            Some(at) => args[*at] = format!("{},{backend}", args[*at]),
            None => args.extend(["-machine".to_owned(), backend]),
        }
        args.extend(memory_args(memory.as_deref().unwrap_or(DEFAULT_MEMORY)));
    }
    args.extend(device_args(device));
    Ok(args)
}

fn memory_args(size: &str) -> [String; 2] {
    ["-object".to_owned(), format!("memory-backend-memfd,id={MEMORY_ID},size={size},share=on")]
}

fn device_args(device: &Device) -> [String; 2] {
    ["-device".to_owned(), device.json()]
}

/// Each option's name, and where its value is.
fn options(args: &[String]) -> Result<Vec<(String, usize)>, AttachError> {
    let mut options = Vec::new();
    let mut at = 0;
    while at < args.len() {
        // QEMU takes one dash or two; what has none is the program itself, or a disk.
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

/// The parts of an option's value. A doubled comma stands for a comma in one of them.
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

/// A memory backend, shared.
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

/// The size in `-m`'s value: `512`, `2G`, `size=2G,slots=4`.
fn memory_size(value: &str) -> String {
    let size = property(value, "size").or_else(|| parts(value).into_iter().next());
    let size = size.filter(|size| !size.is_empty() && !size.contains('='));
    let size = size.unwrap_or_else(|| DEFAULT_MEMORY.to_owned());
    // Without a unit -m means MiB, and a backend bytes.
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

    /// What is attached to a command line, without the device at its end.
    fn attached(existing: &str) -> String {
        let mut args = attach(&words(existing), &Device::new("/s")).unwrap();
        assert_eq!(args.pop().as_deref(), Some(DEVICE));
        assert_eq!(args.pop().as_deref(), Some("-device"));
        args.join(" ")
    }

    #[test]
    fn a_new_vm_has_shared_memory_and_the_device() {
        assert_eq!(
            new_vm(&Device::new("/s"), "q35,accel=kvm", "2G").join(" "),
            format!(
                "-machine q35,accel=kvm,memory-backend=vgpu-mem -m 2G \
                 -object memory-backend-memfd,id=vgpu-mem,size=2G,share=on -device {DEVICE}"
            )
        );
    }

    #[test]
    fn a_machine_that_exists_gets_a_shared_backend_of_its_size() {
        let object =
            |size| format!("-object memory-backend-memfd,id=vgpu-mem,size={size},share=on");
        for (existing, expected, size) in [
            ("qemu", "qemu -machine memory-backend=vgpu-mem", "128M"),
            ("qemu -m 512", "qemu -m 512 -machine memory-backend=vgpu-mem", "512M"),
            (
                "qemu -M pc -m size=2G,slots=4 -nographic disk.img",
                "qemu -M pc,memory-backend=vgpu-mem -m size=2G,slots=4 -nographic disk.img",
                "2G",
            ),
            (
                "qemu --machine q35,accel=tcg -m 1.5G -name m",
                "qemu --machine q35,accel=tcg,memory-backend=vgpu-mem -m 1.5G -name m",
                "1.5G",
            ),
        ] {
            assert_eq!(attached(existing), format!("{expected} {}", object(size)));
        }
    }

    #[test]
    fn memory_that_is_named_becomes_shared() {
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
    fn what_cannot_be_shared_is_refused_with_the_remedy() {
        let refused =
            |existing: &str| attach(&words(existing), &Device::new("/s")).unwrap_err().to_string();
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
        fn no_command_line_makes_it_panic(args in prop::collection::vec("-{0,2}[a-zA-Z,=]{0,8}", 0..8)) {
            if let Ok(attached) = attach(&args, &Device::new("/s")) {
                prop_assert!(attached.len() >= args.len() + 2);
            }
        }

        #[test]
        fn commas_in_values_survive(value in "[a-z,]{0,10}") {
            let object = format!("memory-backend-file,id=mem,mem-path={}", value.replace(',', ",,"));
            prop_assert_eq!(property(&shared(&object, "mem").unwrap(), "mem-path"), Some(value));
        }
    }
}
