//! Virtual machines: QEMU processes with shared memory, a command line in the guest, and QMP.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use integrate::qmp::Qmp;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::Lab;
use crate::cleanup::Process;
use crate::guest::{Guest, last_lines};
use crate::ovmf::Ovmf;
use crate::shared_folder::SharedFolder;

/// Options of a guest's kernel.
///
/// No timer check: on a busy host an emulated CPU may get too little time to pass it. No
/// mitigations of the CPU's defects: with them, each system call under TCG empties the TLB. No
/// self-tests of cryptography, which take an emulated CPU 0.3 s.
pub const KERNEL_OPTIONS: &str = "console=ttyS0 no_timer_check mitigations=off cryptomgr.notests";
/// Root ports for hot-plugged devices.
pub const HOTPLUG_PORTS: usize = 2;
/// Name of the socket of a monitor, in the folder of a VM.
pub(crate) const KEYS: &str = "keys.sock";
const START_LIMIT: Duration = Duration::from_secs(20);
const BOOT_LIMIT: Duration = Duration::from_secs(90);
const SAVE_LIMIT: Duration = Duration::from_secs(30);

/// Backend of the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// Shared memfd, as required by a vGPU.
    #[default]
    Shared,
    /// Memfd with `share=off`, a misconfiguration that QEMU accepts.
    Private,
    /// Plain `-m`, another misconfiguration that QEMU accepts.
    Plain,
}

/// Configuration of a VM.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// Name, shown on the screen.
    pub name: String,
    /// Memory size in MiB.
    pub memory_mib: u32,
    /// Number of CPUs.
    pub cpus: u32,
    /// Memory backend.
    pub memory: Memory,
    /// Devices present at start, in QEMU's JSON form.
    pub devices: Vec<Value>,
    /// Whether to use KVM instead of TCG.
    pub kvm: bool,
    /// Whether the clock counts instructions and skips to the next timer while idle, so that
    /// waiting for a slow device takes no time.
    pub virtual_time: bool,
    /// Whether the clock counts instructions while busy. In nested emulation, timer interrupts
    /// would otherwise use all CPU time.
    pub counted_time: bool,
    /// State saved by [`Vm::save`] from a VM with the same configuration, to resume from.
    pub saved: Option<PathBuf>,
    /// Whether the VM waits for its state, which another program sends.
    pub awaits_state: bool,
    /// Whether another QEMU can take the VM over.
    pub replaceable: bool,
    /// Folder of this machine in the guest.
    pub folder: Option<SharedFolder>,
    /// Model of the CPU.
    pub cpu: &'static str,
    /// UEFI instead of a BIOS.
    pub uefi: Option<Ovmf>,
    /// Whether the firmware starts the lab's kernel. Without a kernel it finds nothing to start.
    pub with_kernel: bool,
}

