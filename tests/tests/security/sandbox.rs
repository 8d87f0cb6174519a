//! The sandbox of workers and software GPUs: files and signals.

use std::fs::{self, File};
use std::io;
use std::process::{Child, Command, Stdio};
use std::ptr::null;
use std::thread;

use anyhow::{Context, Result, anyhow};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use system_tests::skipped;
use vgpud::worker::sandbox;

/// First Landlock version that restricts signals and abstract sockets.
const WITH_SIGNALS: libc::c_long = 6;
const VERSION: libc::c_int = 1;

struct Outside(Child);

impl Drop for Outside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the kernel's Landlock version, less than 1 without Landlock.
fn landlock() -> libc::c_long {
    // SAFETY: with this flag the call reads no memory.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, null::<u8>(), 0, VERSION) }
}

/// Runs `body` with the sandbox's restrictions of files, on a separate thread because Landlock
/// applies to threads.
fn inside<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let done = thread::spawn(|| {
        sandbox::restrict_files(&[]);
        body()
    });
    done.join().map_err(|_| anyhow!("It panicked"))
}

#[test]
fn the_sandbox_denies_files_and_signals() -> Result<()> {
    let version = landlock();
    if version < 1 {
        skipped("this kernel has no Landlock");
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (old, new) = (dir.path().join("old"), dir.path().join("new"));
    fs::write(&old, "a secret")?;
    let sleeps = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn();
    let outside = Outside(sleeps.context("Cannot start sleep")?);
    let pid = Pid::from_raw(outside.0.id().cast_signed());
    let (file, folder) = (old.clone(), dir.path().to_owned());
    let tried = inside(move || {
        let kind = |result: io::Result<()>| result.err().map(|error| error.kind());
        let files = [
            kind(File::open(&file).map(drop)),
            kind(File::create(&new).map(drop)),
            kind(fs::read_dir(&folder).map(drop)),
            kind(fs::remove_file(&file)),
            kind(Command::new("/bin/true").status().map(drop)),
        ];
        (files, kill(pid, Signal::SIGTERM))
    })?;
    let (files, signal) = tried;
    assert_eq!(files, [Some(io::ErrorKind::PermissionDenied); 5]);
    if version >= WITH_SIGNALS {
        assert_eq!(signal, Err(Errno::EPERM));
    } else {
        skipped("this kernel's Landlock does not restrict signals");
    }
    assert_eq!(fs::read(&old)?, b"a secret", "a process outside is not affected");
    Ok(())
}
