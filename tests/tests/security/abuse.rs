//! Hostile clients of a real daemon: each abuse affects at most its own vGPU.
//!
//! After each abuse, worker and software GPU are the same processes with no more descriptors than
//! before, and the guest of another vGPU works.

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use mdev_core::abi::control::reg;
use mdev_core::abi::host::{self, GpEntry, MethodHeader, SecOp};
use mdev_core::abi::mailbox::{
    ChannelCreate, ENGINE_COPY, Header, MapGuest, Opcode, PAYLOAD, Scatter, Status, USERD_GUEST,
    VA_START,
};
use mdev_core::abi::userd;
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::json;
use system_tests::bytes;
use system_tests::ram::Ram;
use system_tests::raw_client::{
    DMA_MAP, DMA_UNMAP, GET_INFO, GET_IRQ_INFO, NO_REPLY, REGION_READ, RawClient, SET_IRQS,
};
use system_tests::user::User;
use system_tests::vfio_user_guest::VfioUserGuest;
use system_tests::{Vgpud, is_alive, wait_for};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Home;
use vgpu_guest::work::{self, saxpy::Saxpy};
use zerocopy::{FromBytes, IntoBytes};

pub(super) const CONTROL: u32 = 3;
pub(super) const CONFIG: u32 = 7;

/// A daemon with a vGPU to abuse, and another vGPU at work on the same GPU.
pub(super) struct Victim {
    pub(super) vgpud: Vgpud,
    pub(super) uuid: String,
    pub(super) socket: PathBuf,
    neighbour: Device,
    pub(super) worker: u32,
    pub(super) context: u32,
    gpu: u32,
}

/// Returns the number of open descriptors of a process.
fn fds(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Reads a number from a process's status: threads, or anonymous memory in KiB.
fn status(pid: u32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

pub(super) fn memory(len: u64) -> (File, OwnedFd) {
    let fd = memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap();
    let file = File::from(fd.try_clone().unwrap());
    file.set_len(len).unwrap();
    (file, fd)
}

/// Returns the payload of a DMA_MAP with read and write access.
pub(super) fn map(address: u64, size: u64) -> Vec<u8> {
    bytes![32_u32, 3_u32, 0_u64, address, size]
}

impl Victim {
    pub(super) fn new() -> Self {
        let vgpud = Vgpud::start().unwrap();
        let start = || vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true })).unwrap();
        let (uuid, other) = (start(), start());
        let ram = Ram::new(16 * MIB, 64 * 1024).unwrap();
        let platform = VfioUserGuest::attach(&vgpud.vfio_socket(&other), ram).unwrap();
        let neighbour = Device::open(Box::new(platform)).unwrap();
        let pid = |uuid: &str| vgpud.show(uuid).unwrap()["pid"].as_u64().unwrap() as u32;
        let workers = [pid(&uuid), pid(&other)];
        let gpu = vgpud.gpu_process().unwrap();
        let socket = vgpud.vfio_socket(&uuid);
        let context = vgpud.context(&uuid).unwrap();
        Self { uuid, socket, neighbour, worker: workers[0], context, gpu, vgpud }
    }

    /// Checks that the neighbour's guest works.
    pub(super) fn neighbour_works(&self, what: &str) {
        let mut channel = Channel::new(&self.neighbour, EngineKind::Compute).unwrap();
        let work = Saxpy::new(&self.neighbour, Home::Guest, 1000).unwrap();
        work::run(&work, &mut channel).unwrap_or_else(|error| panic!("{what}: {error}"));
    }

    /// Runs an abuse and checks that nothing else is affected.
    pub(super) fn survives(&self, what: &str, abuse: impl FnOnce(&Self)) {
        drop(RawClient::attach(&self.socket));
        self.neighbour_works("before");
        let count = || [self.worker, self.context, self.gpu].map(fds);
        let mut before = count();
        // The server may not have noticed yet that the last client has left.
        wait_for("the descriptors settle", || {
            thread::sleep(Duration::from_millis(20));
            std::mem::replace(&mut before, count()) == before
        })
        .unwrap();
        abuse(self);
        assert!(
            [self.worker, self.context, self.gpu].into_iter().all(is_alive),
            "{what}: a process has died"
        );
        self.neighbour_works(what);
        let mut client = RawClient::attach(&self.socket);
        assert_eq!(client.read(CONFIG, 0, 4), [0x34, 0x12, 0x11, 0x11], "{what}");
        drop(client);
        wait_for(what, || count().iter().zip(&before).all(|(now, then)| now <= then)).unwrap();
        assert_eq!(self.vgpud.show(&self.uuid).unwrap()["pid"], self.worker, "{what}: restarted");
    }
}

