//! Unix user and group of a vGPU, by name or number.

use std::fmt;
use std::str::FromStr;

/// Maximum length of a name.
const MAX_NAME: usize = 256;

/// `USER` or `USER:GROUP`. The manager resolves the names on the host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Name or number of the user.
    pub user: String,
    /// Name or number of the group; the user's group if absent.
    pub group: Option<String>,
}

impl Owner {
    /// Format for help texts.
    pub const VALUES: &str = "USER or USER:GROUP, by name or number";
}

/// Error of a text that is not an [`Owner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("give {}, as in libvirt-qemu or 64055:64055", Owner::VALUES)]
pub struct OwnerError;

impl FromStr for Owner {
    type Err = OwnerError;

    fn from_str(text: &str) -> Result<Self, OwnerError> {
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text, None),
        };
        // Names cannot contain the separators of /etc/passwd and /etc/group.
        let is_valid = |name: &str| {
            !name.is_empty()
                && name.len() <= MAX_NAME
                && !name.contains(|c: char| c == ':' || c.is_control() || c.is_whitespace())
        };
        if !is_valid(user) || group.is_some_and(|group| !is_valid(group)) {
            return Err(OwnerError);
        }
        Ok(Self { user: user.to_owned(), group: group.map(str::to_owned) })
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.group {
            Some(group) => write!(f, "{}:{group}", self.user),
            None => f.write_str(&self.user),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn owners_are_users_with_or_without_a_group() {
        let owner: Owner = "libvirt-qemu:kvm".parse().unwrap();
        assert_eq!((owner.user.as_str(), owner.group.as_deref()), ("libvirt-qemu", Some("kvm")));
        assert_eq!("64055".parse::<Owner>().unwrap().group, None);
        for text in ["", ":", "a:", ":a", "a:b:c", "a b", "a\n", "a\0"] {
            assert_eq!(text.parse::<Owner>(), Err(OwnerError), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn a_written_owner_is_read_back(text in "\\PC{0,40}") {
            if let Ok(owner) = text.parse::<Owner>() {
                prop_assert_eq!(owner.to_string(), text);
            }
        }
    }
}
