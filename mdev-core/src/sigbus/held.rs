//! Threads that page faults of a guarded mapping hold.
//!
//! A client that punches one hole after the other into the file of its guest's memory keeps a page
//! fault of another process in the kernel for as long as it likes: the fault waits for the end of a
//! hole, and then finds the next one begun. The kernel handles signals in between. The handler of
//! [`HeldThread::release`] replaces the mapping by zeros, as SIGBUS's does, which ends the access.

use std::cell::Cell;
use std::ffi::c_int;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering, compiler_fence};

use super::{GuardedMapping, SLOTS, map_zeros};

/// A signal without another use here, which is ignored by default.
const SIGNAL: c_int = libc::SIGURG;

/// No mapping.
const NONE: usize = usize::MAX;

/// State of a thread for its signal handler.
struct State {
    /// Slots of the mappings that the thread accesses: for a copy, of its source and its target.
    accessed: [AtomicUsize; 2],
    /// Number of accesses so far.
    accesses: AtomicU64,
    /// Number of accesses, and times that the thread had slept, when the last signal arrived.
    last: (AtomicU64, AtomicI64),
}

thread_local! {
    static STATE: State = const {
        State {
            accessed: [const { AtomicUsize::new(NONE) }; 2],
            accesses: AtomicU64::new(0),
            last: (AtomicU64::new(0), AtomicI64::new(0)),
        }
    };
}

/// Access of this thread to a mapping, until it is dropped.
#[derive(Debug)]
#[must_use = "the access ends when this is dropped"]
pub struct Access<'a> {
    index: usize,
    mapping: PhantomData<(&'a GuardedMapping, Cell<()>)>,
}

impl GuardedMapping {
    /// Notes that this thread accesses the mapping, so that [`HeldThread::release`] can end the
    /// access. At most two accesses at a time are noted.
    #[inline]
    pub fn access(&self) -> Access<'_> {
        let index = STATE.with(|state| {
            let index = usize::from(state.accessed[0].load(Ordering::Relaxed) != NONE);
            state.accessed[index].store(self.slot, Ordering::Relaxed);
            let accesses = state.accesses.load(Ordering::Relaxed);
            state.accesses.store(accesses.wrapping_add(1), Ordering::Relaxed);
            index
        });
        // For the handler, which runs on the same thread.
        compiler_fence(Ordering::SeqCst);
        Access { index, mapping: PhantomData }
    }
}

impl Drop for Access<'_> {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        STATE.with(|state| state.accessed[self.index].store(NONE, Ordering::Relaxed));
    }
}

/// A thread whose accesses another thread can end.
#[derive(Clone, Copy, Debug)]
pub struct HeldThread {
    process: libc::pid_t,
    thread: libc::pid_t,
}

impl HeldThread {
    /// Returns the calling thread.
    ///
    /// # Errors
    ///
    /// Fails if the process can have no signal handler.
    pub fn current() -> io::Result<Self> {
        install_handler()?;
        // SAFETY: these calls only return numbers.
        let (process, thread) = unsafe { (libc::getpid(), libc::gettid()) };
        Ok(Self { process, thread })
    }

    /// Ends an access in which the thread was at the last call, and in which it has slept since
    /// then: its mapping is poisoned.
    ///
    /// A thread that merely does not get a core has not slept. Without effect after the thread's
    /// end.
    pub fn release(&self) {
        // SAFETY: sends a signal to a thread of this process, which handles or ignores it.
        unsafe { libc::syscall(libc::SYS_tgkill, self.process, self.thread, SIGNAL) };
    }
}

static INSTALLED: OnceLock<Option<i32>> = OnceLock::new();

fn install_handler() -> io::Result<()> {
    let failure = INSTALLED.get_or_init(|| {
        // SAFETY: an all-zero sigaction is a valid value.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        let handler: extern "C" fn(c_int) = on_signal;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        // SAFETY: the handler is async-signal-safe: atomics and system calls only.
        let rc = unsafe { libc::sigaction(SIGNAL, &raw const action, ptr::null_mut()) };
        if rc == 0 { None } else { io::Error::last_os_error().raw_os_error() }
    });
    failure.map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code)))
}

