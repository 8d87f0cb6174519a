//! Checks of the vGPU's PCI function.

use host_inventory::{Finding, HostFiles};

use crate::direct::DRIVER as CUDA_DRIVER;
use crate::pci;

const CHECK: &str = "device";
/// Driver of a vGPU with a display.
const DISPLAY_DRIVER: &str = "bochs-drm";
/// Base class of display controllers in the file `class`.
const DISPLAY_CLASS: &str = "0x03";
/// Folder in which Linux lists PCI functions.
const DEVICES: &str = "sys/bus/pci/devices";

/// PCI function of a vGPU.
#[derive(Clone, Debug)]
pub struct Vgpu {
    /// PCI address.
    pub address: String,
    /// Name of the bound driver.
    pub driver: Option<String>,
    /// Whether the vGPU has a display.
    pub display: bool,
}

impl Vgpu {
    /// Returns the vGPUs of a VM.
    pub fn all(vm: &HostFiles) -> Vec<Self> {
        let folders = pci::vgpus(&vm.path(DEVICES)).unwrap_or_default();
        let vgpu = |folder: std::path::PathBuf| {
            let address = folder.file_name()?.to_string_lossy().into_owned();
            let class = vm.read(&format!("{DEVICES}/{address}/class")).unwrap_or_default();
            let display = class.starts_with(DISPLAY_CLASS);
            Some(Self { driver: pci::driver(&folder), address, display })
        };
        folders.into_iter().filter_map(vgpu).collect()
    }

    /// Returns whether CUDA programs use the vGPU, or could use it with the module.
    pub fn runs_cuda(&self) -> bool {
        !self.display || self.driver.as_deref() == Some(CUDA_DRIVER)
    }
}

/// Checks all vGPUs of a VM.
pub fn check(vm: &HostFiles, vgpus: &[Vgpu]) -> Vec<Finding> {
    if vgpus.is_empty() {
        return vec![Finding::problem(
            CHECK,
            "This VM has no vGPU: no PCI function has a vGPU's ids and registers",
            "on the host: `vgpuctl qemu-args` or `vgpuctl libvirt attach`, then start the VM again",
        )];
    }
    vgpus.iter().flat_map(|vgpu| check_one(vm, vgpu)).collect()
}

fn check_one(vm: &HostFiles, vgpu: &Vgpu) -> Vec<Finding> {
    let mut findings = vec![driver(vgpu)];
    findings.extend(vgpu.display.then(|| other_display(vm, vgpu)).flatten());
    findings.extend(iommu(vm, vgpu));
    findings.extend(lockdown(vm));
    findings
}

fn driver(vgpu: &Vgpu) -> Finding {
    let Vgpu { address, driver, display } = vgpu;
    let expected = if *display { DISPLAY_DRIVER } else { CUDA_DRIVER };
    match driver.as_deref() {
        Some(driver) if driver == expected || driver == CUDA_DRIVER => {
            Finding::ok(CHECK, format!("The vGPU {address} has its driver {driver}"))
        }
        Some(other) => Finding::problem(
            CHECK,
            format!("The vGPU {address} has the driver {other} instead of {expected}"),
            format!(
                "echo {address} > /sys/bus/pci/drivers/{other}/unbind, then \
                 echo {address} > /sys/bus/pci/drivers_probe"
            ),
        ),
        None if *display => Finding::warning(
            CHECK,
            format!(
                "No driver has the vGPU {address}: its screen shows at most the firmware's picture"
            ),
            "modprobe bochs; Debian's kernel for clouds does not have it: apt install linux-image-amd64",
        ),
        None => Finding::problem(
            CHECK,
            format!("No driver has the vGPU {address}: CUDA programs cannot use it"),
            "load the module: see the next findings",
        ),
    }
}

/// Looks for another display adapter, on which firmware and kernel write.
fn other_display(vm: &HostFiles, vgpu: &Vgpu) -> Option<Finding> {
    let read = |address: &str, file| vm.read(&format!("{DEVICES}/{address}/{file}"));
    let is_display = |address: &String| {
        *address != vgpu.address
            && read(address, "class").is_some_and(|class| class.starts_with(DISPLAY_CLASS))
    };
    let other = vm.names(DEVICES).into_iter().find(is_display)?;
    let boots = read(&other, "boot_vga").is_some_and(|text| text.trim() == "1");
    let role = if boots { "is the boot display" } else { "is a display too" };
    Some(Finding::warning(
        CHECK,
        format!("The adapter {other} {role}: the console can be there, and not on the vGPU"),
        "remove it from the VM: QEMU's -vga none, or libvirt's <video><model type='none'/></video>",
    ))
}

/// Looks for an IOMMU in the VM, whose translations the host does not follow.
fn iommu(vm: &HostFiles, vgpu: &Vgpu) -> Option<Finding> {
    let group = format!("{DEVICES}/{}/iommu_group", vgpu.address);
    let kind = vm.read(&format!("{group}/type")).unwrap_or_default();
    vm.has(&group).then(|| {
        Finding::problem(
            CHECK,
            format!(
                "The VM's IOMMU is on ({}): the vGPU cannot reach the VM's memory",
                kind.trim()
            ),
            "remove the IOMMU from the VM, or boot with intel_iommu=off (amd_iommu=off)",
        )
    })
}

/// Checks whether the kernel lets programs map the vGPU's registers, as jobs of `vgpu-guest` do.
fn lockdown(vm: &HostFiles) -> Option<Finding> {
    let modes = vm.read("sys/kernel/security/lockdown")?;
    (!modes.contains("[none]")).then(|| {
        Finding::warning(
            CHECK,
            "The kernel is locked down (Secure Boot): vgpu-guest cannot map the vGPU's registers, so \
             only `doctor` and CUDA programs work",
            "turn Secure Boot off in the firmware's settings, if vgpu-guest has to run jobs",
        )
    })
}
