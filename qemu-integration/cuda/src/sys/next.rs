//! The functions of libc that the library replaces and calls itself.
//!
//! Functions at which a thread can be cancelled, and functions that do more than a system call, go
//! to libc. The others are system calls in [`super::kernel`].

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of the next library that has it: of libc, or of another preload library.
pub struct Next<F> {
    symbol: &'static CStr,
    address: AtomicPtr<c_void>,
    function: PhantomData<F>,
}

impl<F: Copy> Next<F> {
    /// # Safety
    /// `F` is the type of a pointer to the function `symbol`.
    const unsafe fn new(symbol: &'static CStr) -> Self {
        Self { symbol, address: AtomicPtr::new(null_mut()), function: PhantomData }
    }

    /// Finds the function.
    fn resolve(&self) {
        // SAFETY: the symbol is a string with a terminator.
        let address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.symbol.as_ptr()) };
        self.address.store(address, Ordering::Release);
    }

    /// Returns the function, or `None` before the library is initialized.
    pub fn get(&self) -> Option<F> {
        let address = self.address.load(Ordering::Acquire);
        // SAFETY: by the contract of `new`, the address has the type F, a pointer.
        (!address.is_null())
            .then(|| unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }
}

type Path = *const c_char;
type File = *mut libc::FILE;

macro_rules! next {
    ($($name:ident, $symbol:literal, $type:ty;)*) => {
        $(
            /// The function of this name.
            // SAFETY: the type is that of libc's declaration.
            pub static $name: Next<$type> = unsafe { Next::new($symbol) };
        )*

        /// Finds all functions.
        pub fn resolve() {
            $($name.resolve();)*
        }
    };
}

next!(
    OPEN, c"open", unsafe extern "C-unwind" fn(Path, c_int, ...) -> c_int;
    OPENAT, c"openat", unsafe extern "C-unwind" fn(c_int, Path, c_int, ...) -> c_int;
    CLOSE, c"close", unsafe extern "C-unwind" fn(c_int) -> c_int;
    FCNTL, c"fcntl", unsafe extern "C-unwind" fn(c_int, c_int, ...) -> c_int;
    POLL, c"poll", unsafe extern "C-unwind" fn(*mut libc::pollfd, libc::nfds_t, c_int) -> c_int;
    PPOLL, c"ppoll", unsafe extern "C-unwind" fn(
        *mut libc::pollfd, libc::nfds_t, *const libc::timespec, *const libc::sigset_t,
    ) -> c_int;
    FOPEN, c"fopen", unsafe extern "C-unwind" fn(Path, Path) -> File;
    REMOVE, c"remove", unsafe extern "C-unwind" fn(Path) -> c_int;
    FACCESSAT, c"faccessat", unsafe extern "C-unwind" fn(c_int, Path, c_int, c_int) -> c_int;
);