extern "C" fn on_signal(_: c_int) {
    // SAFETY: errno's location is valid in every thread; errno is restored for the interrupted
    // code.
    let errno = unsafe { *libc::__errno_location() };
    // The state has no destructor, so it exists for as long as the thread.
    let _ = STATE.try_with(|state| {
        let (accesses, sleeps) = (state.accesses.load(Ordering::Relaxed), sleeps());
        let same = state.last.0.swap(accesses, Ordering::Relaxed) == accesses;
        let slept = state.last.1.swap(sleeps, Ordering::Relaxed) != sleeps;
        if same && slept {
            state.accessed.iter().for_each(|slot| replace(slot.load(Ordering::Relaxed)));
        }
    });
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Replaces a mapping that this thread accesses.
fn replace(slot: usize) {
    let Some(slot) = SLOTS.get(slot) else { return };
    let (start, len) = (slot.start.load(Ordering::SeqCst), slot.len.load(Ordering::SeqCst));
    slot.poisoned.store(true, Ordering::Release);
    map_zeros(start, len, libc::PROT_READ | libc::PROT_WRITE);
}

/// Returns how often this thread has slept.
fn sleeps() -> i64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: fills in memory of the right type, for which all zeros are valid, too.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_nvcsw
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    use vm_memory::Bytes;

    use super::*;
    use crate::sigbus::Protection;
    use crate::testing::memory;
    use crate::units::PAGE_SIZE;

    fn mapping() -> Arc<GuardedMapping> {
        let file = memory(PAGE_SIZE);
        let mapping =
            GuardedMapping::map(file.as_fd(), 0, PAGE_SIZE as usize, Protection::ReadWrite);
        Arc::new(mapping.unwrap())
    }

    /// Starts a thread that runs `work` with accesses to mappings until it is told to stop.
    fn during(
        accessed: &[Arc<GuardedMapping>],
        work: impl Fn() + Send + 'static,
        test: impl FnOnce(HeldThread),
    ) {
        let accessed = accessed.to_vec();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (sender, thread) = mpsc::channel();
        let runs = thread::spawn(move || {
            let _accesses: Vec<_> = accessed.iter().map(|mapping| mapping.access()).collect();
            sender.send(HeldThread::current().unwrap()).unwrap();
            while !stopped.load(Ordering::Relaxed) {
                work();
            }
        });
        test(thread.recv().unwrap());
        stop.store(true, Ordering::Relaxed);
        runs.join().unwrap();
    }

    fn wait(done: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        while !done() && start.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(1));
        }
        done()
    }

    #[test]
    fn accesses_of_a_thread_that_sleeps_are_ended() {
        let [one, two, other] = [mapping(), mapping(), mapping()];
        for mapping in [&one, &two, &other] {
            mapping.slice().write_obj(7u32, 0).unwrap();
        }
        let sleep = || thread::sleep(Duration::from_millis(1));
        during(&[Arc::clone(&one), Arc::clone(&two)], sleep, |thread| {
            assert!(wait(|| {
                thread.release();
                one.poisoned() && two.poisoned()
            }));
        });
        let read = |mapping: &GuardedMapping| mapping.slice().read_obj::<u32>(0).unwrap();
        assert_eq!([&one, &two, &other].map(|mapping| read(mapping)), [0, 0, 7]);
        assert!(!other.poisoned());
        // It is over for this thread.
        drop(one.access());
    }

    #[test]
    fn a_thread_that_works_and_one_without_an_access_lose_nothing() {
        let accessed = mapping();
        during(&[Arc::clone(&accessed)], std::hint::spin_loop, |thread| {
            for _ in 0..50 {
                thread::sleep(Duration::from_millis(1));
                thread.release();
            }
        });
        assert!(!accessed.poisoned(), "the thread has not slept");
        let again = Arc::clone(&accessed);
        let sleeps_between_accesses = move || {
            drop(again.access());
            thread::sleep(Duration::from_micros(100));
        };
        during(&[], sleeps_between_accesses, |thread| {
            for _ in 0..50 {
                thread::sleep(Duration::from_millis(1));
                thread.release();
            }
        });
        assert!(!accessed.poisoned(), "each access was short");
    }

    #[test]
    fn a_thread_that_has_ended_is_no_error() {
        let ended = thread::spawn(HeldThread::current).join().unwrap().unwrap();
        ended.release();
    }
}
