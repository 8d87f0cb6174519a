//! A host in a VM, with an IOMMU, an `edu` and a display adapter bound to vfio-pci. A test boots
//! the VM and runs itself in it.

#![allow(clippy::unwrap_used, reason = "tests")]

pub mod head;

use std::path::Path;
use std::time::Duration;

use lab::Lab;
use lab::guest::Output;
use lab::progress::Progress;
use lab::qemu::{Vm, VmSpec};
use lab::{iommufd, vfio};
use serde_json::Value;

pub mod guest;

/// Timeout in virtual time, which only a hang exceeds.
pub const LONG: Duration = Duration::from_secs(3600);
/// Timeout of a command inside.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Address of the display adapter inside.
pub const DISPLAY: &str = "0000:00:02.0";
/// Address of the DMA engine inside.
pub const EDU: &str = "0000:00:03.0";
/// Environment variable that is set inside.
const INSIDE: &str = "TESSERA_INSIDE";

/// Returns the name of the calling test as `--exact` takes it. libtest names the test's thread so.
pub fn this_test() -> String {
    std::thread::current().name().unwrap_or_default().to_owned()
}

/// Returns whether this process is the second run of a test, inside the VM.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs a command inside that must succeed, and returns its output.
pub fn ok(vm: &mut Vm, command: &str) -> String {
    let output = vm.guest.run(command, LIMIT).and_then(Output::success);
    output.unwrap_or_else(|error| panic!("{command}: {error:#}")).stdout
}

/// Runs a command inside that must fail with one line, and returns the line.
pub fn refused(vm: &mut Vm, command: &str) -> String {
    let output = vm.guest.run(command, LIMIT).unwrap();
    assert_ne!(output.status, 0, "{command}: {}", output.stdout);
    assert_eq!(output.stderr.lines().count(), 1, "{command}: {}", output.stderr);
    output.stderr
}

/// Returns the default specification of the VM.
pub fn machine() -> VmSpec {
    VmSpec { memory_mib: 512, ..vfio::machine("host") }
}

/// Returns the default specification with virtual time: the clock skips waits.
pub fn in_virtual_time() -> VmSpec {
    VmSpec { virtual_time: true, ..machine() }
}

/// A running VM.
pub struct Nested {
    pub vm: Vm,
    program: String,
    pub folder: tempfile::TempDir,
}

impl Nested {
    /// Boots a VM and gives both devices to vfio-pci.
    pub fn boot() -> Self {
        Self::boot_as(&machine())
    }

    /// Boots a VM with further devices, which are not given to vfio-pci.
    pub fn boot_beside(devices: Vec<Value>) -> Self {
        let mut spec = machine();
        spec.devices.extend(devices);
        Self::boot_as(&spec)
    }

    /// Boots a VM in virtual time: `edu` takes a tenth of a second for each 4 KiB.
    pub fn boot_in_virtual_time() -> Self {
        Self::boot_as(&in_virtual_time())
    }

    /// Boots a VM whose kernel has iommufd. Reports a skipped test if this machine cannot make such
    /// a kernel.
    pub fn boot_with_iommufd(spec: &VmSpec) -> Option<Self> {
        let made = Self::boot_in(spec, iommufd::lab);
        made.map_err(|reason| system_tests::skipped(&format!("a kernel with iommufd: {reason}")))
            .ok()
    }

    /// Boots a VM with further devices, and with a booted VM inside ([`vfio::guest_inside`]).
    pub fn boot_with_guest(guest: &VmSpec, devices: Vec<Value>) -> Self {
        let mut spec = VmSpec { memory_mib: 1024, ..machine() };
        spec.devices.extend(devices);
        let host = |lab: &Lab, programs: &[&Path], folder: &Path, progress: &Progress| {
            let host = vfio::lab(lab, programs, folder, progress)?;
            vfio::with_guest(host, lab, guest, folder, progress).map(Ok)
        };
        Self::boot_in(&spec, host).unwrap()
    }

    fn boot_as(spec: &VmSpec) -> Self {
        let stock = |lab: &Lab, programs: &[&Path], folder: &Path, progress: &Progress| {
            vfio::lab(lab, programs, folder, progress).map(Ok)
        };
        Self::boot_in(spec, stock).unwrap()
    }

    fn boot_in(
        spec: &VmSpec,
        host: impl FnOnce(&Lab, &[&Path], &Path, &Progress) -> anyhow::Result<Result<Lab, String>>,
    ) -> Result<Self, String> {
        let progress = Progress::new();
        let folder = tempfile::tempdir().unwrap();
        let (lab, programs) = Lab::open_with_host(&progress).unwrap();
        let program = std::env::current_exe().unwrap();
        let [vgpuctl, vgpud] = ["vgpuctl", "vgpud"].map(|name| programs.find(name).unwrap());
        let host = host(&lab, &[vgpuctl, vgpud, &program], folder.path(), &progress).unwrap()?;
        let mut vm = Vm::boot(&host, spec, &folder.path().join("vm")).unwrap();
        ok(&mut vm, vfio::LOAD);
        for address in [DISPLAY, EDU] {
            ok(&mut vm, &format!("vgpuctl parents bind {address}"));
        }
        let program = program.file_name().unwrap().to_string_lossy().into_owned();
        Ok(Self { vm, program, folder })
    }

    /// Starts the calling test inside, in the background, with its output in a file there.
    pub fn start(&mut self, log: &str) {
        let (program, test) = (&self.program, this_test());
        let command = format!(
            "({INSIDE}=1 /bin/{program} --ignored --exact {test} --nocapture > {log} 2>&1 &)"
        );
        ok(&mut self.vm, &command);
    }

    /// Runs the calling test inside and returns its output.
    pub fn run(&mut self, limit: Duration) -> String {
        let (program, test) = (&self.program, this_test());
        // The console gets the output too, for tests that hang.
        let command = format!(
            "(: > /tmp/log; tail -f /tmp/log > /dev/ttyS0 & {INSIDE}=1 /bin/{program} --ignored --exact {test} \
             --nocapture > /tmp/log 2>&1; status=$?; kill %1 2> /dev/null; cat /tmp/log; exit $status)"
        );
        let output = self.vm.guest.run(&command, limit).unwrap();
        assert_eq!(output.status, 0, "{}", output.stdout);
        assert!(output.stdout.contains("1 passed"), "{}", output.stdout);
        output.stdout
    }

    /// Returns the number of faults that the IOMMU has reported.
    pub fn faults(&mut self) -> usize {
        let count = ok(&mut self.vm, "dmesg | grep DMAR | grep -c 'fault' || true");
        count.trim().parse().unwrap()
    }
}
