//! System calls of a worker, and of a GPU process, that a guest has compromised.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use nix::errno::Errno;
use serde_json::json;
use system_tests::captured::Captured;
use system_tests::ram::Ram;
use system_tests::vfio_user_guest::VfioUserGuest;
use system_tests::{Vgpud, is_alive, skipped};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Home;
use vgpu_guest::work::{self, saxpy::Saxpy};

const EPERM: i64 = -(libc::EPERM as i64);
const ENOSYS: i64 = -(libc::ENOSYS as i64);
/// Descriptors in one packet: the most that the kernel accepts.
const FDS: usize = 253;

/// A daemon with a worker to take over, a neighbour, and their GPU process.
struct Host {
    vgpud: Vgpud,
    worker: u32,
    neighbour: u32,
    gpu: u32,
    neighbours_vgpu: String,
}

impl Host {
    fn new(args: &[&str]) -> Result<Self> {
        let vgpud = Vgpud::start_with(args)?;
        let start = || vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }));
        let (uuid, neighbours_vgpu) = (start()?, start()?);
        let pid = |uuid: &str| {
            let pid = vgpud.show(uuid)?["pid"].as_u64().context("No worker")?;
            Ok::<_, anyhow::Error>(u32::try_from(pid)?)
        };
        let (worker, neighbour) = (pid(&uuid)?, pid(&neighbours_vgpu)?);
        let gpu = vgpud.gpu_process()?;
        Ok(Self { vgpud, worker, neighbour, gpu, neighbours_vgpu })
    }

    /// Takes over a process, or reports a skipped test.
    fn captured(pid: u32) -> Result<Option<Captured>> {
        let captured = Captured::new(pid)?;
        if captured.is_none() {
            skipped("only root can trace a worker");
        }
        Ok(captured)
    }

    /// Attaches a new guest to the neighbour's vGPU, which imports its memory, and lets it work.
    fn neighbour_works(&self) -> Result<()> {
        let socket = self.vgpud.vfio_socket(&self.neighbours_vgpu);
        compute(&socket).context("The neighbour")?;
        for pid in [self.worker, self.neighbour, self.gpu] {
            ensure!(is_alive(pid), "process {pid} has ended");
        }
        let shown = self.vgpud.show(&self.neighbours_vgpu)?;
        ensure!(shown["pid"] == self.neighbour, "The neighbour's worker was replaced: {shown}");
        Ok(())
    }
}

fn compute(socket: &Path) -> Result<()> {
    let platform = VfioUserGuest::attach(socket, Ram::new(16 * MIB, 64 * 1024)?)?;
    let device = Device::open(Box::new(platform))?;
    let mut channel = Channel::new(&device, EngineKind::Compute)?;
    let work = Saxpy::new(&device, Home::Guest, 1000)?;
    work::run(&work, &mut channel)?;
    Ok(())
}

/// Scheduling, limits and priority of a process, which another process could have changed.
fn condition(pid: u32) -> Result<[String; 3]> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("stat")?;
    // Priority, nice value, real-time priority and policy.
    let fields: Vec<_> = fields.split_whitespace().collect();
    let scheduling = [15, 16, 37, 38].map(|at: usize| fields[at]).join(" ");
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let cpus = status.lines().find(|line| line.starts_with("Cpus_allowed:")).unwrap_or_default();
    let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    Ok([limits, cpus.to_owned(), scheduling])
}

