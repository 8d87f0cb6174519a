//! Shares of programs in their worker's descriptors.
//!
//! Each open file of a program of the host, and each file with its memory, is a descriptor of the
//! worker, and of its anchor. A worker without descriptors would accept neither its manager nor
//! other programs. So programs get a part of the worker's descriptors, and each process of it:
//!
//! * a sure share: three quarters are divided among as many processes as a vGPU has
//! * of the remaining quarter, as much as it leaves to others. One process gets half of the
//!   quarter, the next one half of the rest.
//!
//! Programs of a VM take up no descriptors: their files are numbers, and their memory is the VM's.

use std::collections::BTreeMap;

/// Limit of processes on a vGPU.
const MAX_PROCESSES: usize = 64;

/// Why a process may not have another descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// It has its share.
    Process,
    /// The programs of the vGPU have all descriptors that they may have together.
    All,
}

/// Checks that a process may have another one of `max` descriptors. `holders` are the processes of
/// all descriptors in use.
pub fn check(max: usize, process: i32, holders: impl Iterator<Item = i32>) -> Result<(), Full> {
    let (mut total, mut held) = (0, BTreeMap::<i32, usize>::new());
    for holder in holders {
        total += 1;
        *held.entry(holder).or_default() += 1;
    }
    if total >= max {
        return Err(Full::All);
    }
    let sure = max / 4 * 3 / MAX_PROCESSES;
    let beyond: usize = held.values().map(|held| held.saturating_sub(sure)).sum();
    let left = (max - sure * MAX_PROCESSES).saturating_sub(beyond);
    match held.get(&process).copied().unwrap_or(0).checked_sub(sure) {
        None => Ok(()),
        Some(own) if own < left => Ok(()),
        Some(_) => Err(Full::Process),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 4032;
    const SURE: usize = 47;

    /// Takes descriptors for a process until it gets no more. Returns their number.
    fn take_all(process: i32, held: &mut Vec<i32>) -> usize {
        let before = held.len();
        while check(MAX, process, held.iter().copied()).is_ok() {
            held.push(process);
        }
        held.len() - before
    }

    #[test]
    fn whatever_others_take_a_process_has_its_sure_share() {
        let mut held = Vec::new();
        assert_eq!(take_all(1, &mut held), SURE + 512);
        assert_eq!(take_all(2, &mut held), SURE + 256);
        for process in 3..=64 {
            assert!(take_all(process, &mut held) >= SURE, "{process}");
        }
        assert!(held.len() <= MAX);
        assert!(check(MAX, 1, held.iter().copied()).is_err(), "it has more than its share");
        // What one gives back, it and others can have.
        held.retain(|process| *process != 1);
        assert!(take_all(70, &mut held) > SURE);
    }

    #[test]
    fn all_processes_together_stay_below_the_limit() {
        let mut held = Vec::new();
        let taken: usize = (0..200).map(|process| take_all(process, &mut held)).sum();
        assert_eq!((taken, held.len()), (MAX, MAX));
        assert_eq!(check(MAX, 1000, held.iter().copied()), Err(Full::All));
        assert_eq!(check(0, 1, [].into_iter()), Err(Full::All));
    }
}
