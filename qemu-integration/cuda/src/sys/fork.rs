//! Handlers of `fork()`.

/// Registers handlers that run after `fork()`, in the parent and in the child.
///
/// The child's handler runs in a process with one thread. The memory allocator works there; locks
/// that other threads of the parent held stay held.
pub fn register(parent: extern "C" fn(), child: extern "C" fn()) {
    // SAFETY: the handlers are functions without arguments, for the life of the process: the
    // library is never unloaded, as the loader has it in its list of preloaded ones.
    unsafe { libc::pthread_atfork(None, Some(parent), Some(child)) };
}
