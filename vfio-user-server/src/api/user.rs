//! Who uses a vGPU, in words that lead an operator to that VM.

use std::fs;
use std::io;
use std::path::Path;

use nix::unistd::{Uid, User};

use crate::private::AttachedClient;

/// Longest name that is repeated.
const MAX_NAME: usize = 64;

/// `process 815 (qemu-system-x86) of user libvirt-qemu, VM "web1"`
pub fn describe(vm: AttachedClient) -> String {
    let AttachedClient { pid, uid } = vm;
    let command = fs::read_to_string(format!("/proc/{pid}/comm"));
    let command = command.map(|name| format!(" ({})", plain(name.trim_end()))).unwrap_or_default();
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    let user = user.map_or_else(|| uid.to_string(), |user| plain(&user.name));
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let name = vm_name(&line).map(|name| format!(", VM \"{}\"", plain(&name))).unwrap_or_default();
    format!("process {pid}{command} of user {user}{name}")
}

/// The name that QEMU was given for its VM; libvirt gives a domain's: `-name guest=web1,debug-threads=on`.
fn vm_name(command_line: &[u8]) -> Option<String> {
    let mut words = command_line.split(|byte| *byte == 0);
    words.find(|word| *word == b"-name" || *word == b"--name")?;
    let value = String::from_utf8_lossy(words.next()?).into_owned();
    let first = value.split(',').next().unwrap_or_default();
    let named = value.split(',').find_map(|part| part.strip_prefix("guest="));
    let name = named.or((!first.contains('=')).then_some(first))?;
    (!name.is_empty()).then(|| name.to_owned())
}

/// What anybody may have chosen, fit for a terminal.
fn plain(name: &str) -> String {
    name.chars().take(MAX_NAME).collect::<String>().escape_debug().to_string()
}

/// Whether somebody is connected to a socket that listens at `path`: what the kernel says where a worker cannot be asked.
pub fn is_connected(path: &Path) -> io::Result<bool> {
    let table = fs::read("/proc/net/unix")?;
    let end = format!(" {}", path.display());
    // Number, references, protocol, flags, type, state (3: connected), inode, and the path that was bound.
    Ok(String::from_utf8_lossy(&table)
        .lines()
        .any(|line| line.ends_with(&end) && line.split_ascii_whitespace().nth(5) == Some("03")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_has_the_name_that_qemu_was_given() {
        let line = |words: &[&str]| words.join("\0").into_bytes();
        for (words, name) in [
            (&["qemu", "-name", "guest=web1,debug-threads=on", "-S"][..], Some("web1")),
            (&["qemu", "-m", "1G", "-name", "web 2"], Some("web 2")),
            (&["qemu", "--name", "debug-threads=on,guest=c"], Some("c")),
            (&["qemu", "-name", "debug-threads=on"], None),
            (&["qemu", "-name"], None),
            (&["qemu"], None),
            (&[], None),
        ] {
            assert_eq!(vm_name(&line(words)).as_deref(), name, "{words:?}");
        }
    }

    #[test]
    fn a_user_of_a_vgpu_is_described_by_process_command_and_user() {
        let pid = std::process::id().cast_signed();
        let text = describe(AttachedClient { pid, uid: 0 });
        assert!(text.starts_with(&format!("process {pid} (")), "{text}");
        assert!(text.ends_with(") of user root"), "{text}");
        let gone = describe(AttachedClient { pid: i32::MAX, uid: 3_999_999_999 });
        assert_eq!(gone, "process 2147483647 of user 3999999999");
        assert_eq!(plain("a\u{1b}[2J\"b"), "a\\u{1b}[2J\\\"b");
    }

    #[test]
    fn the_kernel_says_who_is_connected() {
        let dir = tempfile::Builder::new().prefix("a b").tempdir().unwrap();
        let path = dir.path().join("vfio.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(!is_connected(&path).unwrap());
        let client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let served = listener.accept().unwrap();
        assert!(is_connected(&path).unwrap() && !is_connected(&dir.path().join("sock")).unwrap());
        drop((client, served));
        assert!(!is_connected(&path).unwrap());
    }
}