/// Calls that reach beyond the process, with arguments that the kernel would accept: `other` is
/// another process, `arg` the address of 64 zero bytes, `path` that of a file's name.
fn forbidden(other: u64, arg: u64, path: u64) -> Vec<(&'static str, i64, Vec<u64>)> {
    let of = |id: libc::c_int| u64::from(id.cast_unsigned());
    vec![
        ("prlimit64 of another", libc::SYS_prlimit64, vec![other, 7, arg, 0]),
        ("sched_setscheduler", libc::SYS_sched_setscheduler, vec![other, 5, arg]),
        ("sched_setattr", libc::SYS_sched_setattr, vec![other, arg, 0]),
        ("sched_setaffinity", libc::SYS_sched_setaffinity, vec![other, 8, arg]),
        ("setpriority", libc::SYS_setpriority, vec![0, other, 19]),
        ("ioprio_set", libc::SYS_ioprio_set, vec![1, other, 3 << 13]),
        ("kill", libc::SYS_kill, vec![other, 0]),
        ("kill all", libc::SYS_kill, vec![u64::MAX, 0]),
        ("tgkill", libc::SYS_tgkill, vec![other, other, 0]),
        ("tkill", libc::SYS_tkill, vec![other, 0]),
        ("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, vec![other, 10, arg]),
        ("ptrace", libc::SYS_ptrace, vec![16, other, 0, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, vec![other, arg, 0, arg, 0, 0]),
        ("process_vm_writev", libc::SYS_process_vm_writev, vec![other, arg, 0, arg, 0, 0]),
        ("process_madvise", libc::SYS_process_madvise, vec![0, arg, 0, 0, 0]),
        ("move_pages", libc::SYS_move_pages, vec![other, 0, arg, 0, arg, 0]),
        ("kcmp", libc::SYS_kcmp, vec![other, other, 0, 0, 0]),
        ("pidfd_open", libc::SYS_pidfd_open, vec![other, 0]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, vec![0, 6, 0]),
        ("pidfd_send_signal", libc::SYS_pidfd_send_signal, vec![0, 0, 0, 0]),
        ("socket", libc::SYS_socket, vec![1, 1, 0]),
        ("TCP socket", libc::SYS_socket, vec![2, 1, 0]),
        ("netlink socket", libc::SYS_socket, vec![16, 3, 0]),
        ("pair of datagram sockets", libc::SYS_socketpair, vec![1, 2, 0, arg]),
        ("connect", libc::SYS_connect, vec![0, arg, 16]),
        ("bind", libc::SYS_bind, vec![0, arg, 16]),
        ("listen", libc::SYS_listen, vec![0, 1]),
        ("fork", libc::SYS_fork, vec![]),
        ("vfork", libc::SYS_vfork, vec![]),
        ("clone of a process", libc::SYS_clone, vec![of(libc::SIGCHLD), 0, 0, 0, 0]),
        ("clone with a namespace", libc::SYS_clone, vec![of(libc::CLONE_NEWUSER), 0, 0, 0, 0]),
        ("execve", libc::SYS_execve, vec![path, 0, 0]),
        ("execveat", libc::SYS_execveat, vec![0, path, 0, 0, 0]),
        ("open", libc::SYS_open, vec![path, 0]),
        ("openat", libc::SYS_openat, vec![u64::MAX - 99, path, 0]),
        ("unlink", libc::SYS_unlink, vec![path]),
        ("io_uring_setup", libc::SYS_io_uring_setup, vec![8, arg]),
        ("io_uring_enter", libc::SYS_io_uring_enter, vec![0, 0, 0, 0]),
        ("io_setup", libc::SYS_io_setup, vec![8, arg]),
        ("userfaultfd", libc::SYS_userfaultfd, vec![1]),
        ("bpf", libc::SYS_bpf, vec![5, arg, 64]),
        ("perf_event_open", libc::SYS_perf_event_open, vec![arg, 0, u64::MAX, u64::MAX, 0]),
        ("shmget", libc::SYS_shmget, vec![0, 4096, 0o1600]),
        ("semget", libc::SYS_semget, vec![0, 1, 0o1600]),
        ("msgget", libc::SYS_msgget, vec![0, 0o1600]),
        ("mq_open", libc::SYS_mq_open, vec![path, 0o102, 0o600, 0]),
        ("add_key", libc::SYS_add_key, vec![path, path, arg, 1, u64::MAX - 2]),
        ("keyctl", libc::SYS_keyctl, vec![0, u64::MAX - 2, 1]),
        ("unshare", libc::SYS_unshare, vec![of(libc::CLONE_NEWUSER)]),
        ("setns", libc::SYS_setns, vec![0, 0]),
        ("mount", libc::SYS_mount, vec![path, path, path, 0, 0]),
        ("chroot", libc::SYS_chroot, vec![path]),
        ("personality", libc::SYS_personality, vec![u64::from(u32::MAX)]),
        ("seccomp", libc::SYS_seccomp, vec![2, 0, arg]),
        ("setuid", libc::SYS_setuid, vec![0]),
        ("mlockall", libc::SYS_mlockall, vec![3]),
        ("executable memory", libc::SYS_mmap, vec![0, 4096, 5, 0x22, u64::MAX, 0]),
        ("code from memory", libc::SYS_mprotect, vec![arg & !0xfff, 4096, 5]),
        ("dumpable", libc::SYS_prctl, vec![of(libc::PR_SET_DUMPABLE), 1, 0, 0, 0]),
        ("signals of a file", libc::SYS_fcntl, vec![0, of(libc::F_SETOWN), other]),
        ("terminal input", libc::SYS_ioctl, vec![2, libc::TIOCSTI, arg]),
    ]
}

/// Makes a captured process try each call of a list, and returns those with another result than
/// `EPERM`.
fn permitted(captured: &mut Captured, other: u32) -> Result<Vec<String>> {
    permitted_except(captured, other, &[])
}

/// As [`permitted`], without the calls of these names.
fn permitted_except(captured: &mut Captured, other: u32, except: &[&str]) -> Result<Vec<String>> {
    let (arg, path) = (captured.put(0, &[0; 64])?, captured.put(64, b"/etc/passwd\0")?);
    let mut permitted = Vec::new();
    let tried = forbidden(u64::from(other), arg, path);
    for (name, number, arguments) in tried.into_iter().filter(|(name, ..)| !except.contains(name)) {
        let result = captured.call(number, &arguments)?;
        if result != EPERM {
            permitted.push(format!("{name}: {result}"));
        }
    }
    // libc takes clone in its place, whose arguments a filter can check.
    let result = captured.call(libc::SYS_clone3, &[arg, 64])?;
    if result != ENOSYS {
        permitted.push(format!("clone3: {result}"));
    }
    Ok(permitted)
}

/// Calls with which an anchor starts a worker, and a worker confines itself.
const OF_A_START: [&str; 9] = [
    "fork",
    "vfork",
    "clone of a process",
    "pidfd_open",
    "pidfd_send_signal",
    "seccomp",
    "executable memory",
    "code from memory",
    "dumpable",
];

#[test]
fn an_anchor_can_start_its_own_program_only() -> Result<()> {
    let host = Host::new(&[])?;
    let Some(mut anchor) = Host::captured(host.vgpud.anchor(&host.neighbours_vgpu)?)? else {
        return Ok(());
    };
    let before = [condition(host.gpu)?, condition(host.worker)?];
    // Landlock refuses files, and from version 6 on signals: not by the same error.
    let refused = ["open: -13", "openat: -13", "execve: -13"];
    let mut permitted = permitted_except(&mut anchor, host.worker, &OF_A_START)?;
    permitted.retain(|call| !refused.contains(&call.as_str()) && !call.starts_with("tgkill"));
    assert_eq!(permitted, Vec::<String>::new(), "of an anchor");
    assert_eq!([condition(host.gpu)?, condition(host.worker)?], before);
    drop(anchor);
    host.neighbour_works()
}

#[test]
fn a_taken_over_worker_can_call_nothing_that_it_does_not_need() -> Result<()> {
    let host = Host::new(&[])?;
    let Some(mut worker) = Host::captured(host.worker)? else { return Ok(()) };
    let before = [condition(host.gpu)?, condition(host.neighbour)?];
    for other in [host.gpu, host.neighbour] {
        assert_eq!(permitted(&mut worker, other)?, Vec::<String>::new(), "of a worker");
    }
    assert_eq!([condition(host.gpu)?, condition(host.neighbour)?], before);

    // What it needs still works.
    assert_eq!(worker.call(libc::SYS_getpid, &[])?, i64::from(host.worker));
    let arg = worker.put(0, &[0; 64])?;
    assert_eq!(worker.call(libc::SYS_prlimit64, &[0, 7, 0, arg])?, 0, "its own limits");
    assert_eq!(worker.call(libc::SYS_socketpair, &[1, 1, 0, arg])?, 0, "a pair of sockets");
    let anonymous = worker.call(libc::SYS_mmap, &[0, 4096, 3, 0x22, u64::MAX, 0])?;
    assert!(anonymous > 0, "memory: {anonymous}");
    drop(worker);
    host.neighbour_works()
}

#[test]
fn a_taken_over_software_gpu_cannot_leave_its_process() -> Result<()> {
    let host = Host::new(&[])?;
    let Some(mut gpu) = Host::captured(host.gpu)? else { return Ok(()) };
    let permitted = permitted(&mut gpu, host.worker)?;
    drop(gpu);
    assert_eq!(permitted, Vec::<String>::new(), "of a GPU process");
    host.neighbour_works()
}

#[test]
fn filters_apply_to_all_threads_of_workers_and_gpu_processes() -> Result<()> {
    let host = Host::new(&[])?;
    host.neighbour_works()?;
    for pid in [host.worker, host.neighbour, host.gpu] {
        for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
            let status = fs::read_to_string(thread?.path().join("status"))?;
            assert!(status.contains("\nSeccomp:\t2\n"), "{status}");
            assert!(status.contains("\nNoNewPrivs:\t1\n"), "{status}");
        }
    }
    Ok(())
}

#[test]
fn descriptors_in_flight_of_one_worker_do_not_starve_another() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        skipped("only root can start workers as users of their own");
        return Ok(());
    }
    let host = Host::new(&[])?;
    let Some(mut worker) = Host::captured(host.worker)? else { return Ok(()) };
    assert_eq!(send_until_refused(&mut worker)?, -i64::from(Errno::ETOOMANYREFS as i32));
    // The worker holds its descriptors while the others send theirs.
    host.neighbour_works()?;
    let third = host.vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    compute(&host.vgpud.vfio_socket(&third)).context("A new vGPU")?;
    drop(worker);
    Ok(())
}

/// Makes a worker send descriptors to itself until the kernel refuses, and returns the error.
fn send_until_refused(worker: &mut Captured) -> Result<i64> {
    let pair = worker.put(0, &[0; 8])?;
    ensure!(worker.call(libc::SYS_socketpair, &[1, 1, 0, pair])? == 0, "no sockets");
    let from = u64::from(u32::from_ne_bytes(worker.get(pair)?));
    let byte = worker.put(0, &[0; 8])?;
    let iov = worker.put(0x10, &words(&[byte, 1]))?;
    let mut control = words(&[16 + 4 * FDS as u64, 1 << 32 | 1]);
    control.extend(from.to_ne_bytes()[..4].repeat(FDS));
    let len = control.len() as u64;
    let control = worker.put(0x100, &control)?;
    let message = worker.put(0x40, &words(&[0, 0, iov, 1, control, len, 0]))?;
    for _ in 0..200 {
        let sent = worker.call(libc::SYS_sendmsg, &[from, message, libc::MSG_DONTWAIT as u64])?;
        if sent < 0 {
            return Ok(sent);
        }
    }
    Ok(0)
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
