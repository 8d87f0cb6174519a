//! Users of workers: each running worker has a user ID that no other process has.
//!
//! The kernel accounts much by user: descriptors in flight, processes, and who may signal, limit or
//! reschedule another process. Workers of one user could starve and slow one another.
//!
//! Which user IDs are taken is read from the running processes and recorded nowhere. Adopted
//! workers, workers of another manager and workers that continue without one are found alike.

use std::cell::Cell;
use std::fs;
use std::io;

use mdev_core::untrusted::{TABLE, read_text};
use vgpud_host::uid_range::UidRange;
use vgpud_host::users::Account;

/// Users that workers run as, if the manager is root.
#[derive(Debug)]
pub struct WorkerUsers {
    range: Option<UidRange>,
    /// User of all workers without a range; its group is every worker's.
    shared: Account,
    /// Position in the range where the next search begins. A user ID is not reused at once.
    next: Cell<u32>,
}

impl WorkerUsers {
    /// Creates the users of a range, or the single one `shared`. The first user ID is chosen at
    /// random, because two managers of one host may start workers at the same time.
    pub fn new(range: Option<UidRange>, shared: Account) -> Self {
        let start = getrandom::u32().unwrap_or(0);
        Self { range, shared, next: Cell::new(start) }
    }

    /// Returns true if each worker has a user of its own.
    pub fn are_separate(&self) -> bool {
        self.range.is_some()
    }

    /// Returns a user for a new worker: one that no process of the host has.
    pub fn choose(&self) -> io::Result<Account> {
        let Some(range) = self.range else { return Ok(self.shared) };
        let taken = taken(range)?;
        for offset in 0..range.count() {
            let position = (self.next.get() % range.count() + offset) % range.count();
            let uid = range.first() + position;
            if !taken.contains(&uid) {
                self.next.set(position + 1);
                return Ok(Account { uid, gid: self.shared.gid });
            }
        }
        Err(io::Error::other(format!(
            "All users {range} have processes; give vgpud a longer range by --worker-uids"
        )))
    }
}

/// Returns the user IDs in `range` that processes have.
fn taken(range: UidRange) -> io::Result<Vec<u32>> {
    let mut taken = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit) {
            continue;
        }
        // A process may have ended since. The directory's owner is not the process' user where the
        // process cannot be traced.
        let Ok(status) = read_text(&entry.path().join("status"), TABLE) else { continue };
        taken.extend(user_ids(&status).filter(|uid| range.contains(*uid)));
    }
    Ok(taken)
}

/// Returns the real, effective, saved and filesystem user IDs in a `/proc/PID/status`.
fn user_ids(status: &str) -> impl Iterator<Item = u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    line.split_whitespace().filter_map(|uid| uid.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_ids_are_read_from_the_process_status() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t5\t5\t5\n";
        assert_eq!(user_ids(status).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!(user_ids("").count(), 0);
    }

    #[test]
    fn users_are_chosen_in_turn_and_taken_ones_left_out() {
        let shared = Account { uid: 7, gid: 8 };
        assert_eq!(WorkerUsers::new(None, shared).choose().unwrap(), shared);
        let range = "2147000000-2147000002".parse().unwrap();
        let users = WorkerUsers::new(Some(range), shared);
        let mut chosen: Vec<_> = (0..3).map(|_| users.choose().unwrap().uid).collect();
        chosen.sort_unstable();
        assert_eq!(chosen, [2_147_000_000, 2_147_000_001, 2_147_000_002]);
        // This process has the only user of this range.
        let own = Account::own().uid;
        if own != 0 {
            let range = format!("{own}-{own}").parse().unwrap();
            let error = WorkerUsers::new(Some(range), shared).choose().unwrap_err().to_string();
            assert!(error.contains("give vgpud a longer range by --worker-uids"), "{error}");
        }
    }
}