#[test]
fn stalling_and_flooding_clients_harm_only_themselves() {
    let victim = Victim::new();
    victim.survives("a stall", |victim| {
        let mut client = RawClient::attach(&victim.socket);
        client.send_bytes(&RawClient::message(1, GET_INFO, 0, &[0; 16])[..9], &[]);
        thread::sleep(Duration::from_millis(200));
        assert_eq!(victim.vgpud.show(&victim.uuid).unwrap()["pid"], victim.worker, "it answers");
    });
    victim.survives("a dribble", |victim| {
        let mut client = RawClient::attach(&victim.socket);
        let message = RawClient::message(1, GET_INFO, 0, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
        for byte in message {
            client.send_bytes(&[byte], &[]);
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(client.receive().unwrap().error, 0);
    });
    victim.survives("a flood without reading replies", |victim| {
        let mut client = RawClient::attach(&victim.socket);
        client.stream.set_nonblocking(true).unwrap();
        let read = RawClient::message(1, REGION_READ, 0, &bytes![0_u64, 4_u32, 1_u32 << 20]);
        let flood = read.repeat(1000);
        let mut sent = 0;
        for _ in 0..100 {
            match client.stream.write(&flood) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert!(sent < 100 * flood.len(), "the flood is not limited");
        let memory = status(victim.worker, "RssAnon");
        assert!(memory < 16 << 10, "the worker buffers {memory} KiB of the flood");
    });
    victim.survives("a flood of posted requests", |victim| {
        let mut client = RawClient::attach(&victim.socket);
        let ask = RawClient::message(1, 999, NO_REPLY, &[0; 100]);
        (0..200).for_each(|_| client.send_bytes(&ask.repeat(100), &[]));
        client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
    });
    victim.survives("clients that leave within a message", |victim| {
        let (_, fd) = memory(1 << 16);
        let message = RawClient::message(1, DMA_MAP, 0, &map(0, 1 << 16));
        for cut in 1..message.len() {
            let mut client = RawClient::attach(&victim.socket);
            client.send_bytes(&message[..cut], &[fd.as_fd()]);
        }
    });
    victim.survives("a second client beside the first", |victim| {
        let mut first = RawClient::attach(&victim.socket);
        let crowd: Vec<_> = (0..50).map(|_| RawClient::connect(&victim.socket)).collect();
        assert_eq!(first.read(CONFIG, 0, 2), [0x34, 0x12]);
        drop(crowd);
    });
}

#[test]
fn descriptors_of_the_wrong_kind_are_refused_and_closed() {
    let victim = Victim::new();
    victim.survives("wrong descriptors", |victim| {
        let mut client = RawClient::attach(&victim.socket);
        let event: OwnedFd = EventFd::new().unwrap().into();
        let (pipe, _writer) = nix::unistd::pipe().unwrap();
        let folder: OwnedFd = File::open("/").unwrap().into();
        let null: OwnedFd = File::open("/dev/null").unwrap().into();
        let (_, ram) = memory(0x1000);
        let not_events = [&pipe, &folder, &null, &ram];
        for (page, fd) in [&event].into_iter().chain(not_events).enumerate() {
            // Descriptors without memory are refused at once or at the guest's first access, and
            // kill no process.
            let at = 0x100_0000 * (page as u64 + 1);
            let reply = client.request(DMA_MAP, &map(at, 0x1000), &[fd]);
            if reply.error == 0 {
                client.write(CONTROL, reg::MAILBOX_LO, &(at as u32).to_le_bytes());
                client.write(CONTROL, reg::MAILBOX_DOORBELL, &[1, 0, 0, 0]);
            }
        }
        let set = bytes![20_u32, 0x24_u32, 1_u32, 0_u32, 1_u32];
        for fd in not_events {
            client.fails_with(SET_IRQS, &set, &[fd], libc::EINVAL);
        }
        let many = vec![&ram; 100];
        client.fails_with(DMA_MAP, &map(0xf000_0000, 0x1000), &many, libc::EINVAL);
        client.fails_with(GET_IRQ_INFO, &bytes![0_u32], &[&ram], libc::EINVAL);
        client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
    });
}

#[test]
fn exceeded_limits_are_errors_and_recover() {
    let victim = Victim::new();
    for round in 0..2 {
        victim.survives("more maps than the limit", |victim| {
            let mut client = RawClient::attach(&victim.socket);
            let (_, ram) = memory(0x1000);
            let mut maps = 0;
            let error = loop {
                let reply = client.request(DMA_MAP, &map(maps * 0x1000, 0x1000), &[&ram]);
                if reply.error != 0 {
                    break reply.error.cast_signed();
                }
                maps += 1;
                assert!(maps < 70_000, "there is no limit");
            };
            assert!(error == libc::ENOSPC && maps >= 1000, "round {round}: {error} at {maps}");
            client.ok(DMA_UNMAP, &bytes![24_u32, 0_u32, 0_u64, 0x1000_u64]);
            client.ok_with(DMA_MAP, &map(0, 0x1000), &[&ram]);
        });
    }
    victim.survives("messages that are too long", |victim| {
        for size in [u32::MAX, 0x8000_0000, 2 << 20, 15, 0] {
            let mut client = RawClient::attach(&victim.socket);
            client.send_bytes(&bytes![1_u16, GET_INFO, size, 0_u32, 0_u32], &[]);
            client.is_closed();
        }
    });
}

/// Guest RAM that the client truncates after sharing it.
pub(super) struct Doomed<'a> {
    pub(super) client: RawClient,
    pub(super) file: &'a File,
}

pub(super) const MAILBOX: u64 = 0x1000;
pub(super) const RING: u64 = 0x2000;
pub(super) const USERD: u64 = 0x3000;
pub(super) const PUSHBUFFER: u64 = 0x4000;
pub(super) const RAM: u64 = 0x10_0000;

impl Doomed<'_> {
    pub(super) fn ring(&mut self) {
        self.client.write(CONTROL, reg::MAILBOX_LO, &(MAILBOX as u32).to_le_bytes());
        self.client.write(CONTROL, reg::MAILBOX_DOORBELL, &[1, 0, 0, 0]);
    }

    pub(super) fn request(&mut self, opcode: Opcode, payload: &[u8]) -> Vec<u8> {
        let request_bytes = payload.len() as u32;
        let header = Header { opcode: opcode as u32, request_bytes, ..Header::default() };
        self.file.write_all_at(header.as_bytes(), MAILBOX).unwrap();
        self.file.write_all_at(payload, MAILBOX + PAYLOAD as u64).unwrap();
        self.ring();
        let mut page = [0; 4096];
        self.file.read_exact_at(&mut page, MAILBOX).unwrap();
        let (header, rest) = Header::read_from_prefix(&page).unwrap();
        assert_eq!(header.status, Status::Ok as u32, "{opcode:?}");
        rest[..header.reply_bytes as usize].to_vec()
    }
}

#[test]
fn truncated_guest_memory_kills_neither_worker_nor_gpu() {
    let victim = Victim::new();
    victim.survives("a mailbox whose file is gone", |victim| {
        let mut client = RawClient::attach(&victim.socket);
        let (file, ram) = memory(RAM);
        client.ok_with(DMA_MAP, &map(0, RAM), &[&ram]);
        let mut doomed = Doomed { client, file: &file };
        doomed.request(Opcode::GetInfo, &[]);
        file.set_len(0).unwrap();
        (0..10).for_each(|_| doomed.ring());
        doomed.client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
    });
    victim.survives("a channel whose rings are gone", |victim| {
        let mut client = RawClient::attach(&victim.socket);
        let (file, ram) = memory(RAM);
        client.ok_with(DMA_MAP, &map(0, RAM), &[&ram]);
        client.write(CONFIG, 4, &[6, 0]);
        let mut doomed = Doomed { client, file: &file };
        let (list, page) =
            (MapGuest { va: VA_START, flags: 0, count: 1 }, Scatter { address: 0, length: RAM });
        doomed.request(Opcode::MapGuest, &[list.as_bytes(), page.as_bytes()].concat());
        let create = ChannelCreate {
            engine: ENGINE_COPY,
            gpfifo_entries: 16,
            gpfifo_va: VA_START + RING,
            userd: USERD,
            userd_aperture: USERD_GUEST,
            vector: 0,
            ..ChannelCreate::default()
        };
        let created = doomed.request(Opcode::ChannelCreate, create.as_bytes());
        let nop =
            MethodHeader { op: SecOp::Inc, subchannel: 0, method: host::NOP, count: 1 }.encode();
        file.write_all_at([nop, 0].as_bytes(), PUSHBUFFER).unwrap();
        let entry = GpEntry::Segment { va: VA_START + PUSHBUFFER, dwords: 2 }.encode();
        (0..16).for_each(|n| file.write_all_at(&entry.to_le_bytes(), RING + 8 * n).unwrap());
        file.write_all_at(&15_u32.to_le_bytes(), USERD + userd::GP_PUT).unwrap();
        // The GPU has mapped the ring, the pushbuffer and USERD, and reads them by itself.
        doomed.client.write(CONTROL, reg::WAKE, &created[4..8]);
        file.set_len(0).unwrap();
        for _ in 0..20 {
            doomed.client.write(CONTROL, reg::WAKE, &created[4..8]);
            thread::sleep(Duration::from_millis(2));
        }
        doomed.client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
    });
}

/// Returns the CPU time of a process in clock ticks of 10 ms.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    [11, 12].map(|at: usize| fields[at].parse::<u64>().unwrap()).iter().sum()
}

