//! Virtual machines: QEMU processes with a memory that a vGPU can reach, a command line inside, and QMP.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::Lab;
use crate::cleanup::Process;
use crate::guest::Guest;
use crate::qmp::Qmp;

/// Root ports that devices can be plugged into while the VM runs.
pub const HOTPLUG_PORTS: usize = 2;
const KEYS: &str = "keys.sock";
const START_LIMIT: Duration = Duration::from_secs(20);
const BOOT_LIMIT: Duration = Duration::from_secs(90);
const SAVE_LIMIT: Duration = Duration::from_secs(30);

/// How the guest's memory is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// A shared memfd: what a vGPU needs.
    #[default]
    Shared,
    /// A memfd with `share=off`: a mistake that QEMU does not notice.
    Private,
    /// Plain `-m`: another such mistake.
    Plain,
}

/// A VM to be.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// Shown on its screen.
    pub name: String,
    /// Size of its memory in MiB.
    pub memory_mib: u32,
    /// How that is made.
    pub memory: Memory,
    /// Devices from the start, in QEMU's JSON form.
    pub devices: Vec<Value>,
    /// KVM instead of TCG.
    pub kvm: bool,
    /// Its clock counts instructions, and jumps to the next timer while it is idle: what waits for a slow device takes no
    /// time.
    pub virtual_time: bool,
    /// Its clock counts instructions while there is work: a VM that is emulated in an emulated VM is so slow that it would
    /// do nothing but take its timer's interrupts.
    pub counted_time: bool,
    /// What [`Vm::save`] has written of a VM that was started alike: it goes on from there.
    pub saved: Option<PathBuf>,
    /// A folder of this machine that its guest's root may write to as it is, by the name `root`.
    pub folder: Option<PathBuf>,
}

impl VmSpec {
    /// A small VM with a shared memory and no device.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            memory_mib: 256,
            memory: Memory::Shared,
            devices: Vec::new(),
            kvm: false,
            virtual_time: false,
            counted_time: false,
            saved: None,
            folder: None,
        }
    }

    /// With a vGPU, by its socket.
    #[must_use]
    pub fn with_vgpu(mut self, socket: &Path) -> Self {
        self.devices.push(vgpu_device("vgpu0", socket));
        self
    }

    fn args(&self, lab: &Lab, folder: &Path) -> Vec<OsString> {
        let size = self.memory_mib;
        let accelerator = if self.kvm { "kvm" } else { "tcg" };
        let mut machine = format!("q35,accel={accelerator}");
        let mut args: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| args.extend(words.iter().map(OsString::from));
        add(&["-nodefaults", "-no-user-config", "-display", "none", "-m", &format!("{size}M")]);
        if self.memory != Memory::Plain {
            let share = if self.memory == Memory::Shared { "on" } else { "off" };
            add(&["-object", &format!("memory-backend-memfd,id=mem,size={size}M,share={share}")]);
            machine.push_str(",memory-backend=mem");
        }
        add(&["-machine", &machine, "-name", &self.name]);
        // With AMD's CPUs the memory space ends at 1012 GiB; SeaBIOS puts the ports' windows beyond that.
        add(&["-cpu", "qemu64,vendor=GenuineIntel"]);
        // Without a timer check: on a busy host an emulated CPU may get too little time to pass it.
        let append =
            format!("console=ttyS0 no_timer_check fbcon=font:TER16x32 lab.name={}", self.name);
        add(&["-append", &append]);
        if self.virtual_time {
            // 16 ns each.
            add(&["-icount", "shift=4,sleep=off"]);
        }
        if self.counted_time {
            add(&["-icount", "shift=4,sleep=on"]);
        }
        if let Some(saved) = &self.saved {
            let mut from = OsString::from("file:");
            from.push(saved);
            args.extend(["-incoming".into(), from]);
        }
        let mut add = |words: &[&str]| args.extend(words.iter().map(OsString::from));
        if let Some(shared) = &self.folder {
            let path = shared.display();
            let file_system = format!("local,id=root,security_model=passthrough,path={path}");
            add(&["-fsdev", &file_system]);
            let device = json!({ "driver": "virtio-9p-pci", "fsdev": "root", "mount_tag": "root" });
            add(&["-device", &device.to_string()]);
        }
        for port in 0..HOTPLUG_PORTS {
            // Windows for a vGPU's BARs: SeaBIOS reserves too little for a device that is not there yet.
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
        args.extend([
            "-kernel".into(),
            lab.root.kernel.image.clone().into(),
            "-initrd".into(),
            lab.initramfs.clone().into(),
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
            // For a console's keys: a monitor serves one client at a time.
            "-qmp".into(),
            with("unix:", KEYS, ",server=on,wait=off"),
        ]);
        args
    }
}

/// QEMU's JSON for a vGPU.
pub fn vgpu_device(id: &str, socket: &Path) -> Value {
    json!({
        "driver": "vfio-user-pci", "id": id,
        "socket": { "type": "unix", "path": socket.to_string_lossy() },
    })
}

