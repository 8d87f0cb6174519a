//! Log lines of the manager's child processes: workers, anchors, contexts and GPU processes.
//!
//! A guest or a tenant may have taken a child over. So no child has the manager's standard error,
//! which it could fill, empty, shut down or read from, and where it could write lines in the
//! manager's name. Each writes to a FIFO of its own. The manager reads that without waiting, and
//! logs each line with the name of the process, shortened, without control characters, and up to a
//! number of lines.
//!
//! A FIFO has a name in the run directory. The next manager reads what children have written
//! meanwhile.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use log::{Level, Record};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::log_limiter::LogLimiter;
use crate::spawn;

/// Pause after a FIFO was read. A process that writes more than [`MAX_READ`] meanwhile waits for
/// nothing: it gets `EAGAIN`.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes that are read at once.
const MAX_READ: usize = 16 << 10;
/// Longest line in bytes. The rest of a longer one is another line.
const MAX_LINE: usize = 4096;
/// Lines of a process in the period of [`LogLimiter`].
const MAX_LINES: u32 = 200;
/// Longest target of a line, in bytes.
const MAX_TARGET: usize = 80;
/// FIFOs that are read at once.
const MAX_EVENTS: usize = 64;

/// Returns the line that [`relay`] takes apart.
pub fn line_of(record: &Record<'_>) -> String {
    format!("{} {} {}", record.level(), record.target(), record.args())
}

/// Makes the FIFO of a process, in place of an earlier one at the path, and reads it from now on.
/// Returns the end for the process, which is its standard error. Log lines begin with `name`.
///
/// # Errors
///
/// Fails if the FIFO or the thread that reads cannot be made.
pub fn create(path: &Path, name: String) -> io::Result<OwnedFd> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR)?;
    let source = open(path)?;
    // With an end for reading of its own, the process can write while there is no manager.
    let own = options().write(true).open(path)?;
    reader()?.add(source, name)?;
    Ok(own.into())
}

/// Reads the FIFO of a process that an earlier manager has started. One of an earlier release has
/// none.
pub fn resume(path: &Path, name: String) {
    let resumed = match open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        source => source.and_then(|source| reader()?.add(source, name)),
    };
    if let Err(error) = resumed {
        log::warn!("Cannot read log lines from {}: {error}", path.display());
    }
}

/// Logs what has been written so far. Called at the end of the manager.
pub fn drain() {
    if let Some(Ok(reader)) = READER.get() {
        for source in reader.sources().values_mut() {
            source.read();
        }
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    options
}

fn open(path: &Path) -> io::Result<File> {
    options().open(path)
}

/// Reads all FIFOs, on one thread.
#[derive(Debug)]
struct Reader {
    epoll: Epoll,
    sources: Mutex<BTreeMap<u64, Source>>,
    last_key: AtomicU64,
}

static READER: OnceLock<io::Result<Arc<Reader>>> = OnceLock::new();

fn reader() -> io::Result<&'static Reader> {
    let start = || {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let reader =
            Arc::new(Reader { epoll, sources: Mutex::default(), last_key: AtomicU64::new(0) });
        let of_thread = Arc::clone(&reader);
        spawn::thread("child-logs", move || of_thread.run())?;
        Ok(reader)
    };
    let started = READER.get_or_init(start).as_ref();
    started.map(|reader| &**reader).map_err(|error| error.kind().into())
}

impl Reader {
    fn sources(&self) -> MutexGuard<'_, BTreeMap<u64, Source>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, fifo: File, name: String) -> io::Result<()> {
        let key = self.last_key.fetch_add(1, Ordering::Relaxed);
        let mut sources = self.sources();
        self.epoll.add(&fifo, event(key))?;
        let limiter = LogLimiter::with_burst(Instant::now(), MAX_LINES);
        sources.insert(key, Source { fifo, name, begun: Vec::new(), limiter });
        Ok(())
    }

    fn run(&self) {
        let mut paused: Vec<(Instant, u64)> = Vec::new();
        let mut events = [EpollEvent::empty(); MAX_EVENTS];
        loop {
            let timeout = match paused.first() {
                None => EpollTimeout::NONE,
                Some((until, _)) => {
                    let left = until.saturating_duration_since(Instant::now());
                    // Rounded up, so that the pause is over.
                    EpollTimeout::try_from(left + Duration::from_millis(1))
                        .unwrap_or(EpollTimeout::ZERO)
                }
            };
            let count = self.epoll.wait(&mut events, timeout).unwrap_or_default();
            let now = Instant::now();
            for key in events[..count].iter().map(EpollEvent::data) {
                // Out of the list: a start must not wait for the log.
                let Some(mut source) = self.sources().remove(&key) else { continue };
                // The close of one that has ended ends the watch.
                if source.read() {
                    self.sources().insert(key, source);
                    paused.push((now + PAUSE, key));
                }
            }
            let over = paused.partition_point(|(until, _)| *until <= now);
            for (_, key) in paused.drain(..over) {
                if let Some(source) = self.sources().get(&key) {
                    let _ = self.epoll.modify(&source.fifo, &mut event(key));
                }
            }
        }
    }
}

