//! Round trip of a trapped 4-byte read: this server, the `vfio_user` crate's server, and the socket alone.
//!
//! One client for all, blocking, in turns of a few thousand reads each, so that what the machine does meanwhile falls
//! on all of them alike. `cargo bench -p system-tests --bench protocol`

// Clippy knows only the functions marked as tests.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{Error, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vfio_user::{DmaMapFlags, DmaUnmapFlags, ServerBackend, ServerRegion};
use vfio_user_server::device::{Device, Region};
use vfio_user_server::errno::Errno;
use vfio_user_server::session::Session;

const TURNS: usize = 20;
const READS: usize = 2000;
const REQUEST: usize = 32;
const REPLY: usize = 36;

struct Register([u8; 4096]);

impl Device for Register {
    fn region(&self, index: u32) -> Option<Region<'_>> {
        (index == 0).then_some(Region::trapped(4096))
    }

    fn region_read(&mut self, _: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        data.copy_from_slice(&self.0[offset as usize..][..data.len()]);
        Ok(())
    }

    fn region_write(&mut self, _: u32, _: u64, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Errno> {
        Ok(())
    }
}

impl ServerBackend for Register {
    fn region_read(&mut self, _: u32, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        data.copy_from_slice(&self.0[offset as usize..][..data.len()]);
        Ok(())
    }

    fn region_write(&mut self, _: u32, _: u64, _: &[u8]) -> Result<(), Error> {
        Ok(())
    }

    fn dma_map(
        &mut self,
        _: DmaMapFlags,
        _: u64,
        _: u64,
        _: u64,
        _: Option<File>,
    ) -> Result<(), Error> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaUnmapFlags, _: u64, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn set_irqs(&mut self, _: u32, _: u32, _: u32, _: u32, _: Vec<File>) -> Result<(), Error> {
        Ok(())
    }
}

fn serve_ours(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        Session::new(socket.into()).unwrap().serve(&mut Register([0x5a; 4096]));
    });
}

fn serve_theirs(path: &Path) {
    let region = ServerRegion {
        region_info: vfio_bindings::bindings::vfio::vfio_region_info {
            argsz: 32,
            flags: 3,
            index: 0,
            size: 4096,
            ..Default::default()
        },
        sparse_areas: Vec::new(),
        mmap_fd: None,
    };
    let server = vfio_user::Server::new(path, true, Vec::new(), vec![region]).unwrap();
    std::thread::spawn(move || server.run(&mut Register([0x5a; 4096])));
}

/// As many bytes both ways, and nothing between.
fn serve_echo(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut buffer = [0; 4096];
        while socket.read(&mut buffer).is_ok_and(|n| n > 0) {
            if socket.write_all(&buffer[..REPLY]).is_err() {
                return;
            }
        }
    });
}

struct Contender {
    name: &'static str,
    stream: UnixStream,
    times: Vec<Duration>,
}

impl Contender {
    fn new(name: &'static str, path: &Path, serve: fn(&Path), greet: bool) -> Self {
        serve(path);
        let stream = UnixStream::connect(path).unwrap();
        let mut contender = Self { name, stream, times: Vec::with_capacity(TURNS * READS) };
        if greet {
            contender.greet();
        }
        contender
    }

    fn greet(&mut self) {
        let caps = b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576,\
            \"migration\":{\"pgsize\":4096}}}\0";
        let mut message = header(1, 20 + caps.len());
        message.extend([0; 4]);
        message.extend(caps);
        self.stream.write_all(&message).unwrap();
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).unwrap();
        let size = u32::from_ne_bytes([reply[4], reply[5], reply[6], reply[7]]) as usize;
        self.stream.read_exact(&mut vec![0; size - 16]).unwrap();
    }

    fn turn(&mut self, keep: bool) {
        let mut request = header(9, REQUEST);
        request.extend(0x10_u64.to_ne_bytes());
        request.extend([0_u32, 4].map(u32::to_ne_bytes).concat());
        let mut reply = [0; REPLY];
        for _ in 0..READS {
            let start = Instant::now();
            self.stream.write_all(&request).unwrap();
            self.stream.read_exact(&mut reply).unwrap();
            if keep {
                self.times.push(start.elapsed());
            }
        }
        assert!(self.name == "socket alone" || reply[32..] == [0x5a; 4], "the wrong answer");
    }

    fn percentile(&self, hundredths: usize) -> f64 {
        let at = (self.times.len() - 1) * hundredths / 100;
        self.times[at].as_secs_f64() * 1e6
    }
}

fn header(command: u16, size: usize) -> Vec<u8> {
    let mut bytes = [1_u16.to_ne_bytes(), command.to_ne_bytes()].concat();
    bytes.extend([size as u32, 0, 0].map(u32::to_ne_bytes).concat());
    bytes
}

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    let mut contenders = [
        Contender::new("this server", &path("ours"), serve_ours, true),
        Contender::new("vfio_user crate", &path("theirs"), serve_theirs, true),
        Contender::new("socket alone", &path("echo"), serve_echo, false),
    ];
    for turn in 0..=TURNS {
        for contender in &mut contenders {
            contender.turn(turn > 0);
        }
    }
    println!("Round trip of a 4-byte REGION_READ, {} of each", TURNS * READS);
    println!("{:<16} {:>8} {:>8} {:>8}", "", "p50 us", "p99 us", "best us");
    for contender in &mut contenders {
        contender.times.sort_unstable();
        let [p50, p99, best] = [50, 99, 0].map(|n| contender.percentile(n));
        println!("{:<16} {p50:>8.2} {p99:>8.2} {best:>8.2}", contender.name);
    }
    let [ours, theirs, echo] = &contenders;
    for (name, other) in [("vfio_user crate", theirs), ("socket alone", echo)] {
        let [p50, p99] = [50, 99].map(|n| ours.percentile(n) / other.percentile(n));
        println!("this server / {name}: p50 {p50:.2}, p99 {p99:.2}");
    }
}
