//! Threads, children, and descriptors of other processes.

use std::fs;
use std::io::Read;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::super::fake_worker::number;
use super::{MARK, counts, in_child, ioctl, named, open, private, share};

programs! {
    fn threads_take_turns() {
        let fd = open("/dev/nvidiactl");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        ioctl(fd.as_raw_fd(), number::SUM, &mut [1_u64, 0]).unwrap();
                        let other = open("/dev/nvidia0");
                        ioctl(other.as_raw_fd(), number::SUM, &mut [1_u64, 0]).unwrap();
                    }
                });
            }
        });
        let mut sum = [0_u64; 2];
        ioctl(fd.as_raw_fd(), number::SUM, &mut sum).unwrap();
        assert_eq!(sum[1], 8 * 200 * 2);
        assert_eq!(counts(fd.as_raw_fd()), (1, 1));
    }

    fn a_child_has_a_connection_of_its_own() {
        let fd = open("/dev/nvidiactl");
        assert_eq!(counts(fd.as_raw_fd()), (1, 1));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Another thread makes requests all the time: it may hold the lock at a fork.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    ioctl(fd.as_raw_fd(), number::SUM, &mut [1_u64, 0]).unwrap();
                }
            });
            for child in 0..20 {
                in_child(|| {
                    assert_eq!(counts(fd.as_raw_fd()), (1, child + 2));
                    let own = open("/dev/nvidia0");
                    assert_eq!(counts(own.as_raw_fd()), (2, child + 2));
                });
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(counts(fd.as_raw_fd()), (1, 21));
    }

    fn a_vfork_child_leaves_its_parents_files() {
        extern "C" fn child(files: *mut libc::c_void) -> i32 {
            // As programs that start others do.
            for fd in unsafe { *files.cast::<[i32; 2]>() } {
                unsafe { libc::close(fd) };
            }
            0
        }
        let files = [open("/dev/nvidiactl"), open("/dev/nvidia0")];
        let mut raw = files.each_ref().map(AsRawFd::as_raw_fd);
        let mut stack = vec![0_u128; 1 << 14];
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        let top = stack.as_mut_ptr_range().end.cast();
        let pid = unsafe { libc::clone(child, top, flags, raw.as_mut_ptr().cast()) };
        assert!(pid > 0);
        let mut status = 0;
        assert_eq!((unsafe { libc::waitpid(pid, &raw mut status, 0) }, status), (pid, 0));
        for fd in raw {
            assert_eq!(counts(fd), (2, 1));
        }
    }

    fn a_descriptor_from_another_process_is_identified() {
        let control = open("/dev/nvidiactl");
        let named = |fd| named(&control, fd);
        // As SCM_RIGHTS does: a descriptor that the library has not seen.
        let copy = unsafe { libc::syscall(libc::SYS_dup, control.as_raw_fd()) } as RawFd;
        assert_eq!(ioctl(copy, number::COUNT, &mut [0_u32; 2]), Err(Errno::ENOTTY));
        assert_eq!(named(copy), named(control.as_raw_fd()));
        assert_eq!(counts(copy), (1, 1));
        // Sockets of the program are no files.
        let (family, flags) = (AddressFamily::Unix, SockFlag::empty());
        let (ours, _theirs) = socketpair(family, SockType::SeqPacket, None, flags).unwrap();
        assert_eq!(named(ours.as_raw_fd()), 0);
    }

    fn threads_are_cancelled_where_libc_cancels_them() {
        extern "C-unwind" fn waits(fd: *mut libc::c_void) -> *mut libc::c_void {
            let mut entry = libc::pollfd { fd: fd as i32, events: libc::POLLIN, revents: 0 };
            unsafe { libc::poll(&raw mut entry, 1, 60_000) };
            std::ptr::null_mut()
        }
        unsafe extern "C" {
            fn pthread_create(
                thread: *mut libc::pthread_t,
                attributes: *const libc::pthread_attr_t,
                start: extern "C-unwind" fn(*mut libc::c_void) -> *mut libc::c_void,
                argument: *mut libc::c_void,
            ) -> i32;
        }
        let (reader, _writer) = std::io::pipe().unwrap();
        let fd = reader.as_raw_fd() as *mut libc::c_void;
        let mut thread = 0;
        let no_attributes = std::ptr::null();
        assert_eq!(unsafe { pthread_create(&raw mut thread, no_attributes, waits, fd) }, 0);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(unsafe { libc::pthread_cancel(thread) }, 0);
        let mut result = std::ptr::null_mut();
        assert_eq!(unsafe { libc::pthread_join(thread, &raw mut result) }, 0);
        // PTHREAD_CANCELED
        assert_eq!(result.addr(), usize::MAX);
    }

    fn a_lost_connection_is_made_again() {
        let fd = open("/dev/nvidiactl");
        assert_eq!(ioctl(fd.as_raw_fd(), number::LOST, &mut [0_u32; 2]), Err(Errno::EIO));
        assert_eq!(counts(fd.as_raw_fd()), (1, 2));
    }

    /// As daemons do.
    fn closing_all_descriptors_does_no_harm() {
        let fd = open("/dev/nvidiactl");
        assert_eq!(counts(fd.as_raw_fd()), (1, 1));
        let at = private(1);
        share(&fd, at, 1).unwrap();
        std::mem::forget(fd);
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
        let mut files: Vec<_> =
            (0..500).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        let fd = open("/dev/nvidiactl");
        assert_eq!(counts(fd.as_raw_fd()), (1, 2));
        assert_eq!(share(&fd, private(1), 1), Ok((1, 0)));
        for file in &mut files {
            let mut byte = [0];
            assert_eq!(file.read(&mut byte).unwrap(), 0, "still the program's file");
        }
    }

    /// The test kills this process.
    fn waits_with_open_files() {
        let _files = [open("/dev/nvidiactl"), open("/dev/nvidia0"), open("/dev/nvidia-uvm")];
        std::thread::sleep(Duration::from_secs(30));
    }
}
