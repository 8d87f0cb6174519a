//! System call filter of workers and GPU processes (seccomp(2)).
//!
//! A list of the calls that the processes and the C library make. Other calls fail with `EPERM` and
//! do not end the process: a C library that makes a call which is missing here must not cost a VM
//! its device (docs/decisions/0015-system-call-filter.md). Arguments are checked where a call could
//! reach beyond the process.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// What a process needs beyond the calls of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A worker. `has_device` is true if its client of the GPU is a device node of its own.
    Worker {
        /// Calls the driver of the GPU.
        has_device: bool,
    },
    /// An anchor, which starts workers. They inherit its filter, and add their own.
    Anchor {
        /// Its workers call the driver of the GPU.
        has_device: bool,
    },
    /// A GPU process.
    GpuProcess {
        /// Calls the driver of a device.
        has_device: bool,
        /// Opens files.
        opens_files: bool,
    },
}

impl Role {
    fn has_device(self) -> bool {
        match self {
            Self::Worker { has_device }
            | Self::Anchor { has_device }
            | Self::GpuProcess { has_device, .. } => has_device,
        }
    }
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls without a check of their arguments.
const PLAIN: [i64; 84] = [
    // Memory. mmap and mprotect are below.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munmap,
    // Descriptors that the process has.
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_fallocate,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    // Memory of programs on the vGPU.
    libc::SYS_ftruncate,
    libc::SYS_memfd_create,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    // Names of descriptors in /proc/self/fd.
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    // Sockets that the process has. A new one cannot be made, except for a pair.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    // Events and time.
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_time,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    // Threads and signals of the process.
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getcpu,
    // Ids of programs' files. A C library may ask the kernel, or its page in the process.
    libc::SYS_getrandom,
    libc::SYS_get_robust_list,
    libc::SYS_gettid,
    libc::SYS_membarrier,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_sigaltstack,
    // What the process is.
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_getuid,
    libc::SYS_sysinfo,
    libc::SYS_uname,
];

/// Newer calls that a C library tries first. It takes the older one, whose arguments a filter can
/// check or which is not needed, if the kernel seems to lack the newer one.
const SUPERSEDING: [i64; 4] =
    [libc::SYS_clone3, libc::SYS_epoll_pwait2, libc::SYS_faccessat2, libc::SYS_openat2];

/// First number of the calls that kernels have got since this list was written, and the number
/// after the last one that a C library may try.
const LATER: std::ops::Range<i64> = 470..512;

/// Calls of an anchor that starts a worker, and of the worker until it restricts itself. Landlock
/// restricts what they can open, run and signal.
const STARTING: [i64; 26] = [
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_capget,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_execve,
    libc::SYS_faccessat,
    libc::SYS_fork,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_restrict_self,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_newfstatat,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_pipe2,
    libc::SYS_prctl,
    libc::SYS_seccomp,
    libc::SYS_setrlimit,
    libc::SYS_setsid,
    libc::SYS_statx,
    libc::SYS_wait4,
    libc::SYS_waitid,
];
/// Flags of a process with namespaces of its own.
const NAMESPACES: u64 = (libc::CLONE_NEWNS | libc::CLONE_NEWCGROUP | libc::CLONE_NEWUTS) as u64
    | (libc::CLONE_NEWIPC | libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNET) as u64;

/// Flags of a new thread, among those in [`THREAD_MASK`].
const THREAD: u64 = (libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND) as u64;
/// Flags by which a thread differs from a process, and from one with namespaces of its own. The
/// lowest byte is a new process' signal.
const THREAD_MASK: u64 = THREAD
    | 0xff
    | (libc::CLONE_VFORK | libc::CLONE_PARENT | libc::CLONE_PTRACE | libc::CLONE_PIDFD) as u64
    | (libc::CLONE_NEWNS | libc::CLONE_NEWCGROUP | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC) as u64
    | (libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNET) as u64;

/// Commands of fcntl. Those that send signals to another process are left out.
const FCNTL: [libc::c_int; 13] = [
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
    libc::F_GETPIPE_SZ,
];

/// Requests of ioctl for any descriptor.
const IOCTL: [u64; 6] =
    [libc::FIONBIO, libc::FIONREAD, libc::FIOCLEX, libc::TCGETS, libc::TIOCGWINSZ, libc::TIOCOUTQ];

/// `PR_SET_VMA`: the C library names its memory.
const PR_SET_VMA: u64 = 0x5356_4d41;

/// Requests of prctl.
const PRCTL: [u64; 5] = [
    libc::PR_SET_NAME as u64,
    libc::PR_GET_NAME as u64,
    libc::PR_SET_TIMERSLACK as u64,
    libc::PR_GET_TIMERSLACK as u64,
    PR_SET_VMA,
];

/// Makes all threads of this process subject to the filter of its role.
pub fn restrict(role: Role) -> seccompiler::Result<()> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let allow = SeccompAction::Allow;
    // The kernel takes the stricter answer of two filters, of which the second forbids the first.
    let missing = SUPERSEDING.into_iter().chain(LATER).map(|call| (call, Vec::new())).collect();
    let missing = compile(missing, allow.clone(), error(libc::ENOSYS), arch)?;
    let allowed = compile(allowed(role)?, error(libc::EPERM), allow, arch)?;
    seccompiler::apply_filter_all_threads(&missing)?;
    seccompiler::apply_filter_all_threads(&allowed)
}

fn error(errno: libc::c_int) -> SeccompAction {
    SeccompAction::Errno(errno.cast_unsigned())
}

