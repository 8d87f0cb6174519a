//! Processes and threads: the only module that starts them.
//!
//! A role of `vgpud` is a process of the same program. It has its descriptors at 3, 4, 5 and so on,
//! an empty stdin, its own session (a Ctrl-C for the manager does not reach it) and no core file,
//! which would hold guest memory. It outlives the manager, and the next manager adopts it.
//!
//! * `process`: signals to a process, and its end

mod process;

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, umask};

use vgpud_host::users::Account;

pub use self::process::{KILL_TIMEOUT, Process, ProcessRecord};

/// Number of the first descriptor of a role.
pub const FIRST_FD: RawFd = 3;

/// Environment variables of the service manager that are for this process alone.
const SERVICE_ENV: [&str; 6] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
];

/// Limit of descriptors of a role.
const MAX_FDS: RawFd = 7;

/// Starts a thread of this process. `top -H` shows the first 15 bytes of `name`.
pub fn thread<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body)
}

/// Sets the name that `ps` shows, up to 15 bytes. Without it, a role would be named `exe`.
pub fn name_process(name: &str) {
    if let Ok(name) = std::ffi::CString::new(name) {
        // The name is informative only.
        let _ = nix::sys::prctl::set_name(&name);
    }
}

/// Reserves the numbers of a role's descriptors in this process. A process that starts roles calls
/// this first: between fork and exec, the standard library holds a pipe open for errors, which must
/// not have the number of a role's descriptor.
pub fn reserve_descriptors() -> io::Result<()> {
    loop {
        let fd = OwnedFd::from(std::fs::File::open("/dev/null")?);
        if fd.as_raw_fd() >= FIRST_FD + MAX_FDS {
            return Ok(());
        }
        // Stays open for the life of the process, as intended.
        std::mem::forget(fd);
    }
}

/// Starts a role: this program with `args`, `fds` at [`FIRST_FD`] and above, and `stderr`, or else
/// this process' own. Process lists show `label`.
pub fn role(
    label: &str,
    args: &[String],
    fds: &[BorrowedFd<'_>],
    stderr: Option<OwnedFd>,
    limits: Limits,
) -> io::Result<Process> {
    role_of("/proc/self/exe", label, args, fds, stderr, limits)
}

/// Starts a role of the program in a file.
pub fn role_of_file(
    program: BorrowedFd<'_>,
    label: &str,
    args: &[String],
    fds: &[BorrowedFd<'_>],
    limits: Limits,
) -> io::Result<Process> {
    role_of(&format!("/proc/self/fd/{}", program.as_raw_fd()), label, args, fds, None, limits)
}

fn role_of(
    program: &str,
    label: &str,
    args: &[String],
    fds: &[BorrowedFd<'_>],
    stderr: Option<OwnedFd>,
    limits: Limits,
) -> io::Result<Process> {
    if fds.len() > MAX_FDS as usize {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "Too many descriptors"));
    }
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let mut moved = vec![-1; raw.len()];
    // Raising a hard limit takes a privilege.
    let lowered = |resource, limit: u64| io::Result::Ok(limit.min(getrlimit(resource)?.1));
    let files = lowered(Resource::RLIMIT_NOFILE, limits.files)?;
    let threads = limits.threads.map(|limit| lowered(Resource::RLIMIT_NPROC, limit)).transpose()?;
    let user = Some(limits.user).filter(|_| nix::unistd::geteuid().is_root());
    let mut command = Command::new(program);
    for name in SERVICE_ENV {
        command.env_remove(name);
    }
    command.arg0(format!("vgpud[{label}]")).args(args).stdin(Stdio::null()).stdout(Stdio::null());
    if let Some(stderr) = stderr {
        command.stderr(stderr);
    }
    // SAFETY: between fork and exec only system calls are made, nothing is allocated, and no lock
    // is taken.
    unsafe {
        command.pre_exec(move || {
            place(&raw, &mut moved)?;
            nix::unistd::setsid()?;
            setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
            setrlimit(Resource::RLIMIT_NOFILE, files, files)?;
            if let Some(threads) = threads {
                setrlimit(Resource::RLIMIT_NPROC, threads, threads)?;
            }
            if !limits.may_lock_memory {
                setrlimit(Resource::RLIMIT_MEMLOCK, 0, 0)?;
            }
            if !limits.is_oom_protected {
                end_oom_protection();
            }
            if limits.ends_with_parent {
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            }
            user.map_or(Ok(()), become_user)
        });
    }
    Process::of_child(command.spawn()?)
}

/// Returns the descriptors that are present, and the arguments of a role that name them.
pub fn arguments<'a>(
    role: &str,
    all: impl IntoIterator<Item = (&'static str, Option<BorrowedFd<'a>>)>,
) -> (Vec<BorrowedFd<'a>>, Vec<String>) {
    let (mut fds, mut args) = (Vec::new(), vec![role.to_owned()]);
    let present = all.into_iter().filter_map(|(name, fd)| Some((name, fd?)));
    for (number, (name, fd)) in (FIRST_FD..).zip(present) {
        args.extend([name.to_owned(), number.to_string()]);
        fds.push(fd);
    }
    (fds, args)
}

