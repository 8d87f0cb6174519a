//! Limits of open connections: in total, for each user or session, and for all users without
//! privilege.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections in total.
    pub total: usize,
    /// Connections without privilege. The remainder is for those with privilege.
    pub ordinary: usize,
    /// Connections without privilege of one user, and connections of one session.
    pub per_user: usize,
}

/// Connections of a listener, by age.
#[derive(Debug)]
pub struct Slots {
    limits: Limits,
    open: Mutex<Vec<Entry>>,
}

/// Open connection.
#[derive(Debug)]
struct Entry {
    /// User, or session.
    user: Option<u32>,
    privileged: Arc<AtomicBool>,
    closed: Arc<Notify>,
}

impl Entry {
    fn is_ordinary(&self) -> bool {
        !self.privileged.load(Ordering::Relaxed)
    }
}

/// Place of a connection. Dropping it frees the place.
#[derive(Debug)]
pub struct Slot {
    slots: Arc<Slots>,
    privileged: Arc<AtomicBool>,
    closed: Arc<Notify>,
}

impl Slots {
    /// Creates the places of a listener.
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, open: Mutex::default() })
    }

    fn open(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a place for a new connection, or `None` if there is none for its user. A full
    /// listener closes its oldest connection without privilege.
    pub fn admit(self: &Arc<Self>, user: Option<u32>, privileged: bool) -> Option<Slot> {
        let mut open = self.open();
        if !privileged {
            let ordinary = || open.iter().filter(|entry| entry.is_ordinary());
            let own = ordinary().filter(|entry| entry.user == user).count();
            if user.is_some() && own >= self.limits.per_user {
                return None;
            }
            if ordinary().count() >= self.limits.ordinary {
                close_oldest(&mut open);
            }
        }
        if open.len() >= self.limits.total && !close_oldest(&mut open) {
            return None;
        }
        let privileged = Arc::new(AtomicBool::new(privileged));
        let closed = Arc::<Notify>::default();
        let entry =
            Entry { user, privileged: Arc::clone(&privileged), closed: Arc::clone(&closed) };
        open.push(entry);
        Some(Slot { slots: Arc::clone(self), privileged, closed })
    }
}

/// Closes the oldest connection without privilege. Returns false if there is none.
fn close_oldest(open: &mut Vec<Entry>) -> bool {
    let Some(index) = open.iter().position(Entry::is_ordinary) else { return false };
    open.remove(index).closed.notify_one();
    true
}

impl Slot {
    /// Gives the connection to a session: it is not closed for another. Returns false if the
    /// session has too many connections.
    pub fn give_to_session(&self, session: u32) -> bool {
        let mut open = self.slots.open();
        let own = |entry: &&mut Entry| Arc::ptr_eq(&entry.closed, &self.closed);
        let others = open.iter().filter(|entry| {
            entry.user == Some(session) && !Arc::ptr_eq(&entry.closed, &self.closed)
        });
        if others.count() >= self.slots.limits.per_user {
            return false;
        }
        if let Some(entry) = open.iter_mut().find(own) {
            entry.user = Some(session);
        }
        self.privileged.store(true, Ordering::Relaxed);
        true
    }

    /// Returns whether the client has a privilege: it is an administrator, or has a session.
    pub fn is_privileged(&self) -> bool {
        self.privileged.load(Ordering::Relaxed)
    }

    /// Returns once the connection is to be closed for another.
    pub async fn closed(&self) {
        self.closed.notified().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.open().retain(|entry| !Arc::ptr_eq(&entry.closed, &self.closed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots() -> Arc<Slots> {
        Slots::new(Limits { total: 6, ordinary: 4, per_user: 2 })
    }

    #[test]
    fn user_without_privilege_has_a_limit_and_leaves_room_for_administrators() {
        let slots = slots();
        let first = slots.admit(Some(7), false).unwrap();
        let second = slots.admit(Some(7), false).unwrap();
        assert!(slots.admit(Some(7), false).is_none());
        let others: Vec<_> = (8..40).filter_map(|user| slots.admit(Some(user), false)).collect();
        assert_eq!(slots.open().len(), 4, "the oldest were closed");
        let admins: Vec<_> = (0..6).filter_map(|_| slots.admit(Some(0), true)).collect();
        assert_eq!(admins.len(), 6, "administrators take the places of others");
        assert!(slots.admit(Some(0), true).is_none() && slots.admit(Some(9), false).is_none());
        drop((first, second, others));
        assert_eq!(slots.open().len(), 6);
        drop(admins);
        assert!(slots.open().is_empty());
    }

    #[test]
    fn session_has_a_limit_and_leaves_room_for_others() {
        let slots = slots();
        let open: Vec<_> = (0..4).filter_map(|_| slots.admit(None, false)).collect();
        assert!(open[0].give_to_session(1) && open[1].give_to_session(1));
        assert!(open[0].give_to_session(1), "a second request on the same connection");
        assert!(!open[2].give_to_session(1) && open[2].give_to_session(2));
        drop(open);
        assert!(slots.admit(None, false).unwrap().give_to_session(1));
    }

    #[test]
    fn oldest_connection_of_unknown_users_is_closed_unless_it_has_a_session() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let slots = slots();
        let open: Vec<_> = (0..4).filter_map(|_| slots.admit(None, false)).collect();
        assert!(open[0].give_to_session(1));
        let more: Vec<_> = (0..2).filter_map(|_| slots.admit(None, false)).collect();
        assert_eq!((open.len(), more.len()), (4, 2));
        runtime.block_on(open[1].closed());
        let closed = |slot: &Slot| {
            !slots.open().iter().any(|entry| Arc::ptr_eq(&entry.closed, &slot.closed))
        };
        assert!(!closed(&open[0]) && closed(&open[1]) && !closed(&more[0]) && !closed(&more[1]));
    }
}
