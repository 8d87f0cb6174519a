//! `libvirt install-hook`: installs the hook script and AppArmor rules in /etc.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use integrate::shell::quote;
use serde_json::json;
use vendor_backends::backend::BACKENDS;

use crate::cli::Output;
use crate::cli::libvirt::InstallHook;
use crate::failure::Failure;
use crate::mdevctl::pretty;

/// Path of the hook script, in libvirt's directory of domain hooks.
pub const HOOK: &str = "etc/libvirt/hooks/qemu.d/tessera";
/// AppArmor rules for QEMU under libvirt. The file is absent on distributions without AppArmor.
const APPARMOR: &str = "etc/apparmor.d/abstractions/libvirt-qemu";
/// Local additions to these rules.
const APPARMOR_LOCAL: &str = "etc/apparmor.d/local/abstractions/libvirt-qemu";

/// Runs `libvirt install-hook`.
pub fn install(socket: &Path, args: &InstallHook) -> Result<Vec<u8>, Failure> {
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("/usr/bin/vgpuctl"));
    let local = |error: io::Error| {
        let root = args.root.display();
        Failure::Local(format!(
            "Cannot install the hook in {root}: {error}; run this as root, or name another --root"
        ))
    };
    let hook = args.root.join(HOOK);
    write(&hook, &script(&program, socket), 0o755).map_err(local)?;
    let mut apparmor = None;
    if args.root.join(APPARMOR).exists() {
        let file = args.root.join(APPARMOR_LOCAL);
        let rule = apparmor_rules(socket);
        let rules = fs::read_to_string(&file).unwrap_or_default();
        if !rules.contains(&rule) {
            write(&file, &format!("{rules}{rule}"), 0o644).map_err(local)?;
        }
        apparmor = Some(file);
    }
    if args.output == Output::Json {
        return pretty(&json!({ "hook": hook, "apparmor": apparmor }));
    }
    let mut text = format!("Installed {}\n", hook.display());
    if let Some(file) = apparmor {
        let _ = writeln!(text, "Added AppArmor rules for vGPU sockets to {}", file.display());
    }
    text.push_str(
        "Restart libvirt to enable the hook: systemctl restart libvirtd (VMs keep running)\n",
    );
    Ok(text.into_bytes())
}

/// Returns the hook script, which succeeds without action if vgpuctl is not installed any more.
fn script(program: &Path, socket: &Path) -> String {
    let (program, socket) = (quote(&program.to_string_lossy()), quote(&socket.to_string_lossy()));
    format!(
        "#!/bin/sh\n\
         # Starts a domain's vGPUs before it, and stops them after it: vgpuctl libvirt install-hook.\n\
         test -x {program} || exit 0\n\
         exec {program} --socket {socket} libvirt hook \"$@\"\n"
    )
}

/// Returns AppArmor rules for the sockets of vGPUs, which are beside the control socket, and for
/// device files that workers pass to QEMU.
///
/// QEMU maps the doorbells of an NVIDIA GPU from a passed descriptor of its device file. QEMU
/// cannot open the file itself, because libvirt gives it a private /dev.
fn apparmor_rules(socket: &Path) -> String {
    let run_dir = socket.parent().unwrap_or(Path::new("/run/vgpud")).display();
    let mut rules =
        format!("# vGPUs: vgpuctl libvirt install-hook\n{run_dir}/vgpus/*/vfio.sock rw,\n");
    for rule in BACKENDS.device_nodes().filter_map(|node| node.apparmor) {
        let _ = writeln!(rules, "{rule}");
    }
    rules
}

fn write(file: &Path, text: &str, mode: u32) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    // Replace atomically: libvirt may run the hook at any time.
    let fresh = file.with_extension("new");
    fs::write(&fresh, text)?;
    fs::set_permissions(&fresh, Permissions::from_mode(mode))?;
    fs::rename(fresh, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installing_is_idempotent() {
        let root = tempfile::tempdir().unwrap();
        let apparmor = root.path().join(APPARMOR);
        fs::create_dir_all(apparmor.parent().unwrap()).unwrap();
        fs::write(apparmor, "").unwrap();
        let local = root.path().join(APPARMOR_LOCAL);
        fs::create_dir_all(local.parent().unwrap()).unwrap();
        fs::write(&local, "/opt/x r,\n").unwrap();
        let args = InstallHook { root: root.path().to_owned(), output: Output::Text };
        let socket = Path::new("/run/vgpud/control.sock");
        let first = install(socket, &args).unwrap();
        assert_eq!(install(socket, &args).unwrap(), first);
        let rules = fs::read_to_string(local).unwrap();
        assert_eq!(
            rules,
            "/opt/x r,\n# vGPUs: vgpuctl libvirt install-hook\n/run/vgpud/vgpus/*/vfio.sock rw,\n\
             /dev/nvidia[0-9]* rw,\n"
        );
        let hook = root.path().join(HOOK);
        assert_eq!(fs::metadata(&hook).unwrap().permissions().mode() & 0o777, 0o755);
        assert!(
            fs::read_to_string(hook)
                .unwrap()
                .ends_with(" --socket /run/vgpud/control.sock libvirt hook \"$@\"\n")
        );
        assert!(!root.path().join("etc/libvirt/hooks/qemu.d/tessera.new").exists());
    }
}
