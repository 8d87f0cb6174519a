//! Users and groups of this host, from `/etc/passwd` and `/etc/group`.
//!
//! The C library's lookups load modules, can block on a directory server and cannot be linked
//! statically. Users and groups that are in neither file are given by number.

use std::io;
use std::path::Path;

use mdev_core::definition::Owner;
use mdev_core::untrusted::read_text;

/// Limit of each file, in bytes: some hosts have a hundred thousand users.
const MAX_BYTES: usize = 64 << 20;

/// User ID and group ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
}

impl Account {
    /// The unprivileged user `nobody` of most systems.
    pub const NOBODY: Self = Self { uid: 65_534, gid: 65_534 };

    /// Returns the effective user and group of this process.
    pub fn own() -> Self {
        Self { uid: nix::unistd::geteuid().as_raw(), gid: nix::unistd::getegid().as_raw() }
    }
}

/// Contents of both files, and of `/etc/subuid`.
#[derive(Clone, Debug, Default)]
pub struct Users {
    passwd: String,
    group: String,
    subuid: String,
}

impl Users {
    /// Reads the files of this host.
    pub fn read() -> Self {
        Self::in_root(Path::new("/"))
    }

    /// Reads the files below `root`. A file that cannot be read counts as empty.
    pub fn in_root(root: &Path) -> Self {
        let read = |name: &str| {
            read_text(&root.join("etc").join(name), MAX_BYTES).unwrap_or_else(|error| {
                if error.kind() != io::ErrorKind::NotFound {
                    log::warn!("Cannot read /etc/{name}: {error}");
                }
                String::new()
            })
        };
        Self { passwd: read("passwd"), group: read("group"), subuid: read("subuid") }
    }

    /// Returns a user by name or number. The group is the user's group in the file, or has the same
    /// number as the user.
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

    /// Returns a group by name or number.
    pub fn group(&self, name: &str) -> Option<u32> {
        let named = self.group.lines().find_map(|line| {
            let mut fields = line.split(':');
            (fields.next() == Some(name)).then(|| fields.nth(1).and_then(number))?
        });
        named.or_else(|| number(name))
    }

    /// Returns a user's name, if the file contains it.
    pub fn name(&self, uid: u32) -> Option<&str> {
        name_of(&self.passwd, uid)
    }

    /// Returns a group's name, if the file contains it.
    pub fn group_name(&self, gid: u32) -> Option<&str> {
        name_of(&self.group, gid)
    }

    /// Returns the name of a user who has a user ID from `first` to `last`, in person or for
    /// containers.
    pub fn in_range(&self, first: u32, last: u32) -> Option<&str> {
        let user = |line: &'_ str| {
            let uid = line.split(':').nth(2).and_then(number)?;
            Some((uid, uid))
        };
        let containers = |line: &'_ str| {
            let mut fields = line.split(':').skip(1).map(number);
            let (begin, count) = (fields.next()??, fields.next()??);
            Some((begin, begin.saturating_add(count.checked_sub(1)?)))
        };
        let users = self.passwd.lines().map(|line| (line, user(line)));
        let all = users.chain(self.subuid.lines().map(|line| (line, containers(line))));
        let mut taken = all.filter_map(|(line, ids)| {
            let (begin, end) = ids?;
            (begin <= last && first <= end).then_some(line)
        });
        taken.next().and_then(|line| line.split(':').next())
    }

    /// Returns the account of an owner. The error names the missing user or group, and the remedy.
    pub fn owner(&self, owner: &Owner) -> Result<Account, String> {
        let missing = |kind: &str, name: &str| {
            format!("There is no {kind} {name:?} on this host; create it, or give its number")
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

/// Returns the name of a user or group in its file, by number.
fn name_of(file: &str, id: u32) -> Option<&str> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1).and_then(number) == Some(id)).then_some(name)
    })
}

/// Parses a user ID or group ID. The largest number means "none" to the kernel and is invalid.
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
            subuid: "alice:100000:65536\nbroken:1\nempty:7:0\n".into(),
        }
    }

    #[test]
    fn users_and_groups_are_found_by_name_and_number() {
        let users = users();
        let qemu = Account { uid: 64_055, gid: 994 };
        assert_eq!(users.user("libvirt-qemu"), Some(qemu));
        assert_eq!(users.user("64055"), Some(qemu), "a number has its group from the file");
        assert_eq!(users.user("1234"), Some(Account { uid: 1234, gid: 1234 }));
        assert_eq!(users.user("missing"), None);
        assert_eq!((users.group("kvm"), users.group("7")), (Some(993), Some(7)));
        assert_eq!((users.group("x"), users.group("-1")), (None, None));
        assert_eq!((users.name(64_055), users.name(1)), (Some("libvirt-qemu"), None));
        assert_eq!((users.group_name(990), users.group_name(1)), (Some("vgpu"), None));
        let owner = |text: &str| users.owner(&text.parse().unwrap());
        assert_eq!(owner("libvirt-qemu:kvm"), Ok(Account { uid: 64_055, gid: 993 }));
        assert!(owner("root:nogroup").unwrap_err().contains("no group \"nogroup\""));
        assert!(owner("4294967295").unwrap_err().contains("no user"));
    }

    #[test]
    fn taken_user_ids_are_found() {
        let users = users();
        assert_eq!(users.in_range(64_000, 64_055), Some("libvirt-qemu"));
        assert_eq!(users.in_range(165_535, 200_000), Some("alice"));
        assert_eq!(users.in_range(165_536, 200_000), None);
        assert_eq!(users.in_range(6, 99_999), Some("libvirt-qemu"));
        assert_eq!(users.in_range(6, 64_054), None);
    }

    #[test]
    fn hosts_without_files_have_numbers_only() {
        let dir = tempfile::tempdir().unwrap();
        let users = Users::in_root(dir.path());
        assert_eq!(users.user("root"), None);
        assert_eq!(users.group("0"), Some(0));
    }
}