/// Sets the descriptor limit of a process and returns the previous limit.
fn limit_fds(pid: u32, limit: libc::rlim_t) -> libc::rlim_t {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // Not every root may set limits of other users' processes, but each user may.
    let user = User::of(pid).unwrap();
    let pid = pid.cast_signed();
    let limit_it = || {
        // SAFETY: the kernel writes to a valid structure.
        let got =
            unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut old) };
        let new = libc::rlimit { rlim_cur: limit, ..old };
        let none = std::ptr::null_mut();
        // SAFETY: the kernel reads from a valid structure.
        let set = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const new, none) };
        assert_eq!((got, set), (0, 0));
        Ok(old.rlim_cur)
    };
    user.run(limit_it).unwrap()
}

#[test]
fn a_worker_out_of_descriptors_waits_and_recovers() {
    let victim = Victim::new();
    victim.survives("no descriptors left", |victim| {
        // Open descriptors stay open, and no new one can be opened.
        let before = limit_fds(victim.worker, 3);
        let mut crowd: Vec<_> = (0..20).map(|_| RawClient::connect(&victim.socket)).collect();
        thread::sleep(Duration::from_millis(200));
        let used = ticks(victim.worker);
        thread::sleep(Duration::from_secs(1));
        let used = ticks(victim.worker) - used;
        assert!(used < 30, "{used} ticks of CPU time in a second of waiting");
        limit_fds(victim.worker, before);
        crowd.clear();
    });
}

