//! A map that notes which entries change, so that only these are recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

/// Map that notes the keys of entries that may have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeMap<K, V> {
    entries: BTreeMap<K, V>,
    changed: BTreeSet<K>,
}

/// An entry that has changed: its value, or none if it was removed.
pub type Changed<K, V> = (K, Option<V>);

/// Follows changes of a map.
pub fn apply<K: Ord, V>(entries: &mut BTreeMap<K, V>, changes: Vec<Changed<K, V>>) {
    for (key, value) in changes {
        match value {
            Some(value) => drop(entries.insert(key, value)),
            None => drop(entries.remove(&key)),
        }
    }
}

impl<K, V> Default for ChangeMap<K, V> {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), changed: BTreeSet::new() }
    }
}

impl<K: Ord + Copy, V> ChangeMap<K, V> {
    /// Returns a map with these entries, none of which has changed.
    pub fn unchanged(entries: BTreeMap<K, V>) -> Self {
        Self { entries, changed: BTreeSet::new() }
    }

    /// Adds an entry, and returns the one before.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.changed.insert(key);
        self.entries.insert(key, value)
    }

    /// Removes an entry.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let removed = self.entries.remove(key);
        if removed.is_some() {
            self.changed.insert(*key);
        }
        removed
    }

    /// Returns an entry for a change.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let found = self.entries.get_mut(key);
        if found.is_some() {
            self.changed.insert(*key);
        }
        found
    }

    /// Returns an entry for a change that is not noted, such as of what other entries determine.
    pub fn get_mut_unnoted(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key)
    }

    /// Returns all entries for changes that are not noted.
    pub fn iter_mut_unnoted(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.entries.iter_mut()
    }

    /// Returns whether an entry may have changed.
    pub fn is_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Returns the entries that may have changed since the last call, as `record` describes them.
    pub fn take_changes<R>(&mut self, record: impl Fn(&V) -> R) -> Vec<Changed<K, R>> {
        let changed = std::mem::take(&mut self.changed);
        changed.into_iter().map(|key| (key, self.entries.get(&key).map(&record))).collect()
    }

    /// Returns all entries, as `record` describes them.
    pub fn all<R>(&self, record: impl Fn(&V) -> R) -> Vec<Changed<K, R>> {
        self.entries.iter().map(|(key, value)| (*key, Some(record(value)))).collect()
    }
}

impl<K, V> Deref for ChangeMap<K, V> {
    type Target = BTreeMap<K, V>;

    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The changes make of an earlier map the present one, whatever was done.
        #[test]
        fn changes_lead_from_one_state_to_the_next(
            steps in proptest::collection::vec((0_u8..6, 0_u32..9, any::<u16>()), 0..60),
        ) {
            let (mut map, mut copy) = (ChangeMap::default(), BTreeMap::new());
            for (what, key, value) in steps {
                match what {
                    0 | 1 => {
                        map.insert(key, value);
                    }
                    2 => {
                        map.remove(&key);
                    }
                    3 => map.get_mut(&key).into_iter().for_each(|it| *it = value),
                    _ => {
                        for (key, value) in map.take_changes(|value| *value) {
                            match value {
                                Some(value) => copy.insert(key, value),
                                None => copy.remove(&key),
                            };
                        }
                        prop_assert_eq!(&copy, &*map);
                        prop_assert!(!map.is_changed());
                    }
                }
            }
            let all = map.all(|value| *value);
            let all: BTreeMap<_, _> = all.into_iter().map(|(key, it)| (key, it.unwrap())).collect();
            prop_assert_eq!(&all, &*map);
        }
    }
}
