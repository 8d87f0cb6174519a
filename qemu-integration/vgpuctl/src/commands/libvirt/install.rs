//! `install-hook`: what has to be in /etc so that libvirt knows of vGPUs.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use integrate::shell::quote;
use serde_json::json;

use crate::cli::Output;
use crate::cli::libvirt::InstallHook;
use crate::failure::Failure;
use crate::mdevctl::pretty;

/// Where libvirt looks for hooks of domains.
pub const HOOK: &str = "etc/libvirt/hooks/qemu.d/tessera";
/// What AppArmor lets QEMU do under libvirt, where the distribution has such a profile,
const APPARMOR: &str = "etc/apparmor.d/abstractions/libvirt-qemu";
/// and where a host's own rules go.
const LOCAL: &str = "etc/apparmor.d/local/abstractions/libvirt-qemu";

/// `libvirt install-hook`
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
        let file = args.root.join(LOCAL);
        let rule = rule(socket);
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
        let _ = writeln!(text, "Allowed QEMU its vGPU's socket in {}", file.display());
    }
    text.push_str(
        "Restart libvirt once, so that it finds the hook: systemctl restart libvirtd (VMs go on)\n",
    );
    Ok(text.into_bytes())
}

/// The hook. A domain must not depend on it once our program is gone.
fn script(program: &Path, socket: &Path) -> String {
    let (program, socket) = (quote(&program.to_string_lossy()), quote(&socket.to_string_lossy()));
    format!(
        "#!/bin/sh\n\
         # Starts a domain's vGPUs before it, and stops them after it: vgpuctl libvirt install-hook.\n\
         test -x {program} || exit 0\n\
         exec {program} --socket {socket} libvirt hook \"$@\"\n"
    )
}

/// AppArmor's rules: for the sockets of vGPUs, which are beside the control socket, and for what comes through them where
/// it has a path. A real GPU's doorbells are mapped from its device file, which QEMU is handed; it cannot open one, since
/// libvirt gives it a /dev of its own.
fn rule(socket: &Path) -> String {
    let run_dir = socket.parent().unwrap_or(Path::new("/run/vgpud")).display();
    format!(
        "# vGPUs: vgpuctl libvirt install-hook\n{run_dir}/vgpus/*/vfio.sock rw,\n/dev/nvidia[0-9]* rw,\n"
    )
}

fn write(file: &Path, text: &str, mode: u32) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    // In one step: libvirt may run it at any time.
    let fresh = file.with_extension("new");
    fs::write(&fresh, text)?;
    fs::set_permissions(&fresh, Permissions::from_mode(mode))?;
    fs::rename(fresh, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installing_twice_is_installing_once() {
        let root = tempfile::tempdir().unwrap();
        let apparmor = root.path().join(APPARMOR);
        fs::create_dir_all(apparmor.parent().unwrap()).unwrap();
        fs::write(apparmor, "").unwrap();
        let local = root.path().join(LOCAL);
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