#[test]
fn ten_thousand_clients_do_not_grow_a_worker() {
    let victim = Victim::new();
    let (_, ram) = memory(1 << 20);
    let attach = || {
        let mut client = RawClient::attach(&victim.socket);
        client.ok_with(DMA_MAP, &map(0, 1 << 20), &[&ram]);
        assert_eq!(client.read(CONFIG, 0, 2), [0x34, 0x12]);
        // A child process of another test may hold a copy of the socket between fork and exec.
        client.stream.shutdown(Shutdown::Both).unwrap();
    };
    let pids = [victim.worker, victim.context];
    let measure = |name: &str| pids.map(|pid| status(pid, name));
    victim.survives("ten thousand clients", |_| {
        (0..500).for_each(|_| attach());
        // A thread that closes sockets ends a moment after the last one.
        let mut threads = measure("Threads");
        wait_for("the threads settle", || {
            thread::sleep(Duration::from_millis(200));
            std::mem::replace(&mut threads, measure("Threads")) == threads
        })
        .unwrap();
        let memory = measure("RssAnon");
        (0..10_000).for_each(|_| attach());
        wait_for("as many threads as before", || measure("Threads") == threads).unwrap();
        for (before, after) in memory.into_iter().zip(measure("RssAnon")) {
            let grown = after.saturating_sub(before);
            assert!(grown < 512, "ten thousand clients cost {grown} KiB");
        }
    });
}
