//! Arguments, mappings and shared memory.

use std::ffi::c_void;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::null_mut;

use nix::errno::Errno;

use super::super::fake_worker::{MAPPED, number};
use super::{MARK, PAGE, in_child, ioctl, open, private, share};

programs! {
    fn arguments_and_blocks_reach_the_worker_and_come_back() {
        #[repr(C)]
        struct Control {
            head: [u32; 4],
            block: *mut u8,
            len: u32,
            status: u32,
        }
        let fd = open("/dev/nvidiactl");
        for len in [0, 1, 4096, 65536] {
            let mut block = vec![7_u8; len];
            let at = block.as_mut_ptr();
            let mut control = Control { head: [0; 4], block: at, len: len as u32, status: 0 };
            ioctl(fd.as_raw_fd(), number::BLOCK, &mut control).unwrap();
            assert_eq!(block, vec![8; len]);
        }
        let uvm = open("/dev/nvidia-uvm");
        let mut argument = [0_u8; 9264];
        let request = u64::from(number::UVM);
        let result = unsafe { libc::ioctl(uvm.as_raw_fd(), request, argument.as_mut_ptr()) };
        assert_eq!((result, argument[9263]), (0, 1));
        let none = null_mut::<c_void>();
        assert_eq!(unsafe { libc::ioctl(uvm.as_raw_fd(), 0x3000_0002, none) }, 0);
    }

    fn memory_is_fetched_and_written() {
        let fd = open("/dev/nvidia0");
        let mut second = [1_u8; 16];
        let mut first = Box::new([second.as_mut_ptr() as u64, 0, 0]);
        let mut argument = [first.as_mut_ptr() as u64, 24];
        ioctl(fd.as_raw_fd(), number::FETCH, &mut argument).unwrap();
        assert_eq!(second, [7; 16]);
        // A wrong pointer is an error and no signal.
        unsafe { first.as_mut_ptr().write_volatile(16) };
        let error = ioctl(fd.as_raw_fd(), number::FETCH, &mut argument).unwrap_err();
        assert_eq!(error, Errno::EFAULT);
        // A descriptor that is none.
        let error = ioctl(fd.as_raw_fd(), number::FETCH, &mut [0_u64; 2]).unwrap_err();
        assert_eq!(error, Errno::EBADF);
    }

    fn memory_is_placed_and_mapped() {
        let (gpu, uvm) = (open("/dev/nvidia0"), open("/dev/nvidia-uvm"));
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let map = |at: *mut c_void, len, flags, fd: &OwnedFd, offset| {
            let flags = libc::MAP_SHARED | flags;
            unsafe { libc::mmap(at, len, access, flags, fd.as_raw_fd(), offset) }
        };
        let content = |at: *mut c_void| unsafe { *at.cast::<[u8; 6]>() };
        let mapped = map(null_mut(), MAPPED, 0, &gpu, 0);
        assert_eq!(&content(mapped), b"mapped");
        assert_eq!(map(null_mut(), MAPPED, 0, &gpu, 4096), libc::MAP_FAILED);
        assert_eq!(Errno::last(), Errno::EINVAL);
        // The driver's range for addresses, of any length, at the program's address.
        let at = 0x2_0000_0000_u64 as *mut c_void;
        let range = map(at, 1 << 38, libc::MAP_FIXED, &uvm, at as i64);
        assert_eq!(range, at);
        assert_eq!(content(range), [0; 6]);
        let target = unsafe { range.byte_add(1 << 30) };
        let mut argument = [target as u64, 0];
        ioctl(gpu.as_raw_fd(), number::PLACE, &mut argument).unwrap();
        assert_eq!(&content(target), b"placed");
        unsafe { target.cast::<u8>().write(b'P') };
        assert_eq!(content(unsafe { target.byte_add(2 * PAGE) }), [0; 6]);
    }

    fn private_memory_becomes_shared_in_place() {
        let fd = open("/dev/nvidiactl");
        let at = private(1024);
        for page in 0..1024 {
            unsafe { at.add(page * PAGE).write(page as u8 | 1) };
        }
        unsafe { at.add(PAGE).write(3) };
        assert_eq!(share(&fd, unsafe { at.add(PAGE) }, 700), Ok((1, 3)));
        assert_eq!(unsafe { at.add(PAGE).read() }, 0x5a, "the worker wrote it");
        for page in [0, 2, 3, 257, 700, 701, 1023] {
            assert_eq!(unsafe { at.add(page * PAGE).read() }, page as u8 | 1, "page {page}");
        }
        // Again, and with pages before and after that are not shared yet.
        unsafe { at.add(PAGE).write(4) };
        assert_eq!(share(&fd, unsafe { at.add(PAGE) }, 700), Ok((1, 4)));
        assert_eq!(share(&fd, at, 900), Ok((3, 1)));
        assert_eq!(share(&fd, unsafe { at.add(5 * PAGE) }, 2), Ok((1, 5)));
        // Memory of malloc().
        let mut heap = vec![9_u8; 3 * PAGE];
        let page = (heap.as_mut_ptr() as usize).next_multiple_of(PAGE) as *mut u8;
        assert_eq!(share(&fd, page, 1), Ok((1, 9)));
        // Freed memory is given back, and addresses can be used again.
        for _ in 0..50 {
            let at = private(256);
            unsafe { at.write(1) };
            assert_eq!(share(&fd, at, 256), Ok((1, 1)));
            assert_eq!(unsafe { libc::munmap(at.cast(), 256 * PAGE) }, 0);
        }
        let held = fs::read_dir("/proc/self/fd").unwrap().find_map(|entry| {
            let path = entry.unwrap().path();
            let name = fs::read_link(&path).ok()?;
            let arena = name.to_str()?.starts_with("/memfd:tessera-cuda");
            arena.then(|| fs::metadata(path).unwrap().blocks())
        });
        let held = held.unwrap() * 512 / PAGE as u64;
        assert!((1024..1500).contains(&held), "{held} pages");
    }

    fn memory_that_cannot_be_shared_is_refused() {
        let fd = open("/dev/nvidiactl");
        let refused = Err(Errno::EFAULT);
        let at = private(4);
        let file = fs::File::open("/proc/self/exe").unwrap();
        let access = libc::PROT_READ;
        let flags = libc::MAP_PRIVATE;
        let mapped = unsafe { libc::mmap(null_mut(), PAGE, access, flags, file.as_raw_fd(), 0) };
        assert_eq!(share(&fd, mapped.cast(), 1), refused, "a file");
        assert_eq!(share(&fd, unsafe { at.add(8) }, 1), refused, "not aligned");
        assert_eq!(share(&fd, null_mut(), 1), refused, "no memory");
        assert_eq!(share(&fd, null_mut(), 0), refused, "empty");
        unsafe { libc::mprotect(at.add(PAGE).cast(), PAGE, libc::PROT_READ) };
        assert_eq!(share(&fd, at, 4), refused, "not writable");
        unsafe { libc::munmap(at.add(PAGE).cast(), PAGE) };
        assert_eq!(share(&fd, at, 4), refused, "a hole");
        assert_eq!(share(&fd, at, 1), Ok((1, 0)));
    }

    fn a_child_does_not_write_to_shared_memory_of_its_parent() {
        let fd = open("/dev/nvidiactl");
        let at = private(16);
        let byte = |page: usize| unsafe { at.add(page * PAGE) };
        (0..16).for_each(|page| unsafe { byte(page).write(page as u8) });
        share(&fd, byte(1), 14).unwrap();
        in_child(|| unsafe {
            for page in 2..16 {
                assert_eq!(byte(page).read(), page as u8);
                byte(page).write(99);
            }
            // The child's memory can be shared with the GPU in turn.
            assert_eq!(share(&fd, byte(1), 14), Ok((1, 0x5a)));
            assert_eq!(byte(2).read(), 99);
        });
        for page in 2..16 {
            assert_eq!(unsafe { byte(page).read() }, page as u8);
        }
        assert_eq!(share(&fd, byte(1), 14), Ok((1, 0x5a)));
    }
}