fn event(key: u64) -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT, key)
}

/// FIFO of a process.
#[derive(Debug)]
struct Source {
    fifo: File,
    name: String,
    /// Beginning of a line.
    begun: Vec<u8>,
    limiter: LogLimiter,
}

impl Source {
    /// Logs what is there. Returns false if no process has the FIFO open any more.
    fn read(&mut self) -> bool {
        let mut bytes = [0; MAX_READ];
        let count = match self.fifo.read(&mut bytes) {
            Ok(0) => {
                self.end_line();
                return false;
            }
            Ok(count) => count,
            Err(_) => return true,
        };
        for part in bytes[..count].split_inclusive(|byte| *byte == b'\n') {
            self.begun.extend_from_slice(part);
            if part.ends_with(b"\n") || self.begun.len() >= MAX_LINE {
                self.end_line();
            }
        }
        true
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.begun);
        if line.trim_ascii().is_empty() {
            return;
        }
        if let Some(suppressed) = self.limiter.pass(Instant::now()) {
            relay(&self.name, &String::from_utf8_lossy(&line), suppressed);
        }
    }
}

/// Logs a line of a process.
fn relay(name: &str, line: &str, suppressed: u32) {
    let (level, target, message) = parts(line.trim_end());
    let more = match suppressed {
        0 => String::new(),
        lines => format!(" ({lines} lines of this process were suppressed before)"),
    };
    let metadata = log::Metadata::builder().level(level).target(target).build();
    log::logger().log(
        &Record::builder().metadata(metadata).args(format_args!("{name}: {message}{more}")).build(),
    );
}

/// Takes a line of [`line_of`] apart. Another line, such as one of a panic, is an error.
fn parts(line: &str) -> (Level, &str, &str) {
    let is_target = |text: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':');
        text.len() <= MAX_TARGET && text.bytes().all(is_plain)
    };
    let parts = || {
        let (level, rest) = line.split_once(' ')?;
        let (target, message) = rest.split_once(' ')?;
        Some((level.parse().ok()?, target, message)).filter(|(_, target, _)| is_target(target))
    };
    parts().unwrap_or((Level::Error, "vgpud", line))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_line_keeps_its_level_and_target() {
        let metadata = log::Metadata::builder().level(Level::Warn).target("a::b").build();
        let record = |args| Record::builder().metadata(metadata.clone()).args(args).build();
        let line = line_of(&record(format_args!("it is late")));
        assert_eq!(parts(&line), (Level::Warn, "a::b", "it is late"));
        let panic = "thread 'main' panicked at src/lib.rs:1:2";
        assert_eq!(parts(panic), (Level::Error, "vgpud", panic));
        let forged = "INFO x]\u{1b} User 0, process 1";
        assert_eq!(parts(forged), (Level::Error, "vgpud", forged));
    }

    #[test]
    fn a_process_without_a_reader_loses_no_line_and_one_that_floods_never_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut process = File::from(create(&path, "test".into()).unwrap());
        while process.write(&[b'x'; 4096]).is_ok() {}
        let error = process.write(&[b'x'; 4096]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        // What a manager does not read, the next one reads.
        let mut next = Source {
            fifo: open(&path).unwrap(),
            name: "next".into(),
            begun: Vec::new(),
            limiter: LogLimiter::with_burst(Instant::now(), MAX_LINES),
        };
        assert!(next.read());
        drop(process);
        fs::remove_file(&path).unwrap();
        while next.read() {}
    }

    proptest! {
        #[test]
        fn any_line_has_a_target_without_spaces(line in "\\PC{0,200}") {
            let (_, target, _) = parts(&line);
            prop_assert!(target.len() <= MAX_TARGET && !target.contains([' ', ']']));
        }
    }
}