fn compile(
    rules: Rules,
    otherwise: SeccompAction,
    action: SeccompAction,
    arch: TargetArch,
) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(rules, otherwise, action, arch)?.try_into()
}

/// Returns the calls that a role may make.
fn allowed(role: Role) -> Result<Rules, BackendError> {
    let own_pid = u64::from(std::process::id());
    let mut rules: Rules = PLAIN.into_iter().map(|call| (call, Vec::new())).collect();
    // The other filter answers these.
    rules.extend(SUPERSEDING.into_iter().chain(LATER).map(|call| (call, Vec::new())));

    rules.insert(libc::SYS_clone, any_of(0, [SeccompCmpOp::MaskedEq(THREAD_MASK)], THREAD)?);
    // No memory becomes code.
    let no_code = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    rules.insert(libc::SYS_mmap, any_of(2, [no_code.clone()], 0)?);
    rules.insert(libc::SYS_mprotect, any_of(2, [no_code], 0)?);
    // abort and raise.
    rules.insert(libc::SYS_tgkill, equal(0, [own_pid])?);
    rules.insert(libc::SYS_kill, equal(0, [own_pid])?);
    rules.insert(libc::SYS_prlimit64, equal(0, [0, own_pid])?);
    rules.insert(libc::SYS_prctl, equal(0, PRCTL)?);
    rules.insert(
        libc::SYS_fcntl,
        equal(1, FCNTL.map(|command| u64::from(command.cast_unsigned())))?,
    );
    let ioctl = if role.has_device() { Vec::new() } else { equal(1, IOCTL)? };
    rules.insert(libc::SYS_ioctl, ioctl);
    // Of the descriptor itself.
    let of_descriptor = libc::AT_EMPTY_PATH as u64;
    let flag = SeccompCmpOp::MaskedEq(of_descriptor);
    rules.insert(libc::SYS_statx, any_of(2, [flag.clone()], of_descriptor)?);
    rules.insert(libc::SYS_newfstatat, any_of(3, [flag], of_descriptor)?);
    rules.insert(libc::SYS_socketpair, socket_pairs()?);
    if let Role::GpuProcess { opens_files: true, .. } = role {
        rules.insert(libc::SYS_openat, Vec::new());
    }
    if let Role::Anchor { .. } = role {
        rules.extend(STARTING.map(|call| (call, Vec::new())));
        let no_namespace = SeccompCmpOp::MaskedEq(NAMESPACES);
        rules.insert(libc::SYS_clone, any_of(0, [no_namespace], 0)?);
        // Of a worker, which has another number.
        rules.insert(libc::SYS_tgkill, Vec::new());
        rules.insert(libc::SYS_prlimit64, equal(0, [0])?);
    }
    Ok(rules)
}

/// Returns the unnamed sockets that processes make. Neither kind can be sent to another address.
fn socket_pairs() -> Result<Vec<SeccompRule>, BackendError> {
    let kinds = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET];
    let rule = |kind: libc::c_int| {
        let kind_of_socket = SeccompCmpOp::MaskedEq(0xf);
        SeccompRule::new(vec![
            condition(0, SeccompCmpOp::Eq, libc::AF_UNIX as u64)?,
            condition(1, kind_of_socket, u64::from(kind.cast_unsigned()))?,
        ])
    };
    kinds.into_iter().map(rule).collect()
}

/// Returns rules for an argument that has one of `values`.
fn equal(
    argument: u8,
    values: impl IntoIterator<Item = u64>,
) -> Result<Vec<SeccompRule>, BackendError> {
    let rule = |value| SeccompRule::new(vec![condition(argument, SeccompCmpOp::Eq, value)?]);
    values.into_iter().map(rule).collect()
}

/// Returns rules for an argument of which one of `operators` accepts `value`.
fn any_of<const N: usize>(
    argument: u8,
    operators: [SeccompCmpOp; N],
    value: u64,
) -> Result<Vec<SeccompRule>, BackendError> {
    let rule = |operator| SeccompRule::new(vec![condition(argument, operator, value)?]);
    operators.into_iter().map(rule).collect()
}

/// Returns a condition on the lower half of an argument. All arguments that are checked are of type
/// `int`, or are flags of which the kernel reads that half.
fn condition(
    argument: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_of_all_roles_compile() {
        let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
        for role in [
            Role::Worker { has_device: false },
            Role::Worker { has_device: true },
            Role::Anchor { has_device: true },
            Role::GpuProcess { has_device: true, opens_files: true },
        ] {
            let rules = allowed(role).unwrap();
            let program = compile(rules, error(libc::EPERM), SeccompAction::Allow, arch).unwrap();
            assert!(program.len() < 4096, "{}", program.len());
        }
    }

    #[test]
    fn a_worker_may_ask_for_random_bytes() {
        // A static program, or one on an older C library, asks the kernel for the ids of files.
        let worker = allowed(Role::Worker { has_device: true }).unwrap();
        assert!(worker.contains_key(&libc::SYS_getrandom));
    }

    #[test]
    fn only_roles_that_need_them_have_files_and_drivers() {
        let worker = allowed(Role::Worker { has_device: false }).unwrap();
        for call in [libc::SYS_openat, libc::SYS_open, libc::SYS_socket] {
            assert!(!worker.contains_key(&call), "{call}");
        }
        assert!(!worker[&libc::SYS_ioctl].is_empty());
        let display = Role::GpuProcess { has_device: true, opens_files: true };
        let display = allowed(display).unwrap();
        assert!(display.contains_key(&libc::SYS_openat) && display[&libc::SYS_ioctl].is_empty());
    }
}
