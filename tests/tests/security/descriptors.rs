//! Descriptors that a client, or a worker that was compromised, chose so that using or closing them
//! waits for ever.

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use cuda_socket::{MAX_PACKET, Reply, Request, VERSION, decode_numbered, encode, encode_numbered};
use ipc::seqpacket::SeqPacket;
use mdev_core::abi::control::reg;
use mdev_core::units::{GIB, MIB, PAGE_SIZE};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{SockType, getsockopt, sockopt};
use nix::unistd::Pid;
use serde_json::json;
use system_tests::bytes;
use system_tests::fuse::SilentFs;
use system_tests::raw_client::{DMA_MAP, DMA_UNMAP, GET_INFO, RawClient, SET_IRQS};
use system_tests::{Vgpud, skipped};

use super::abuse::{CONTROL, RAM, Victim, map, memory};

const MSI: u32 = 1;
/// `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`.
const ASSIGN: u32 = 0x24;
/// `VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER`.
const FIRE: u32 = 0x21;

/// Mounts a file system that falls silent, or says why the test is skipped.
fn silent_fs() -> Option<SilentFs> {
    let fs = SilentFs::mount();
    if let Err(error) = &fs {
        skipped(&format!("no file system in user space can be mounted: {error}"));
    }
    fs.ok()
}

