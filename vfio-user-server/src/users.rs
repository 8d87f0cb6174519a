//! Users and groups of this host: `/etc/passwd` and `/etc/group`, read as files.
//!
//! Not by the C library, whose lookups load modules, may wait for a directory server and cannot be linked statically.
//! Who is in neither file is named by number.

use std::fs;
use std::io;
use std::path::Path;

use mdev_core::definition::Owner;

/// A user and a group, as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl Account {
    /// The user that owns nothing, on most systems.
    pub const NOBODY: Self = Self { uid: 65_534, gid: 65_534 };

    /// Whom this process runs as.
    pub fn own() -> Self {
        Self { uid: nix::unistd::geteuid().as_raw(), gid: nix::unistd::getegid().as_raw() }
    }
}

/// Both files, as they were when read.
#[derive(Clone, Debug, Default)]
pub struct Users {
    passwd: String,
    group: String,
}

impl Users {
    /// Those of this host.
    pub fn read() -> Self {
        Self::in_root(Path::new("/"))
    }

    /// Those of the host whose files are below `root`. A file that cannot be read has nobody in it.
    pub fn in_root(root: &Path) -> Self {
        let read = |name: &str| {
            let bytes = match fs::read(root.join("etc").join(name)) {
                Ok(bytes) => bytes,
                Err(error) => {
                    if error.kind() != io::ErrorKind::NotFound {
                        log::warn!("Cannot read /etc/{name}: {error}");
                    }
                    Vec::new()
                }
            };
            String::from_utf8_lossy(&bytes).into_owned()
        };
        Self { passwd: read("passwd"), group: read("group") }
    }

    /// A user by name or number; the group is the one that the file gives it, or has its number.
    pub fn user(&self, name: &str) -> Option<Account> {
        let number = number(name);
        for line in self.passwd.lines() {
            let mut fields = line.split(':');
            let (Some(user), Some(uid), Some(gid)) =
                (fields.next(), fields.nth(1).and_then(self::number), fields.next())
            else {
                continue;
            };
            if let Some(gid) = self::number(gid)
                && (user == name || number == Some(uid))
            {
                return Some(Account { uid, gid });
            }
        }
        number.map(|uid| Account { uid, gid: uid })
    }

    /// A group by name or number.
    pub fn group(&self, name: &str) -> Option<u32> {
        let named = self.group.lines().find_map(|line| {
            let mut fields = line.split(':');
            (fields.next() == Some(name)).then(|| fields.nth(1).and_then(number))?
        });
        named.or_else(|| number(name))
    }

    /// A user's name, where the file has it.
    pub fn name(&self, uid: u32) -> Option<&str> {
        self.passwd.lines().find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            (fields.nth(1).and_then(number) == Some(uid)).then_some(name)
        })
    }

    /// Who is meant, or what to do about there being no such user or group.
    pub fn owner(&self, owner: &Owner) -> Result<Account, String> {
        let missing = |what: &str, name: &str| {
            format!("There is no {what} {name:?} in this host's files; make it, or give its number")
        };
        let account = self.user(&owner.user).ok_or_else(|| missing("user", &owner.user))?;
        match &owner.group {
            None => Ok(account),
            Some(name) => {
                let gid = self.group(name).ok_or_else(|| missing("group", name))?;
                Ok(Account { gid, ..account })
            }
        }
    }
}

/// A number of a user or group. The last one means "none" to the kernel.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| digits && *number != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        Users {
            passwd: "root:x:0:0:root:/root:/bin/sh\nbroken\n:x:5\nlibvirt-qemu:x:64055:994::/:/x\n"
                .into(),
            group: "root:x:0:\nkvm:x:993:a,b\nvgpu:x:990:\n".into(),
        }
    }

    #[test]
    fn names_and_numbers_are_looked_up() {
        let users = users();
        let qemu = Account { uid: 64_055, gid: 994 };
        assert_eq!(users.user("libvirt-qemu"), Some(qemu));
        assert_eq!(users.user("64055"), Some(qemu), "a number has the group that the file says");
        assert_eq!(users.user("1234"), Some(Account { uid: 1234, gid: 1234 }));
        assert_eq!(users.user("nobody-here"), None);
        assert_eq!((users.group("kvm"), users.group("7")), (Some(993), Some(7)));
        assert_eq!((users.group("x"), users.group("-1")), (None, None));
        assert_eq!((users.name(64_055), users.name(1)), (Some("libvirt-qemu"), None));
        let owner = |text: &str| users.owner(&text.parse().unwrap());
        assert_eq!(owner("libvirt-qemu:kvm"), Ok(Account { uid: 64_055, gid: 993 }));
        assert!(owner("root:nogroup").unwrap_err().contains("no group \"nogroup\""));
        assert!(owner("4294967295").unwrap_err().contains("no user"));
    }

    #[test]
    fn hosts_without_files_know_numbers_only() {
        let dir = tempfile::tempdir().unwrap();
        let users = Users::in_root(dir.path());
        assert_eq!(users.user("root"), None);
        assert_eq!(users.group("0"), Some(0));
    }
}
