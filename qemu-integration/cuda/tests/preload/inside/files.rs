//! Opening, status, descriptors and events of files of the driver.

use std::ffi::{CStr, CString, c_void};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::super::fake_worker::number;
use super::{MARK, counts, ioctl, named, open};

programs! {
    fn files_of_the_driver_look_as_they_do_on_a_host() {
        for (path, major, minor) in [
            ("/dev/nvidiactl", 195, Some(255)),
            ("/dev/nvidia0", 195, Some(0)),
            ("/dev/nvidia-uvm", 0, None),
            ("/dev/char/195:255", 195, Some(255)),
        ] {
            let status = fs::metadata(path).unwrap();
            assert!(status.file_type().is_char_device(), "{path}");
            if let Some(minor) = minor {
                let device = status.rdev();
                assert_eq!((libc::major(device), libc::minor(device)), (major, minor), "{path}");
            }
            let path = CString::new(path).unwrap();
            assert_eq!(unsafe { libc::access(path.as_ptr(), libc::R_OK | libc::W_OK) }, 0);
            let fd = open(path.to_str().unwrap());
            let status = nix::sys::stat::fstat(&fd).unwrap();
            assert_eq!(status.st_mode & libc::S_IFMT, libc::S_IFCHR);
            let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
            assert_eq!(flags & libc::FD_CLOEXEC, 0, "it was not asked for");
        }
        for path in ["/dev/nvidia1", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"] {
            let error = fs::File::open(path).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOENT), "{path}");
            assert!(!fs::exists(path).unwrap(), "{path}");
        }
        let made = unsafe { libc::mknod(c"/dev/nvidia0".as_ptr(), libc::S_IFCHR, 0) };
        assert_eq!((made, Errno::last()), (-1, Errno::EPERM));
        assert_eq!(unsafe { libc::unlink(c"/dev/char/195:255".as_ptr()) }, 0);
        assert_eq!(unsafe { libc::remove(c"/dev/nvidia0".as_ptr()) }, 0);
        let (target, link) = (c"../nvidiactl".as_ptr(), c"/dev/char/195:255".as_ptr());
        assert_eq!(unsafe { libc::symlink(target, link) }, 0);
        assert_eq!(unsafe { libc::chmod(c"/dev/nvidia0".as_ptr(), 0o600) }, 0);
        assert!(!fs::exists("/usr/bin/nvidia-modprobe").unwrap());
        assert_eq!(fs::read_link("/dev/char/195:255").unwrap().to_str(), Some("../nvidiactl"));
        let fd = fs::File::open("/dev/nvidiactl").unwrap();
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
        assert_eq!(counts(fd.as_raw_fd()), (1, 1), "closed files are closed at once");
    }

    fn files_in_proc_are_the_workers() {
        let text = "ResmanDebugLevel: 4294967295\n";
        assert_eq!(fs::read_to_string("/proc/driver/nvidia/params").unwrap(), text);
        let stream =
            unsafe { libc::fopen(c"/proc/driver/nvidia/params".as_ptr(), c"r".as_ptr()) };
        assert!(!stream.is_null());
        let mut line = [0; 64];
        assert!(!unsafe { libc::fgets(line.as_mut_ptr(), 64, stream) }.is_null());
        assert_eq!(unsafe { CStr::from_ptr(line.as_ptr()) }.to_str(), Ok(text));
        assert_eq!(unsafe { libc::fclose(stream) }, 0);
        assert!(fs::metadata("/proc/driver/nvidia/gpus/0000:01:00.0").unwrap().is_dir());
        assert!(fs::metadata("/proc/driver/nvidia/params").unwrap().is_file());
        for path in ["/proc/driver/nvidia/version", "/proc/driver/nvidia-nvlink/permissions"] {
            assert_eq!(fs::metadata(path).unwrap_err().raw_os_error(), Some(libc::ENOENT));
            let name = CString::new(path).unwrap();
            assert!(unsafe { libc::fopen(name.as_ptr(), c"r".as_ptr()) }.is_null());
        }
        let denied = fs::File::create("/proc/driver/nvidia/params").unwrap_err();
        assert_eq!(denied.raw_os_error(), Some(libc::EACCES));
        let devices = fs::read_to_string("/proc/devices").unwrap();
        assert!(devices.contains("195 nvidia") && devices.contains(" nvidia-uvm\n"));
        assert_eq!(fs::read_to_string("/sys/module/nvidia/initstate").unwrap(), "live\n");
    }

    fn descriptors_in_arguments_are_named() {
        let (control, gpu) = (open("/dev/nvidiactl"), open("/dev/nvidia0"));
        let named = |fd| named(&control, fd);
        let ids = [named(control.as_raw_fd()), named(gpu.as_raw_fd())];
        assert!(ids[0] != 0 && ids[1] != 0 && ids[0] != ids[1]);
        for other in [-1, 0, 1000] {
            assert_eq!(named(other), 0);
        }
        // Closed past the library, and used again.
        let number = gpu.as_raw_fd();
        let null = fs::File::open("/dev/null").unwrap();
        unsafe { libc::syscall(libc::SYS_dup3, null.as_raw_fd(), number, 0) };
        assert_eq!(named(number), 0);
        let mut argument = [0_u64; 2];
        assert_eq!(ioctl(number, number::COUNT, &mut argument), Err(Errno::ENOTTY));
    }

    fn copies_of_descriptors_are_the_same_file() {
        let fd = open("/dev/nvidiactl");
        let raw = fd.as_raw_fd();
        let copies = unsafe {
            [
                libc::dup(raw),
                libc::dup2(raw, 100),
                libc::dup3(raw, 101, libc::O_CLOEXEC),
                libc::fcntl(raw, libc::F_DUPFD, 50),
                libc::fcntl(raw, libc::F_DUPFD_CLOEXEC, 60),
            ]
        };
        drop(fd);
        for copy in copies {
            assert_eq!(counts(copy), (1, 1));
            // One after another, until none is left.
            if copy != copies[4] {
                assert_eq!(unsafe { libc::close(copy) }, 0);
            }
        }
        assert_eq!(unsafe { libc::dup2(copies[4], copies[4]) }, copies[4]);
        let other = fs::File::open("/dev/null").unwrap();
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), copies[4]) }, copies[4]);
        assert_eq!(ioctl(copies[4], number::COUNT, &mut [0_u32; 2]), Err(Errno::ENOTTY));
    }

    fn errors_are_errno() {
        let fd = open("/dev/nvidiactl");
        let mut argument = [0_u8; 16];
        assert_eq!(ioctl(fd.as_raw_fd(), number::ERROR, &mut argument), Err(Errno::EBUSY));
        assert_eq!(argument[0], 9, "results are written, too");
        assert_eq!(ioctl(fd.as_raw_fd(), 0x7f, &mut argument), Err(Errno::ENOTTY));
        assert_eq!(ioctl(fd.as_raw_fd(), number::ENDLESS, &mut argument), Err(Errno::EIO));
        let null = null_mut::<c_void>();
        let request = 3 << 30 | 16 << 16 | 0x4600 | u64::from(number::ERROR);
        assert_eq!(unsafe { libc::ioctl(fd.as_raw_fd(), request, null) }, -1);
        assert_eq!(Errno::last(), Errno::EFAULT);
        assert_eq!(counts(fd.as_raw_fd()), (1, 1));
    }

    fn packets_are_events() {
        let fd = open("/dev/nvidia0");
        let raw = fd.as_raw_fd();
        let entry = |events| libc::pollfd { fd: raw, events, revents: 0 };
        let poll = |events, timeout| {
            let mut fds = [libc::pollfd { fd: -1, events: 0, revents: 7 }, entry(events)];
            let ready = unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout) };
            assert_eq!(fds[1].events, events);
            (ready, fds[1].revents)
        };
        let event = || ioctl(raw, number::EVENT, &mut [0_u8; 16]).unwrap();
        assert_eq!(poll(libc::POLLIN, 0), (0, 0));
        event();
        assert_eq!(poll(libc::POLLIN | libc::POLLPRI, 1000), (1, libc::POLLIN | libc::POLLPRI));
        assert_eq!(poll(libc::POLLIN, 0), (0, 0), "poll() clears events");
        event();
        assert_eq!(poll(libc::POLLPRI, -1), (1, libc::POLLPRI));
        event();
        assert_eq!(poll(0, 0), (0, 0));
        let mut fds = [entry(libc::POLLIN)];
        let time = libc::timespec { tv_sec: 1, tv_nsec: 0 };
        assert_eq!(unsafe { libc::ppoll(fds.as_mut_ptr(), 1, &raw const time, null()) }, 1);
        let start = Instant::now();
        assert_eq!(poll(libc::POLLIN, 30), (0, 0));
        assert!(start.elapsed() >= Duration::from_millis(30));
        // A thread waits for an event that another causes.
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| poll(libc::POLLIN, 10_000));
            std::thread::sleep(Duration::from_millis(20));
            event();
            assert_eq!(waits.join().unwrap(), (1, libc::POLLIN));
        });
    }
}