/// Resource limits and user of a role.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Limit of open files.
    pub files: u64,
    /// Limit of threads, for a role that shares its user with no other process.
    pub threads: Option<u64>,
    /// Whether the role, or a driver on its behalf, may lock memory.
    pub may_lock_memory: bool,
    /// Whether the role keeps the manager's protection from the kernel's out-of-memory killer.
    pub is_oom_protected: bool,
    /// Whether the kernel kills the role when this process ends.
    pub ends_with_parent: bool,
    /// User of the role, if this process is root.
    pub user: Account,
}

/// Sets a negative `oom_score_adj` of this process to 0 (proc_pid_oom_score_adj(5)). Runs between
/// fork and exec. A failure leaves the process protected, which harms no guest.
fn end_oom_protection() {
    use nix::fcntl::{OFlag, open};
    let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC;
    let Ok(file) = open(c"/proc/self/oom_score_adj", flags, Mode::empty()) else { return };
    let mut sign = [0];
    if nix::unistd::read(&file, &mut sign) == Ok(1) && sign == *b"-" {
        let _ = nix::unistd::write(&file, b"0");
    }
}

/// Changes this process' user irrevocably. A change from root to another user empties the
/// capability sets.
pub fn become_user(user: Account) -> io::Result<()> {
    use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)?;
    Ok(nix::sys::prctl::set_no_new_privs()?)
}

/// Drops all capabilities. A process of root keeps access to root's files.
pub fn drop_capabilities() -> io::Result<()> {
    /// `struct __user_cap_header_struct` of version 3, for this process, and two of `struct
    /// __user_cap_data_struct`.
    const HEADER: [u32; 2] = [0x2008_0522, 0];
    const NONE: [u32; 6] = [0; 6];
    // SAFETY: both arrays have the layout that this version of the call reads, and it keeps no
    // pointer to them.
    let done = unsafe { libc::syscall(libc::SYS_capset, HEADER.as_ptr(), NONE.as_ptr()) };
    nix::sys::prctl::set_no_new_privs()?;
    Ok(Errno::result(done).map(drop)?)
}

/// Limit of the bytes of each output of a script, which are in memory.
const MAX_SCRIPT_OUTPUT: u64 = 16 << 20;

/// Interval at which the length of a script's output is checked.
const OUTPUT_INTERVAL: Duration = Duration::from_millis(50);

/// Result of a script.
#[derive(Debug)]
pub struct Ended {
    /// Exit status, or the signal that ended the script.
    pub status: ExitStatus,
    /// Beginning of its standard output.
    pub stdout: Vec<u8>,
    /// Beginning of its standard error.
    pub stderr: Vec<u8>,
}