impl VmSpec {
    /// Returns a small VM with shared memory and no device.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            memory_mib: 256,
            cpus: 1,
            memory: Memory::Shared,
            devices: Vec::new(),
            kvm: false,
            virtual_time: false,
            counted_time: false,
            saved: None,
            awaits_state: false,
            replaceable: false,
            folder: None,
            cpu: "qemu64",
            uefi: None,
            with_kernel: true,
        }
    }

    /// Adds a vGPU, given its socket.
    #[must_use]
    pub fn with_vgpu(mut self, socket: &Path) -> Self {
        self.devices.push(vgpu_device("vgpu0", socket));
        self
    }

    /// Returns QEMU's command. `folder` is reserved for its sockets and logs.
    pub fn command(&self, lab: &Lab, folder: &Path) -> Result<Command> {
        fs::create_dir_all(folder)
            .with_context(|| format!("Cannot make the folder {}", folder.display()))?;
        let mut command = lab.root.qemu.command();
        command.args(self.args(lab, folder)?);
        Ok(command)
    }

    fn args(&self, lab: &Lab, folder: &Path) -> Result<Vec<OsString>> {
        let size = self.memory_mib;
        let accelerator = if self.kvm { "kvm" } else { "tcg" };
        let mut machine = format!("q35,accel={accelerator}");
        if self.replaceable {
            machine.push_str(",aux-ram-share=on");
        }
        let mut args: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| args.extend(words.iter().map(OsString::from));
        add(&["-nodefaults", "-no-user-config", "-display", "none", "-m", &format!("{size}M")]);
        if self.memory != Memory::Plain {
            let share = if self.memory == Memory::Shared { "on" } else { "off" };
            add(&["-object", &format!("memory-backend-memfd,id=mem,size={size}M,share={share}")]);
            machine.push_str(",memory-backend=mem");
        }
        add(&["-machine", &machine, "-name", &self.name]);
        // With AMD's CPUs the memory space ends at 1012 GiB; SeaBIOS puts the ports' windows beyond
        // that.
        add(&["-cpu", &format!("{},vendor=GenuineIntel", self.cpu)]);
        // The firmware's MP table, which kernels without ACPI read, has one CPU for each socket.
        add(&["-smp", &format!("{0},sockets={0}", self.cpus)]);
        if self.virtual_time {
            // 16 ns per instruction.
            add(&["-icount", "shift=4,sleep=off"]);
        }
        if self.counted_time {
            add(&["-icount", "shift=4,sleep=on"]);
        }
        if self.awaits_state {
            args.extend(["-incoming".into(), "defer".into()]);
        }
        if let Some(saved) = &self.saved {
            let mut from = OsString::from("file:");
            from.push(saved);
            args.extend(["-incoming".into(), from]);
        }
        let mut add = |words: &[&str]| args.extend(words.iter().map(OsString::from));
        if let Some(shared) = &self.folder {
            add(&shared.args().each_ref().map(String::as_str));
        }
        for port in 0..HOTPLUG_PORTS {
            // Windows for a vGPU's BARs: SeaBIOS reserves too little space for hot-plugged devices.
            let port = json!({
                "driver": "pcie-root-port", "id": format!("port{port}"), "chassis": port + 1,
                "addr": format!("{:#x}", 0x1c + port),
                "mem-reserve": 256 << 20, "pref64-reserve": 4_u64 << 30,
            });
            add(&["-device", &port.to_string()]);
        }
        for device in &self.devices {
            add(&["-device", &device.to_string()]);
        }
        let at = |name: &str| folder.join(name).into_os_string();
        let with = |prefix: &str, name: &str, suffix: &str| {
            let mut text = OsString::from(prefix);
            text.push(at(name));
            text.push(suffix);
            text
        };
        if self.with_kernel {
            args.extend(self.kernel_args(lab));
        }
        if let Some(uefi) = &self.uefi {
            args.extend(uefi.args(folder)?.into_iter().map(OsString::from));
        }
        args.extend([
            "-serial".into(),
            with("file:", "console.log", ""),
            "-chardev".into(),
            with("socket,id=agent,path=", "agent.sock", ",server=on,wait=off"),
            "-serial".into(),
            "chardev:agent".into(),
            "-chardev".into(),
            with("socket,id=qmp,path=", "qmp.sock", ",server=on,wait=off"),
            "-mon".into(),
            "chardev=qmp,mode=control".into(),
            // For key presses on a console; a monitor serves one client at a time.
            "-qmp".into(),
            with("unix:", KEYS, ",server=on,wait=off"),
        ]);
        Ok(args)
    }

    /// Returns the kernel to start. UEFI starts no uncompressed kernel.
    fn kernel<'a>(&self, lab: &'a Lab) -> &'a Path {
        let kernel = &lab.root.kernel;
        let emulated = !self.kvm && self.uefi.is_none();
        kernel.uncompressed.as_deref().filter(|_| emulated).unwrap_or(&kernel.image)
    }

    fn kernel_args(&self, lab: &Lab) -> [OsString; 6] {
        let append = format!("{KERNEL_OPTIONS} fbcon=font:TER16x32 lab.name={}", self.name);
        [
            "-kernel".into(),
            self.kernel(lab).into(),
            "-initrd".into(),
            lab.initramfs.clone().into(),
            "-append".into(),
            append.into(),
        ]
    }
}

/// Returns QEMU's JSON for a vGPU.
pub fn vgpu_device(id: &str, socket: &Path) -> Value {
    json!({
        "driver": "vfio-user-pci", "id": id,
        "socket": { "type": "unix", "path": socket.to_string_lossy() },
    })
}

/// Running VM, killed when dropped.
#[derive(Debug)]
pub struct Vm {
    /// QEMU Machine Protocol.
    pub qmp: Qmp,
    /// Command line in the guest.
    pub guest: Guest,
    process: Process,
    folder: PathBuf,
}