/// A running VM, killed when dropped.
#[derive(Debug)]
pub struct Vm {
    /// QEMU's machine protocol.
    pub qmp: Qmp,
    /// The command line inside.
    pub guest: Guest,
    process: Process,
    folder: PathBuf,
}

impl Vm {
    /// Starts it. `folder` is for its sockets and logs, and for nobody else's.
    pub fn start(lab: &Lab, spec: &VmSpec, folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("Cannot make the folder {}", folder.display()))?;
        for socket in ["agent.sock", "qmp.sock", KEYS] {
            let _ = fs::remove_file(folder.join(socket));
        }
        let errors = folder.join("qemu.log");
        let mut command = lab.root.qemu.command();
        command.args(spec.args(lab, folder));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&errors)?);
        let mut process = Process::spawn(command, Signal::SIGKILL)?;
        let deadline = Instant::now() + START_LIMIT;
        let (guest, qmp) = loop {
            // The guest's socket first, so that nothing it says is lost.
            let guest = Guest::connect(&folder.join("agent.sock"));
            if let (Ok(guest), true) = (guest, folder.join("qmp.sock").exists()) {
                break (guest, Qmp::connect(&folder.join("qmp.sock"))?);
            }
            if process.try_wait()?.is_some() || Instant::now() > deadline {
                let text = fs::read_to_string(&errors).unwrap_or_default();
                bail!("QEMU did not start: {}", text.trim());
            }
            thread::sleep(Duration::from_millis(10));
        };
        Ok(Self { qmp, guest, process, folder: folder.to_path_buf() })
    }

    /// Starts it and waits until its guest takes commands.
    pub fn boot(lab: &Lab, spec: &VmSpec, folder: &Path) -> Result<Self> {
        let mut vm = Self::start(lab, spec, folder)?;
        vm.wait_boot()?;
        Ok(vm)
    }

    /// Waits until its guest takes commands, for the first time or again.
    pub fn wait_boot(&mut self) -> Result<()> {
        self.guest.wait_boot(BOOT_LIMIT).with_context(|| {
            let console = self.console();
            let lines: Vec<_> = console.lines().collect();
            let tail = lines[lines.len().saturating_sub(12)..].join("\n");
            format!("{}\nThe end of its console:\n{tail}", self.errors())
        })
    }

    /// Waits until one that was saved goes on: what is said to it before is lost.
    pub fn wait_running(&mut self) -> Result<()> {
        let deadline = Instant::now() + SAVE_LIMIT;
        while self.qmp.execute("query-status", &json!({}))?["running"] != json!(true) {
            if Instant::now() > deadline {
                bail!("The saved VM does not go on: {}", self.errors());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// QEMU's process.
    pub fn pid(&self) -> Pid {
        self.process.pid()
    }

    /// True while QEMU runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// A monitor for a console's keys.
    pub fn keys(&self) -> PathBuf {
        self.folder.join(KEYS)
    }

    /// What the guest's kernel has said.
    pub fn console(&self) -> String {
        let bytes = fs::read(self.folder.join("console.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// What QEMU has complained of.
    pub fn errors(&self) -> String {
        fs::read_to_string(self.folder.join("qemu.log")).unwrap_or_default()
    }

    /// Plugs a device into one of the [`HOTPLUG_PORTS`].
    pub fn plug(&mut self, mut device: Value, port: usize) -> Result<()> {
        device["bus"] = json!(format!("port{port}"));
        self.qmp.execute("device_add", &device).map(drop)
    }

    /// Unplugs a device, and waits until the guest has let it go.
    pub fn unplug(&mut self, id: &str) -> Result<()> {
        self.qmp.drop_events();
        self.qmp.execute("device_del", &json!({ "id": id }))?;
        self.qmp.wait_event("DEVICE_DELETED", Duration::from_secs(60)).map(drop)
    }

    /// Writes its memory and its devices to a file, and ends it.
    pub fn save(mut self, file: &Path) -> Result<()> {
        let uri = format!("file:{}", file.display());
        self.qmp.execute("migrate", &json!({ "uri": uri }))?;
        let deadline = Instant::now() + SAVE_LIMIT;
        loop {
            let state = self.qmp.execute("query-migrate", &json!({}))?;
            match state["status"].as_str() {
                Some("completed") => return self.quit(),
                Some("failed" | "cancelled") => bail!("QEMU cannot save the VM: {state}"),
                _ if Instant::now() > deadline => bail!("QEMU does not save the VM: {state}"),
                _ => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Ends QEMU in an orderly way.
    pub fn quit(mut self) -> Result<()> {
        self.qmp.execute("quit", &json!({}))?;
        self.process.wait(Duration::from_secs(10)).map(drop)
    }

    /// Ends QEMU by SIGKILL.
    pub fn kill(mut self) {
        self.process.kill();
    }
}
