//! Checks of what CUDA programs need besides the module.

use std::path::{Path, PathBuf};

use host_inventory::{Finding, HostFiles};
use mdev_core::untrusted::read_whole;

use super::device::Vgpu;
use crate::direct::DRIVER as CUDA_DRIVER;

/// Largest library that is searched for its version, in bytes.
const MAX_LIBRARY: usize = 1 << 30;

const CHECK: &str = "cuda";
/// Device nodes that NVIDIA's libraries open.
const NODES: [&str; 3] = ["nvidiactl", "nvidia0", "nvidia-uvm"];
/// File in which the host's front end states the version of its driver.
const VERSION: &str = "proc/driver/nvidia/version";
/// Folders of NVIDIA's libraries: Debian's, NVIDIA's own packages, other distributions, containers.
const LIBRARIES: [&str; 6] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "opt/nvidia/lib",
];
const GUIDE: &str = "docs/guest.md, \"NVIDIA's libraries\", has three ways";

/// Checks nodes and libraries, if the module has the vGPU.
pub fn check(vm: &HostFiles, vgpu: &Vgpu) -> Vec<Finding> {
    let bound = vgpu.driver.as_deref() == Some(CUDA_DRIVER);
    let mut findings = Vec::new();
    findings.extend(bound.then(|| nodes(vm)));
    let driver = vm.read(VERSION).as_deref().and_then(version_in);
    if bound && driver.is_none() {
        findings.push(Finding::problem(
            CHECK,
            format!("There is no /{VERSION}: the vGPU's front end does not answer"),
            "on the host: `vgpuctl list` and the log of vgpud have the reason",
        ));
    }
    let missing = Finding::problem(CHECK, "There is no libcuda.so.1", install(driver.as_deref()));
    findings.push(library(vm, "libcuda.so.1", driver.as_deref()).unwrap_or(missing));
    let missing = Finding::warning(
        CHECK,
        "There is no libnvidia-ml.so.1: nvidia-smi and NVML do not work",
        format!("install it with libcuda: {GUIDE}"),
    );
    findings.push(library(vm, "libnvidia-ml.so.1", driver.as_deref()).unwrap_or(missing));
    findings
}

fn nodes(vm: &HostFiles) -> Finding {
    let node = |name: &&str| format!("dev/{name}");
    if let Some(missing) = NODES.iter().map(node).find(|node| !vm.has(node)) {
        return Finding::problem(
            CHECK,
            format!("There is no /{missing}"),
            "mount a devtmpfs on /dev; give a container the nodes /dev/nvidia*",
        );
    }
    match NODES.iter().map(node).find(|node| !vm.is_open_to_all(node)) {
        Some(closed) => Finding::warning(
            CHECK,
            format!("Not every user may use /{closed}"),
            "install tessera-guest, whose rules of udev open the nodes, and `udevadm trigger`; or put \
             users into the node's group",
        ),
        None => Finding::ok(CHECK, "Every user may use /dev/nvidia*"),
    }
}

/// Compares the version of an installed library with that of the host's driver.
fn library(vm: &HostFiles, name: &str, driver: Option<&str>) -> Option<Finding> {
    let path = find(vm, name)?;
    let shown = Path::new("/").join(path.strip_prefix(vm.root()).unwrap_or(&path));
    let shown = shown.display();
    let found = version_of(&path, name, driver);
    Some(match (found, driver) {
        (Some(found), Some(driver)) if found == driver => {
            Finding::ok(CHECK, format!("{shown} has the version of the host's driver, {driver}"))
        }
        (found, Some(driver)) => Finding::problem(
            CHECK,
            format!(
                "{shown} is {}, and the host's driver {driver}: they have to be the same",
                found.map_or("of another version".to_owned(), |found| format!("version {found}"))
            ),
            install(Some(driver)),
        ),
        (_, None) => Finding::ok(CHECK, format!("{shown} is installed")),
    })
}

fn install(driver: Option<&str>) -> String {
    let version =
        driver.map_or("the host's driver".to_owned(), |driver| format!("version {driver}"));
    format!("install libcuda of {version}: {GUIDE}")
}

/// Finds a library where the loader looks for it.
fn find(vm: &HostFiles, name: &str) -> Option<PathBuf> {
    let preferred = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let preferred = std::env::split_paths(&preferred)
        .filter_map(|folder| Some(vm.root().join(folder.strip_prefix("/").ok()?)));
    let usual = LIBRARIES.iter().map(|folder| vm.path(folder));
    preferred.chain(usual).map(|folder| folder.join(name)).find(|path| path.exists())
}

/// Returns the version of a library: from the name of the file that it links to, or, if the name
/// has none, the expected version if the library contains it.
fn version_of(path: &Path, name: &str, expected: Option<&str>) -> Option<String> {
    let real = path.canonicalize().ok()?;
    let file = real.file_name()?.to_string_lossy().into_owned();
    let stem = name.trim_end_matches('1');
    if let Some(version) = file.strip_prefix(stem).filter(|version| is_version(version)) {
        return Some(version.to_owned());
    }
    let expected = expected?;
    let content = read_whole(&real, MAX_LIBRARY).ok()?;
    let wanted = [expected.as_bytes(), b"\0"].concat();
    let mut texts = content.split_inclusive(|byte| *byte == 0);
    texts.any(|text| text.ends_with(&wanted)).then(|| expected.to_owned())
}

/// Returns the version in a text such as "NVRM version: NVIDIA ... Module for x86_64 550.163.01
/// ...".
fn version_in(text: &str) -> Option<String> {
    text.split_whitespace().find(|word| is_version(word)).map(str::to_owned)
}

/// Returns whether a word is a version with at least two numbers.
fn is_version(word: &str) -> bool {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    word.contains('.') && word.split('.').all(number)
}