impl Vm {
    /// Starts the VM. `folder` is reserved for its sockets and logs.
    pub fn start(lab: &Lab, spec: &VmSpec, folder: &Path) -> Result<Self> {
        let mut command = spec.command(lab, folder)?;
        for socket in ["agent.sock", "qmp.sock", KEYS] {
            let _ = fs::remove_file(folder.join(socket));
        }
        let errors = folder.join("qemu.log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&errors)?);
        let mut process = Process::spawn(command, Signal::SIGKILL)?;
        let deadline = Instant::now() + START_LIMIT;
        let (guest, qmp) = loop {
            // Connects to the guest's socket first, so that no output is lost.
            let guest = Guest::connect(&folder.join("agent.sock"));
            // A socket exists before it accepts connections.
            if let Ok(guest) = guest
                && let Ok(qmp) = Qmp::connect(&folder.join("qmp.sock"))
            {
                break (guest, qmp);
            }
            if process.try_wait()?.is_some() || Instant::now() > deadline {
                let text = fs::read_to_string(&errors).unwrap_or_default();
                bail!("QEMU did not start: {}", text.trim());
            }
            thread::sleep(Duration::from_millis(10));
        };
        Ok(Self { qmp, guest, process, folder: folder.to_path_buf() })
    }

    /// Starts the VM and waits until its guest accepts commands.
    pub fn boot(lab: &Lab, spec: &VmSpec, folder: &Path) -> Result<Self> {
        let mut vm = Self::start(lab, spec, folder)?;
        vm.wait_boot()?;
        Ok(vm)
    }

    /// Waits until the guest accepts commands, after a boot or a reboot.
    pub fn wait_boot(&mut self) -> Result<()> {
        self.guest.wait_boot(BOOT_LIMIT).with_context(|| {
            let tail = last_lines(&self.console(), 12);
            format!("{}\nLast lines of the console:\n{tail}", self.errors())
        })
    }

    /// Waits until a saved VM has resumed. Commands sent earlier would be lost.
    pub fn wait_running(&mut self) -> Result<()> {
        let deadline = Instant::now() + SAVE_LIMIT;
        while self.qmp.execute("query-status", &json!({}))?["running"] != json!(true) {
            if Instant::now() > deadline {
                bail!("The saved VM did not resume: {}", self.errors());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Returns QEMU's process id.
    pub fn pid(&self) -> Pid {
        self.process.pid()
    }

    /// Returns true while QEMU runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// Returns the socket of a monitor for key presses.
    pub fn keys(&self) -> PathBuf {
        self.folder.join(KEYS)
    }

    /// Returns the guest kernel's log.
    pub fn console(&self) -> String {
        let bytes = fs::read(self.folder.join("console.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns QEMU's error output.
    pub fn errors(&self) -> String {
        fs::read_to_string(self.folder.join("qemu.log")).unwrap_or_default()
    }

    /// Plugs a device into one of the [`HOTPLUG_PORTS`].
    pub fn plug(&mut self, mut device: Value, port: usize) -> Result<()> {
        device["bus"] = json!(format!("port{port}"));
        self.qmp.execute("device_add", &device)?;
        Ok(())
    }

    /// Unplugs a device and waits until the guest has released it.
    pub fn unplug(&mut self, id: &str) -> Result<()> {
        self.qmp.drop_events();
        self.qmp.execute("device_del", &json!({ "id": id }))?;
        self.qmp.wait_event("DEVICE_DELETED", Duration::from_secs(60))?;
        Ok(())
    }

    /// Saves the memory and devices to a file and ends the VM.
    pub fn save(mut self, file: &Path) -> Result<()> {
        let uri = format!("file:{}", file.display());
        self.qmp.execute("migrate", &json!({ "uri": uri }))?;
        let deadline = Instant::now() + SAVE_LIMIT;
        loop {
            let state = self.qmp.execute("query-migrate", &json!({}))?;
            match state["status"].as_str() {
                Some("completed") => return self.quit(),
                Some("failed" | "cancelled") => bail!("QEMU cannot save the VM: {state}"),
                _ if Instant::now() > deadline => {
                    bail!("QEMU did not save the VM in time: {state}")
                }
                _ => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Ends QEMU in an orderly way.
    pub fn quit(mut self) -> Result<()> {
        self.qmp.execute("quit", &json!({}))?;
        self.process.wait(Duration::from_secs(10)).map(drop)
    }

    /// Kills QEMU by SIGKILL.
    pub fn kill(mut self) {
        self.process.kill();
    }
}
