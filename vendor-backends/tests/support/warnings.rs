//! Warnings and errors that a test's thread logs.

use std::cell::RefCell;
use std::sync::Once;

use log::{Level, LevelFilter, Log, Metadata, Record};

thread_local! {
    static LOGGED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

struct Logger;

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            LOGGED.with_borrow_mut(|logged| logged.push(record.args().to_string()));
        }
    }

    fn flush(&self) {}
}

/// Returns the warnings and errors that `body` logs on this thread.
pub fn of(body: impl FnOnce()) -> Vec<String> {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        log::set_logger(&Logger).unwrap();
        log::set_max_level(LevelFilter::Warn);
    });
    LOGGED.take();
    body();
    LOGGED.take()
}
