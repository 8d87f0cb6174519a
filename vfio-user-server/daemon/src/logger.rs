//! Logger of all roles. A message is one line without control characters. In a worker and in a GPU
//! process, whose lines their clients can cause, each line of the program logs at most a few
//! messages a second for each vGPU, and the suppressed ones are counted.

use std::collections::HashMap;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use log::{Log, Metadata, Record};
use mdev_core::untrusted::one_line;

use crate::child_logs;
use crate::log_limiter::LogLimiter;
use crate::vgpu_names;

/// Limit of a message, in characters.
const MAX_MESSAGE: usize = 2000;

/// Limit of remembered places in the program, with their vGPUs.
const MAX_PLACES: usize = 4096;

/// Place in the program, and the vGPU that the message names.
type Place = (Option<&'static str>, Option<u32>, Option<String>);

struct Logger {
    inner: env_logger::Logger,
    limiters: Option<Mutex<HashMap<Place, LogLimiter>>>,
}

/// Installs the logger. `of_child` limits the messages of each line of the program, and writes them
/// for [`child_logs`].
pub fn init(of_child: bool) {
    let env = env_logger::Env::default().default_filter_or("info");
    let mut builder = env_logger::Builder::from_env(env);
    if of_child {
        builder.format(|line, record| writeln!(line, "{}", child_logs::line_of(record)));
    }
    let inner = builder.build();
    log::set_max_level(inner.filter());
    let limiters = of_child.then(Mutex::default);
    // An error means that there is a logger already.
    let _ = log::set_boxed_logger(Box::new(Logger { inner, limiters }));
}

impl Logger {
    /// Returns `None` for a message to suppress, or else the number of suppressed ones before it.
    fn pass(&self, record: &Record<'_>, message: &str) -> Option<u32> {
        let Some(limiters) = &self.limiters else { return Some(0) };
        let place = (record.module_path_static(), record.line(), vgpu_in(message));
        let now = Instant::now();
        let mut limiters = limiters.lock().unwrap_or_else(PoisonError::into_inner);
        if limiters.len() >= MAX_PLACES && !limiters.contains_key(&place) {
            limiters.clear();
        }
        limiters.entry(place).or_insert_with(|| LogLimiter::new(now)).pass(now)
    }
}

/// Returns the UUID after `vGPU ` in a message.
fn vgpu_in(message: &str) -> Option<String> {
    let (_, rest) = message.split_once("vGPU ")?;
    rest.get(..36).map(str::to_owned)
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.inner.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.inner.matches(record) {
            return;
        }
        let mut message = vgpu_names::annotated(&record.args().to_string());
        message = one_line(&message, MAX_MESSAGE);
        match self.pass(record, &message) {
            None => return,
            Some(0) => {}
            Some(suppressed) => {
                message = format!("{message} ({suppressed} such lines were suppressed before)");
            }
        }
        self.inner.log(
            &Record::builder()
                .metadata(record.metadata().clone())
                .module_path(record.module_path())
                .file(record.file())
                .line(record.line())
                .args(format_args!("{message}"))
                .build(),
        );
    }

    fn flush(&self) {
        self.inner.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vgpu_has_a_limit_of_its_own() {
        let inner = env_logger::Builder::new().build();
        let logger = Logger { inner, limiters: Some(Mutex::default()) };
        let passed = |line, message: &str| {
            let record = Record::builder().module_path_static(Some("m")).line(Some(line)).build();
            (0..1000).filter(|_| logger.pass(&record, message).is_some()).count()
        };
        let id = |digit: &str| format!("vGPU {}: it fails", digit.repeat(36));
        assert!(passed(1, &id("a")) < 100);
        assert_eq!(passed(1, &id("a")), 0);
        assert!(passed(1, &id("b")) > 0, "another vGPU");
        assert!(passed(2, &id("a")) > 0, "another line of the program");
    }
}
