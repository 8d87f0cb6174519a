//! Who uses a vGPU, in words that lead an operator to that VM.

use std::fs;

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
}