/// Runs a script to its end: in `/`, with a minimal environment, in its own session. After
/// `timeout`, or once it has written [`MAX_SCRIPT_OUTPUT`], the script is killed with its process
/// group. At most `max_bytes` of each output are returned.
pub fn script(
    path: &Path,
    args: &[&str],
    stdin: &[u8],
    timeout: Duration,
    max_bytes: u64,
) -> io::Result<Ended> {
    // Files instead of pipes: nothing has to read while the script runs, and a child that keeps
    // running blocks nothing.
    let file = || io::Result::Ok(File::from(memfd_create("script", MFdFlags::MFD_CLOEXEC)?));
    let (mut input, stdout, stderr) = (file()?, file()?, file()?);
    input.write_all(stdin)?;
    input.rewind()?;
    let mut command = Command::new(path);
    command.args(args).current_dir("/").env_clear().envs([
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("LANG", "C.UTF-8"),
    ]);
    command.stdin(input).stdout(stdout.try_clone()?).stderr(stderr.try_clone()?);
    // SAFETY: between fork and exec only system calls are made, nothing is allocated, and no lock
    // is taken.
    unsafe {
        command.pre_exec(|| {
            umask(Mode::from_bits_truncate(0o022));
            nix::unistd::setsid().map(drop).map_err(io::Error::from)
        });
    }
    let process = Process::of_child(command.spawn()?)?;
    let deadline = Instant::now() + timeout;
    let has_much =
        |file: &File| file.metadata().is_ok_and(|written| written.len() > MAX_SCRIPT_OUTPUT);
    let mut failure = None;
    while failure.is_none() {
        let left = deadline.saturating_duration_since(Instant::now());
        if process.wait(left.min(OUTPUT_INTERVAL)) {
            break;
        }
        failure = if has_much(&stdout) || has_much(&stderr) {
            let what =
                format!("it wrote more than {} MiB, and was killed", MAX_SCRIPT_OUTPUT >> 20);
            Some(io::Error::other(what))
        } else if left <= OUTPUT_INTERVAL {
            let seconds = timeout.as_secs_f32();
            let what = format!("it did not end within {seconds} s, and was killed");
            Some(io::Error::new(io::ErrorKind::TimedOut, what))
        } else {
            None
        };
    }
    if let Some(failure) = failure {
        // The script leads its process group. It has not been reaped, so its number is not reused.
        let group = nix::unistd::Pid::from_raw(process.pid().cast_signed());
        if let Err(error) = nix::sys::signal::killpg(group, Signal::SIGKILL) {
            log::warn!("Cannot kill {}: {error}", path.display());
        }
        process.leave();
        return Err(failure);
    }
    let status = process.exit_status()?;
    let read = |mut file: File| {
        let mut bytes = Vec::new();
        file.rewind()?;
        file.take(max_bytes).read_to_end(&mut bytes)?;
        io::Result::Ok(bytes)
    };
    Ok(Ended { status, stdout: read(stdout)?, stderr: read(stderr)? })
}

/// Moves `raw` to [`FIRST_FD`] and above, without close-on-exec. A source may have the number of
/// another's target, so all are first copied to numbers above the targets.
fn place(raw: &[RawFd], moved: &mut [RawFd]) -> io::Result<()> {
    let beyond = FIRST_FD + MAX_FDS;
    for (source, copy) in raw.iter().zip(moved.iter_mut()) {
        // SAFETY: plain system call on a descriptor that the caller holds open.
        *copy = Errno::result(unsafe { libc::fcntl(*source, libc::F_DUPFD_CLOEXEC, beyond) })?;
    }
    for (target, copy) in (FIRST_FD..).zip(moved.iter()) {
        // SAFETY: plain system call. Nothing between fork and exec uses the descriptor at `target`.
        Errno::result(unsafe { libc::dup2(*copy, target) })?;
    }
    Ok(())
}

/// Takes a descriptor that this role was started with, by its number.
pub fn inherited(fd: RawFd) -> io::Result<OwnedFd> {
    use nix::fcntl::{FcntlArg, FdFlag, fcntl};
    if fd < FIRST_FD {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("Descriptor {fd} is not one a role is started with"),
        ));
    }
    // SAFETY: the number came on the command line, from the process that placed a descriptor there
    // for this role alone; fcntl refuses one that is not open, before anything owns it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    fcntl(borrowed, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    // SAFETY: as above; each is taken once.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Checks that a socket is listening. An accept on any other descriptor would block or fail.
pub fn listening(socket: OwnedFd) -> io::Result<OwnedFd> {
    use nix::sys::socket::{getsockopt, sockopt::AcceptConn};
    if getsockopt(&socket, AcceptConn) == Ok(true) {
        return Ok(socket);
    }
    let number = socket.as_raw_fd();
    let what = format!(
        "Descriptor {number} is no socket that listens; start `vgpud run`, which starts this"
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}
