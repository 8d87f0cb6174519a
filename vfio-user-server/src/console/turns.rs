//! Whose turn it is to read a screen out.
//!
//! A vGPU's `refresh` says how often its picture may be read, and it says so of all who read it together: screenshots,
//! small pictures and viewers. Each of them asks here before it reads.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mdev_core::ids::VgpuId;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, sleep_until};

/// The longest pause between two pictures of a screen.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The pause that a `refresh` asks for.
pub fn pause(refresh: NonZeroU32) -> Duration {
    LONGEST_PAUSE / refresh.get()
}

/// The screens that are read.
#[derive(Debug, Default)]
pub struct Turns(Mutex<HashMap<VgpuId, Arc<Turn>>>);

impl Turns {
    /// That of a screen.
    pub fn of(&self, id: VgpuId) -> Arc<Turn> {
        let mut screens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        screens.retain(|_, turn| Arc::strong_count(turn) > 1 || turn.is_recent());
        Arc::clone(screens.entry(id).or_default())
    }
}

/// A screen's.
#[derive(Debug, Default)]
pub struct Turn(AsyncMutex<Option<Instant>>);

impl Turn {
    /// Waits until the screen may be read, in the order in which this was asked.
    pub async fn take(&self, pause: Duration) {
        let mut begun = self.0.lock().await;
        if let Some(begun) = *begun {
            sleep_until(begun + pause).await;
        }
        *begun = Some(Instant::now());
    }

    fn is_recent(&self) -> bool {
        let begun = self.0.try_lock().map(|begun| *begun);
        begun.is_ok_and(|begun| begun.is_some_and(|begun| begun.elapsed() < LONGEST_PAUSE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_who_read_a_screen_keep_to_one_refresh() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (turns, id) = (Turns::default(), VgpuId::random());
            let begun = Instant::now();
            let reader = || {
                let turn = turns.of(id);
                tokio::spawn(async move {
                    for _ in 0..4 {
                        turn.take(Duration::from_millis(10)).await;
                    }
                })
            };
            let (one, other) = (reader(), reader());
            one.await.unwrap();
            other.await.unwrap();
            assert!(begun.elapsed() >= Duration::from_millis(70), "eight turns, seven pauses");
            // Another screen has its own.
            let now = Instant::now();
            turns.of(VgpuId::random()).take(Duration::from_secs(3600)).await;
            assert!(now.elapsed() < Duration::from_secs(60));
        });
    }
}
