//! `libvirt install-hook` and `uninstall-hook`: the hook script and AppArmor rules in /etc.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use host_inventory::SUPPORT;
use integrate::shell::quote;
use mdev_core::untrusted::{TABLE, read_whole};
use serde_json::json;

use crate::cli::Output;
use crate::cli::libvirt::HookRoot;
use crate::failure::Failure;
use crate::mdevctl::pretty;

/// Path of the hook script, in libvirt's directory of domain hooks.
pub const HOOK: &str = "etc/libvirt/hooks/qemu.d/tessera";
/// AppArmor rules for QEMU under libvirt. The file is absent on distributions without AppArmor.
const APPARMOR: &str = "etc/apparmor.d/abstractions/libvirt-qemu";
/// Local additions to these rules.
const APPARMOR_LOCAL: &str = "etc/apparmor.d/local/abstractions/libvirt-qemu";

/// Line before the rules that `install-hook` adds.
const RULES_TITLE: &str = "# vGPUs: vgpuctl libvirt install-hook";
/// End of the rule for the sockets of vGPUs, after the run directory.
const SOCKETS_RULE: &str = "/vgpus/*/vfio.sock rw,";
/// End of the rule for the guard against plain saves, after the run directory.
const GUARD_RULE: &str = "/save-guard.vdi r,";

/// Runs `libvirt install-hook`.
pub fn install(socket: &Path, args: &HookRoot) -> Result<Vec<u8>, Failure> {
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
        let rules = read_rules(&file).map_err(local)?;
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

/// Returns the local rules of AppArmor; none if the file is missing. A file that cannot be read as
/// a whole must not be replaced.
fn read_rules(file: &Path) -> io::Result<String> {
    match read_whole(file, TABLE) {
        Ok(bytes) => String::from_utf8(bytes).map_err(io::Error::other),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

/// Runs `libvirt uninstall-hook`. Succeeds if there is nothing to remove.
pub fn uninstall(args: &HookRoot) -> Result<Vec<u8>, Failure> {
    let local = |error: io::Error| {
        let root = args.root.display();
        Failure::Local(format!(
            "Cannot remove the hook from {root}: {error}; run this as root, or name another --root"
        ))
    };
    let hook = args.root.join(HOOK);
    let hook = removed(fs::remove_file(&hook)).map_err(local)?.then_some(hook);
    let file = args.root.join(APPARMOR_LOCAL);
    let rules = read_rules(&file).map_err(local)?;
    let rest = without_rules(&rules);
    let apparmor = (rest != rules).then_some(file);
    match &apparmor {
        Some(file) if rest.is_empty() => drop(removed(fs::remove_file(file)).map_err(local)?),
        Some(file) => write(file, &rest, 0o644).map_err(local)?,
        None => {}
    }
    if args.output == Output::Json {
        return pretty(&json!({ "hook": hook, "apparmor": apparmor }));
    }
    let mut text = String::new();
    if let Some(hook) = &hook {
        let _ = writeln!(text, "Removed {}", hook.display());
    }
    if let Some(file) = &apparmor {
        let _ = writeln!(text, "Removed AppArmor rules for vGPU sockets from {}", file.display());
    }
    if text.is_empty() {
        text.push_str("The hook is not installed; nothing was changed\n");
    }
    Ok(text.into_bytes())
}

/// Returns false if a file that was to be removed did not exist.
fn removed(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns AppArmor's rules without those of [`apparmor_rules`], for any run directory.
fn without_rules(rules: &str) -> String {
    let mut rest = String::new();
    let mut own = false;
    for line in rules.split_inclusive('\n') {
        let rule = line.trim_end();
        own = rule == RULES_TITLE
            || own
                && (rule.ends_with(SOCKETS_RULE)
                    || rule.ends_with(GUARD_RULE)
                    || SUPPORT.device_nodes().any(|node| node.apparmor == Some(rule)));
        if !own {
            rest.push_str(line);
        }
    }
    rest
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
    let mut rules = format!("{RULES_TITLE}\n{run_dir}{SOCKETS_RULE}\n{run_dir}{GUARD_RULE}\n");
    for rule in SUPPORT.device_nodes().filter_map(|node| node.apparmor) {
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
        let args = HookRoot { root: root.path().to_owned(), output: Output::Text };
        let socket = Path::new("/run/vgpud/control.sock");
        let first = install(socket, &args).unwrap();
        assert_eq!(install(socket, &args).unwrap(), first);
        let rules = fs::read_to_string(local).unwrap();
        assert_eq!(
            rules,
            "/opt/x r,\n# vGPUs: vgpuctl libvirt install-hook\n/run/vgpud/vgpus/*/vfio.sock rw,\n\
             /run/vgpud/save-guard.vdi r,\n\
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

    /// Returns a root with AppArmor's rules of libvirt and these local additions.
    fn root_with(local: &str) -> (tempfile::TempDir, HookRoot, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            path
        };
        write(APPARMOR, "");
        let file = write(APPARMOR_LOCAL, local);
        let args = HookRoot { root: root.path().to_owned(), output: Output::Text };
        (root, args, file)
    }

    #[test]
    fn uninstalling_removes_what_was_installed_and_nothing_else() {
        let before = "/opt/x r,\n# vGPUs of another tool\n/dev/nvidia[0-9]* rw,\n";
        let (root, args, local) = root_with(before);
        // Rules for two run directories.
        install(Path::new("/run/vgpud/control.sock"), &args).unwrap();
        install(Path::new("/srv/other/control.sock"), &args).unwrap();
        let installed = fs::read_to_string(&local).unwrap();
        assert_eq!(installed.matches(SOCKETS_RULE).count(), 2, "{installed}");
        fs::write(&local, format!("{installed}/opt/y r,\n")).unwrap();
        let said = String::from_utf8(uninstall(&args).unwrap()).unwrap();
        assert_eq!(said.matches("Removed ").count(), 2, "{said}");
        assert_eq!(fs::read_to_string(&local).unwrap(), format!("{before}/opt/y r,\n"));
        assert!(!root.path().join(HOOK).exists());
        let said = uninstall(&args).unwrap();
        assert_eq!(said, b"The hook is not installed; nothing was changed\n");
    }

    #[test]
    fn a_file_that_only_had_the_rules_is_removed() {
        let (_root, args, local) = root_with("");
        install(Path::new("/run/vgpud/control.sock"), &args).unwrap();
        assert!(local.exists());
        uninstall(&args).unwrap();
        assert!(!local.exists());
    }
}
