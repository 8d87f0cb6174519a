//! What is left to a worker, or to a software GPU, that its guest has taken over.

use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::ptr::null;
use std::thread;

use anyhow::{Context, Result, anyhow};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use system_tests::skipped;
use vfio_user_server::worker::sandbox;

/// The first Landlock that keeps signals and abstract sockets in.
const WITH_SIGNALS: libc::c_long = 6;
const VERSION: libc::c_int = 1;

struct Outside(Child);

impl Drop for Outside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The kernel's version of Landlock; none where it has none.
fn landlock() -> libc::c_long {
    // SAFETY: asked for a version, it reads no memory.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, null::<u8>(), 0, VERSION) }
}

/// Does something as what is in the sandbox: to the kernel, that is a thread.
fn inside<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let done = thread::spawn(|| {
        sandbox::enter();
        body()
    });
    done.join().map_err(|_| anyhow!("It panicked"))
}

#[test]
fn it_opens_no_file_and_signals_nobody() -> Result<()> {
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
        (files, kill(pid, Signal::SIGTERM), UnixStream::pair().is_ok())
    })?;
    let (files, signal, pair) = tried;
    assert_eq!(files, [Some(io::ErrorKind::PermissionDenied); 5]);
    assert!(pair, "what it has, and needs no name for, goes on");
    if version >= WITH_SIGNALS {
        assert_eq!(signal, Err(Errno::EPERM));
    } else {
        skipped("this kernel's Landlock knows no signals");
    }
    assert_eq!(fs::read(&old)?, b"a secret", "whoever is outside goes on as before");
    Ok(())
}
