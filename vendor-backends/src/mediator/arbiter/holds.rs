//! Contexts that hold the arbiter in their pages of turns.
//!
//! A context has a descriptor of its page, and can punch a hole into it: an access to the page
//! sleeps until the hole is made. No context of this build does so. One that does it again and
//! again has been taken over, and its page is not touched any more.

use std::cell::Cell;

use crate::mediator::emulation::clock::{now_ns, thread_sleeps};

/// Accesses below this time are not looked into.
const SHORT_NS: u64 = 10_000;
/// Time without a sleep after which earlier ones are forgotten. The kernel itself makes an access
/// sleep when it reads the page back from swap, or moves it.
const FORGOTTEN_NS: u64 = 10_000_000_000;
/// Sleeps after which the page is not touched any more.
const MAX_SLEEPS: u32 = 10;
/// Time of sleep after which the page is not touched any more.
const MAX_SLEEP_NS: u64 = 500_000_000;

/// Sleeps in one page.
#[derive(Clone, Copy, Debug, Default)]
struct Sleeps {
    count: u32,
    total_ns: u64,
    last_ns: u64,
}

impl Sleeps {
    /// Adds a sleep that ends now.
    fn add(&mut self, slept_ns: u64, now_ns: u64) {
        if now_ns.saturating_sub(self.last_ns) >= FORGOTTEN_NS {
            *self = Self::default();
        }
        self.count += 1;
        self.total_ns = self.total_ns.saturating_add(slept_ns);
        self.last_ns = now_ns;
    }

    fn are_too_many(&self) -> bool {
        self.count >= MAX_SLEEPS || self.total_ns >= MAX_SLEEP_NS
    }
}

/// What the arbiter knows of the sleeps in the page of one context.
#[derive(Debug, Default)]
pub struct Holds {
    sleeps: Cell<Sleeps>,
    is_cut_off: Cell<bool>,
}

impl Holds {
    /// Returns whether the page is not to be touched any more.
    pub fn is_cut_off(&self) -> bool {
        self.is_cut_off.get()
    }

    /// Accesses the page, unless it is cut off. Returns `None` then, and for the access after which
    /// it is.
    pub fn access<T>(&self, access: impl FnOnce() -> T) -> Option<T> {
        if self.is_cut_off() {
            return None;
        }
        let (begun_ns, sleeps_before) = (now_ns(), thread_sleeps());
        let result = access();
        let now_ns = now_ns();
        let took_ns = now_ns.saturating_sub(begun_ns);
        if took_ns >= SHORT_NS && thread_sleeps() != sleeps_before {
            let mut sleeps = self.sleeps.get();
            sleeps.add(took_ns, now_ns);
            self.sleeps.set(sleeps);
            self.is_cut_off.set(sleeps.are_too_many());
        }
        (!self.is_cut_off()).then_some(result)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_page_in_which_the_arbiter_sleeps_again_and_again_is_cut_off() {
        let holds = Holds::default();
        let sleep = || thread::sleep(Duration::from_millis(1));
        for _ in 1..MAX_SLEEPS {
            assert!(holds.access(sleep).is_some());
        }
        assert!(holds.access(|| ()).is_some(), "an access without a sleep");
        assert!(holds.access(sleep).is_none() && holds.is_cut_off());
        assert!(holds.access(|| unreachable!("the page is touched")).is_none());
    }

    #[test]
    fn rare_sleeps_are_forgotten_and_long_ones_are_not() {
        let mut sleeps = Sleeps::default();
        for number in 0..1000 {
            sleeps.add(20_000_000, number * FORGOTTEN_NS);
            assert!(!sleeps.are_too_many());
        }
        sleeps.add(MAX_SLEEP_NS, 1000 * FORGOTTEN_NS - 1);
        assert!(sleeps.are_too_many());
    }
}
