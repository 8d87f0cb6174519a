//! Limit on how often a screen is read out of video memory.
//!
//! A vGPU's `refresh` limits all readouts of its screen together: screenshots, thumbnails and live
//! screens. Each reader waits here before it reads.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mdev_core::ids::VgpuId;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, sleep_until};

/// Longest interval between two readouts of a screen: `refresh` is at least one per second.
const MAX_INTERVAL: Duration = Duration::from_secs(1);

/// Returns the interval between two readouts at a `refresh`, which is in readouts per second.
pub fn interval(refresh: NonZeroU32) -> Duration {
    MAX_INTERVAL / refresh.get()
}

/// Readout limits of all screens.
#[derive(Debug, Default)]
pub struct ReadoutLimiter(Mutex<HashMap<VgpuId, Arc<ScreenLimit>>>);

impl ReadoutLimiter {
    /// Returns the limit of a vGPU's screen, shared by all its readers.
    pub fn screen(&self, id: VgpuId) -> Arc<ScreenLimit> {
        let mut screens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        screens.retain(|_, limit| Arc::strong_count(limit) > 1 || limit.is_recent());
        Arc::clone(screens.entry(id).or_default())
    }
}

/// Readout limit of one screen: the start of the last readout.
#[derive(Debug, Default)]
pub struct ScreenLimit(AsyncMutex<Option<Instant>>);

impl ScreenLimit {
    /// Waits until `interval` has passed since the last readout. Waiters proceed in the order of
    /// their calls.
    pub async fn wait(&self, interval: Duration) {
        let mut last = self.0.lock().await;
        if let Some(last) = *last {
            sleep_until(last + interval).await;
        }
        *last = Some(Instant::now());
    }

    fn is_recent(&self) -> bool {
        let last = self.0.try_lock().map(|last| *last);
        last.is_ok_and(|last| last.is_some_and(|last| last.elapsed() < MAX_INTERVAL))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_readers_of_a_screen_share_one_limit() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (limiter, id) = (ReadoutLimiter::default(), VgpuId::random());
            let start = Instant::now();
            let reader = || {
                let limit = limiter.screen(id);
                tokio::spawn(async move {
                    for _ in 0..4 {
                        limit.wait(Duration::from_millis(10)).await;
                    }
                })
            };
            let (one, other) = (reader(), reader());
            one.await.unwrap();
            other.await.unwrap();
            assert!(
                start.elapsed() >= Duration::from_millis(70),
                "eight readouts, seven intervals"
            );
            // Another screen has another limit.
            let now = Instant::now();
            limiter.screen(VgpuId::random()).wait(Duration::from_secs(3600)).await;
            assert!(now.elapsed() < Duration::from_secs(60));
        });
    }
}
