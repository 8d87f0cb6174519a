//! Pace of clients without privilege: they have a part of a CPU.
//!
//! What counts is the CPU time of the thread that serves a connection. It does not matter whether a
//! client sends many requests, dear ones, several at once, or opens many connections.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, ready};
use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::cpu_budget::{Budget, Limit, thread_cpu_time};

/// Limit of one user.
const USER: Limit = Limit { percent: 20, reserve: Duration::from_millis(500) };

/// Limit of all users of a listener together.
const ALL: Limit = Limit { percent: 40, reserve: Duration::from_secs(1) };

/// Budget of several connections.
type Shared = Arc<Mutex<Budget>>;

/// Budgets of a listener's clients without privilege.
#[derive(Debug)]
pub struct Budgets {
    all: Shared,
    users: Mutex<HashMap<u32, Shared>>,
}

impl Default for Budgets {
    fn default() -> Self {
        Self { all: shared(ALL), users: Mutex::default() }
    }
}

fn shared(limit: Limit) -> Shared {
    Arc::new(Mutex::new(Budget::new(limit, Instant::now())))
}

fn locked(budget: &Shared) -> MutexGuard<'_, Budget> {
    budget.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Budgets {
    /// Returns the pace of a connection of a user, if the user is known.
    pub fn pace(&self, user: Option<u32>) -> Pace {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // A full budget is as good as a new one.
        users.retain(|_, budget| Arc::strong_count(budget) > 1 || !locked(budget).is_full(now));
        let user = user.map(|user| Arc::clone(users.entry(user).or_insert_with(|| shared(USER))));
        Pace { user, all: Arc::clone(&self.all) }
    }
}

/// Pace of one connection.
#[derive(Clone, Debug)]
pub struct Pace {
    user: Option<Shared>,
    all: Shared,
}

impl Pace {
    /// Returns how long the connection has to wait, if at all. A user who uses little does not wait
    /// for others.
    fn wait(&self, now: Instant) -> Option<Duration> {
        let own = self.user.as_ref().and_then(|user| locked(user).wait(now));
        if own.is_some() || self.user.as_ref().is_some_and(|user| locked(user).is_ample()) {
            return own;
        }
        locked(&self.all).wait(now)
    }

    fn charge(&self, used: Duration) {
        let now = Instant::now();
        for budget in self.user.iter().chain([&self.all]) {
            locked(budget).charge(used, now);
        }
    }

    /// Runs a connection, which waits before it is polled while there is no budget, and while
    /// `is_paced` is true.
    pub async fn run<T>(
        &self,
        is_paced: impl Fn() -> bool,
        connection: impl Future<Output = T>,
    ) -> T {
        let mut connection = pin!(connection);
        let mut timer = None;
        std::future::poll_fn(move |context| {
            if !is_paced() {
                return connection.as_mut().poll(context);
            }
            if timer.is_none() {
                timer = self.wait(Instant::now()).map(|wait| Box::pin(sleep(wait)));
            }
            // After one wait it is this connection's turn, whatever others have used meanwhile.
            if let Some(waiting) = &mut timer {
                ready!(waiting.as_mut().poll(context));
                timer = None;
            }
            let before = thread_cpu_time();
            let polled: Poll<T> = connection.as_mut().poll(context);
            self.charge(thread_cpu_time().saturating_sub(before));
            polled
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::task::{Context, Waker};

    use super::*;

    /// More than any reserve.
    const MUCH: Duration = Duration::from_secs(10);

    /// Returns whether a connection is served at once.
    fn is_served(pace: &Pace, is_paced: bool) -> bool {
        let runtime = crate::io_runtime::new(1).unwrap();
        let _context = runtime.enter();
        let served = Cell::new(false);
        let connection = async { served.set(true) };
        let run = pin!(pace.run(|| is_paced, connection));
        let _ = run.poll(&mut Context::from_waker(Waker::noop()));
        served.get()
    }

    /// A pace without an end of the wait that a test could see.
    fn exhausted(mut pace: Pace) -> Pace {
        let slow = Limit { percent: 1, reserve: Duration::ZERO };
        pace.user = pace.user.map(|_| shared(slow));
        pace.all = shared(slow);
        pace.charge(MUCH);
        pace
    }

    #[test]
    fn a_client_without_a_budget_waits_and_one_with_privilege_does_not() {
        for user in [None, Some(7)] {
            let pace = Budgets::default().pace(user);
            assert!(is_served(&pace, true));
            let pace = exhausted(pace);
            assert!(!is_served(&pace, true));
            assert!(is_served(&pace, false));
        }
    }

    #[test]
    fn a_connection_is_charged_for_its_polls() {
        let budgets = Budgets::default();
        let pace = budgets.pace(Some(7));
        let runtime = crate::io_runtime::new(1).unwrap();
        runtime.block_on(pace.run(|| true, async {
            let end = thread_cpu_time() + USER.reserve + Duration::from_millis(1);
            while thread_cpu_time() < end {}
        }));
        assert!(locked(pace.user.as_ref().unwrap()).is_exhausted());
        assert!(!locked(&budgets.all).is_full(Instant::now()));
    }

    #[test]
    fn a_user_who_uses_little_does_not_wait_for_others() {
        let budgets = Budgets::default();
        let (much, little) = (budgets.pace(Some(7)), budgets.pace(Some(8)));
        much.charge(MUCH);
        let now = Instant::now();
        assert!(much.wait(now).is_some() && little.wait(now).is_none());
        locked(little.user.as_ref().unwrap()).charge(USER.reserve * 3 / 4, now);
        assert!(little.wait(now).is_some(), "its own budget is there, that of all is not");
    }

    #[test]
    fn budgets_outlive_connections_until_they_are_full() {
        let budgets = Budgets::default();
        drop(budgets.pace(Some(7)));
        budgets.pace(Some(8)).charge(MUCH);
        let pace = budgets.pace(Some(8));
        assert!(pace.wait(Instant::now()).is_some(), "a new connection");
        assert_eq!(budgets.users.lock().unwrap().len(), 1);
    }
}