#[test]
fn an_eventfd_that_blocks_does_not_stop_the_worker() {
    let victim = Victim::new();
    victim.survives("a full eventfd that blocks", |victim| {
        let mut client = RawClient::attach(&victim.socket);
        for _ in 0..3 {
            let event = EventFd::from_flags(EfdFlags::empty()).unwrap();
            let fd = event.as_fd().try_clone_to_owned().unwrap();
            let set = bytes![20_u32, ASSIGN, MSI, 0_u32, 1_u32];
            client.ok_with(SET_IRQS, &set, &[&fd]);
            fcntl(&fd, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
            event.write(u64::MAX - 1).unwrap();
            client.ok(SET_IRQS, &bytes![20_u32, FIRE, MSI, 0_u32, 1_u32]);
            assert_eq!(victim.vgpud.show(&victim.uuid).unwrap()["pid"], victim.worker);
        }
        client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
    });
}

#[test]
fn interrupts_arrive_after_a_client_that_blocked_an_eventfd() {
    let victim = Victim::new();
    let assign = |client: &mut RawClient, event: &EventFd| {
        let fd = event.as_fd().try_clone_to_owned().unwrap();
        client.ok_with(SET_IRQS, &bytes![20_u32, ASSIGN, MSI, 0_u32, 1_u32], &[&fd]);
    };
    let fire = bytes![20_u32, FIRE, MSI, 0_u32, 1_u32];
    let full = EventFd::from_flags(EfdFlags::empty()).unwrap();
    full.write(u64::MAX - 1).unwrap();
    let mut client = RawClient::attach(&victim.socket);
    assign(&mut client, &full);
    fcntl(&full, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    client.ok(SET_IRQS, &fire);
    drop(client);
    let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
    let mut client = RawClient::attach(&victim.socket);
    assign(&mut client, &event);
    client.ok(SET_IRQS, &fire);
    assert_eq!(event.read(), Ok(1));
}

#[test]
fn a_silent_file_system_as_guest_memory_stops_neither_worker_nor_manager() -> Result<()> {
    let victim = Victim::new();
    let Some(fs) = silent_fs() else { return Ok(()) };
    let file = fs.file().unwrap();
    let mut client = RawClient::attach(&victim.socket);
    let (_, ram) = memory(RAM);
    client.ok_with(DMA_MAP, &map(0, RAM), &[&ram]);
    fs.fall_silent();
    // The VM starts all the same, as with any other memory that cannot be shared.
    client.ok_with(DMA_MAP, &map(8 * GIB, 64 * MIB), &[file]);
    client.write(CONTROL, reg::MAILBOX_LO, &[0; 4]);
    client.write(CONTROL, reg::MAILBOX_HI, &2_u32.to_le_bytes());
    client.write(CONTROL, reg::MAILBOX_DOORBELL, &[1, 0, 0, 0]);
    client.ok(DMA_UNMAP, &bytes![24_u32, 0_u32, 8 * GIB, 64 * MIB]);
    // Where no descriptor is due, or another kind.
    client.fails_with(SET_IRQS, &bytes![20_u32, ASSIGN, MSI, 0_u32, 1_u32], &[file], libc::EINVAL);
    let files = vec![file; 8];
    client.fails_with(DMA_MAP, &map(16 * GIB, PAGE_SIZE), &files, libc::EINVAL);
    client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
    assert_eq!(victim.vgpud.show(&victim.uuid)?["pid"], victim.worker);
    victim.neighbour_works("a silent file system");
    // More files than can be kept: the client is cut off.
    let message = RawClient::message(0, DMA_MAP, 0, &map(16 * GIB, PAGE_SIZE));
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    // Until the worker knows that they cannot be closed, it refuses them.
    while client.try_send_bytes(&message, &files).is_ok() && client.receive().is_some() {
        thread::sleep(Duration::from_millis(50));
    }
    victim.neighbour_works("many files of a silent file system");
    assert_eq!(victim.vgpud.show(&victim.uuid)?["pid"], victim.worker);
    drop(fs);
    victim.survives("the file system is gone", |_| {});
    Ok(())
}

#[test]
fn a_silent_file_system_as_a_programs_file_stops_neither_worker_nor_other_programs() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-1C", "run": true }))?;
    let worker = vgpud.show(&uuid)?["pid"].clone();
    let Some(fs) = silent_fs() else { return Ok(()) };
    let file = fs.file().unwrap().as_fd();
    let mut buffer = vec![0; MAX_PACKET];
    let mut answer = |program: &SeqPacket| -> Result<(u64, Reply)> {
        let len = program.recv(&mut buffer)?.context("No answer")?.len;
        Ok(decode_numbered(&buffer[..len])?)
    };
    fs.fall_silent();
    for files in [&[][..], &[file]] {
        let program = SeqPacket::connect(&vgpud.vfio_socket(&uuid).with_file_name("cuda.sock"))?;
        program.send(&encode(&Request::Hello { version: VERSION })?, files)?;
        assert!(matches!(answer(&program)?, (0, Reply::Welcome(_))), "{} files", files.len());
        for number in 1..4 {
            program.send(&encode_numbered(number, &Request::Identify)?, files)?;
            assert_eq!(answer(&program)?, (number, Reply::Failed { errno: libc::ENOTTY }));
        }
        // What is no request does not stop the worker either.
        program.send(&[0xff; 9], files)?;
        assert!(program.recv(&mut [0; 64])?.is_none(), "the program is cut off");
    }
    assert_eq!(vgpud.show(&uuid)?["pid"], worker);
    drop(fs);
    Ok(())
}

/// Returns the connected seqpacket sockets of a process.
fn sockets(pid: u32) -> Result<Vec<SeqPacket>> {
    let open = |number: RawFd| {
        // SAFETY: creates a descriptor of the process.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        // SAFETY: the descriptor is new and has no other owner.
        let pidfd = unsafe { OwnedFd::from_raw_fd(i32::try_from(pidfd)?) };
        // SAFETY: duplicates a descriptor of the other process.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) };
        anyhow::ensure!(fd >= 0, "pidfd_getfd: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new and has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd)?) })
    };
    let mut sockets = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        if !fs::read_link(entry.path())?.to_string_lossy().starts_with("socket:") {
            continue;
        }
        let fd = open(entry.file_name().to_string_lossy().parse()?)?;
        let is_seqpacket = getsockopt(&fd, sockopt::SockType)? == SockType::SeqPacket;
        if is_seqpacket && !getsockopt(&fd, sockopt::AcceptConn)? {
            sockets.push(SeqPacket::from(fd));
        }
    }
    Ok(sockets)
}

#[test]
fn a_descriptor_on_a_workers_sockets_does_not_stop_the_engine() -> Result<()> {
    let victim = Victim::new();
    let Some(fs) = silent_fs() else { return Ok(()) };
    let file: BorrowedFd<'_> = fs.file().unwrap().as_fd();
    let pid = Pid::from_raw(victim.worker.cast_signed());
    let sockets = match sockets(victim.worker) {
        Ok(sockets) => sockets,
        Err(error) => {
            skipped(&format!("a worker cannot be impersonated: {error}"));
            return Ok(());
        }
    };
    assert!(sockets.len() >= 2, "the requests to the GPU, and the wake-ups");
    kill(pid, Signal::SIGSTOP)?;
    fs.fall_silent();
    for socket in &sockets {
        let _ = socket.try_send(&[1], &[file]);
    }
    victim.neighbour_works("descriptors on a worker's sockets");
    drop(fs);
    // The anchor has killed a worker that sends it what is no message, and started another one.
    let _ = kill(pid, Signal::SIGCONT);
    drop(RawClient::attach(&victim.socket));
    victim.neighbour_works("another worker");
    Ok(())
}
