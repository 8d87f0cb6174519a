//! Range of user IDs that are given to processes, one for each.

use std::fmt;
use std::str::FromStr;

use crate::users::Users;

/// Range of user IDs that belong to no account of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UidRange {
    first: u32,
    last: u32,
}

impl UidRange {
    /// Default range of workers. systemd's list of user IDs leaves 1879048192 to 2147352575 unused;
    /// directory services (SSSD, FreeIPA) assign up to 2000200000 by default, and Podman's
    /// automatic user namespaces begin at 2147483647.
    pub const WORKERS: Self = Self { first: 2_100_000_000, last: 2_100_004_095 };

    /// Returns the first user ID.
    pub fn first(self) -> u32 {
        self.first
    }

    /// Returns the number of user IDs.
    pub fn count(self) -> u32 {
        self.last - self.first + 1
    }

    /// Returns true if the range contains a user ID.
    pub fn contains(self, uid: u32) -> bool {
        (self.first..=self.last).contains(&uid)
    }

    /// Refuses a range that contains an account of this host, or a user ID that a user may give to
    /// the containers that it starts.
    pub fn check(self, users: &Users) -> Result<(), String> {
        if let Some(name) = users.in_range(self.first, self.last) {
            return Err(format!(
                "User IDs {self} contain those of {name}; name other user IDs, which no user has"
            ));
        }
        Ok(())
    }

    /// Returns true if all IDs exist in the user namespace with this `/proc/self/uid_map`.
    pub fn is_mapped(self, uid_map: &str) -> bool {
        uid_map.lines().any(|line| {
            let mut fields = line.split_whitespace();
            let first = fields.next().and_then(|field| field.parse::<u64>().ok());
            let count = fields.nth(1).and_then(|field| field.parse::<u64>().ok());
            let (Some(first), Some(count)) = (first, count) else { return false };
            first <= u64::from(self.first) && u64::from(self.last) < first + count
        })
    }
}

impl fmt::Display for UidRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl FromStr for UidRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<u32>().ok().filter(|uid| *uid != u32::MAX);
        let range = text.split_once('-').and_then(|(first, last)| {
            let (first, last) = (number(first)?, number(last)?);
            (0 < first && first <= last).then_some(Self { first, last })
        });
        range.ok_or_else(|| {
            format!(
                "{text:?} is no range of user IDs without root's; say FIRST-LAST, as in {}",
                Self::WORKERS
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_parsed_and_shown() {
        let range: UidRange = "100-199".parse().unwrap();
        assert_eq!((range.first(), range.count(), range.to_string()), (100, 100, "100-199".into()));
        assert!(range.contains(199) && !range.contains(200));
        for wrong in ["", "5", "0-9", "9-5", "a-b", "1-4294967295", "-1-5"] {
            assert!(wrong.parse::<UidRange>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_range_must_exist_in_the_user_namespace() {
        assert!(UidRange::WORKERS.is_mapped("         0          0 4294967295\n"));
        assert!(!UidRange::WORKERS.is_mapped("0 100000 65536\n"));
        assert!(!UidRange::WORKERS.is_mapped("unexpected"));
    }
}
